"""Held-out evaluation: sample every prompt, score, summarise."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.errors import InputError
from rljax.evals.metrics import answering_rate, avg_at_k, maj_at_k, pass_at_k
from rljax.rewards.answers import extract_boxed, extract_final, same_answer

if TYPE_CHECKING:
    from rljax.data import Prompt, Tokenizer
    from rljax.rewards import Scorer
    from rljax.sampling import Engine, SamplingParams

RIGHT_ABOVE = 0.5
"""A sample is right where its verifier's score is above this: 0/1 and −1/1 both read so."""


@dataclasses.dataclass(frozen=True)
class AnswerParser:
    """How answers are read off completions, for votes and the answering rate.

    Attributes:
        extract: The answer in a completion; None where there is none.
        same: Whether two answers are the same.
    """

    extract: Callable[[str], str | None]
    same: Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The samples of an evaluation, row i answering prompt i.

    Attributes:
        completions: Their texts, [prompts][k].
        answers: The answers in them, [prompts][k]; None where there is none. Those of one prompt
            that are the same are spelt the same.
        scores: The verifier's scores.
        valid: False where scoring failed.
        lengths: Tokens, the end token included.
        truncated: Whether the length limit cut it off.
    """

    completions: list[list[str]]
    answers: list[list[str | None]]
    scores: Float[np.ndarray, "prompts k"]
    valid: Bool[np.ndarray, "prompts k"]
    lengths: Int[np.ndarray, "prompts k"]
    truncated: Bool[np.ndarray, "prompts k"]

    @property
    def right(self) -> Bool[np.ndarray, "prompts k"]:
        """Whether each sample is right; False where it is not valid."""
        return (self.scores > RIGHT_ABOVE) & self.valid


def evaluate(
    engine: "Engine",
    prompts: Sequence["Prompt"],
    scorer: "Scorer",
    tokenizer: "Tokenizer",
    sampling: "SamplingParams",
    num_generations: int,
    seed: int,
    task: str,
    reading: AnswerParser | None = None,
) -> dict[str, float]:
    """Score a model on held-out prompts.

    Greedy decoding is `sampling.temperature == 0` with one generation; its tags are
    `eval/<task>/greedy` and `eval/<task>/greedy_...`, so that it can stand in one log line with a
    sampled evaluation, whose tags are avg@k, pass@k (k = 1, 2, 4, ... up to num_generations, and
    num_generations itself), maj@k, score_mean, answering_rate, length_mean, truncated_frac.

    Two evaluations with the same weights and seed draw the same samples.

    A sample whose scoring failed (valid False: the verifier raised, hung or gave no number) says
    nothing about the model. It is counted in `invalid_frac` and left out of all scores, not scored
    as wrong: means are over the valid samples, pass@k over the prompts with k valid ones.

    Args:
        engine: The sampler, its weights loaded.
        prompts: What to ask.
        scorer: Its first function is the verifier that says what is right.
        tokenizer: Decodes the samples.
        sampling: How to sample; where it names no end ids, the tokenizer's are used.
        num_generations: Samples a prompt (k).
        seed: Of the sampling keys.
        task: The name in the tags, without '/'.
        reading: How answers are read, for maj@k and answering_rate; by default as the verifier
            reads them, which for all but 'boxed' and 'numeric' is the whole text.

    Returns:
        Tags to numbers.

    Raises:
        ValueError: If there are no prompts, k is not positive, or greedy is asked with k > 1.
    """
    if not task or "/" in task:
        raise InputError(f"task must be a name without '/', got {task!r}; rename it")
    evaluation = sample(
        engine, prompts, scorer, tokenizer, sampling, num_generations, seed, reading
    )
    return summarize(evaluation, task, greedy=sampling.temperature == 0)


def sample(
    engine: "Engine",
    prompts: Sequence["Prompt"],
    scorer: "Scorer",
    tokenizer: "Tokenizer",
    sampling: "SamplingParams",
    num_generations: int,
    seed: int,
    reading: AnswerParser | None = None,
) -> Evaluation:
    """Sample and score; the arguments are those of `evaluate`.

    Returns:
        The samples and their scores, in the order of the prompts.
    """
    if not prompts:
        raise InputError("prompts must not be empty, got none; give the task a held-out split")
    if num_generations < 1:
        raise InputError(
            f"num_generations must be at least 1, got {num_generations}; use 1 or more"
        )
    if sampling.temperature == 0 and num_generations != 1:
        raise InputError(
            f"num_generations must be 1 at temperature 0, got {num_generations}: "
            "greedy samples are all alike; raise the temperature or ask for one"
        )
    if not sampling.stop_token_ids:
        sampling = dataclasses.replace(sampling, stop_token_ids=tuple(tokenizer.end_ids))
    reading = reading or _READINGS.get(scorer.names[0], WHOLE)
    groups = engine.generate(
        prompts=[prompt.tokens for prompt in prompts],
        num_generations=num_generations,
        sampling=sampling,
        seed=seed,
        prompt_ids=[prompt.id for prompt in prompts],
        draws=[prompt.draw for prompt in prompts],  # not counted on: every evaluation draws alike
    )
    # Groups come as they finish; score them in the order of the prompts.
    responses = sorted(
        (response for group in groups for response in group),
        key=lambda response: (response.prompt_index, response.sample_index),
    )
    shape = (len(prompts), num_generations)
    if len(responses) != shape[0] * shape[1]:
        raise RuntimeError(f"the engine gave {len(responses)} responses for {shape} asked")
    token_ids = [[int(token) for token in response.tokens] for response in responses]
    completions = [tokenizer.decode(ids) for ids in token_ids]
    asked = [prompts[response.prompt_index] for response in responses]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    scored = scorer(
        prompts=[prompt.text for prompt in asked],
        completions=completions,
        completion_ids=token_ids,
        columns={name: [prompt.columns.get(name) for prompt in asked] for name in names},
    )

    def in_rows(values: list[Any]) -> list[list[Any]]:
        return [
            values[start : start + num_generations]
            for start in range(0, len(values), num_generations)
        ]

    return Evaluation(
        completions=in_rows(completions),
        answers=[
            _spelt_alike([reading.extract(completion) for completion in row], reading.same)
            for row in in_rows(completions)
        ],
        scores=np.asarray(scored.scores, np.float32).reshape(shape),
        valid=np.asarray(scored.valid, bool).reshape(shape),
        lengths=np.array([len(ids) for ids in token_ids]).reshape(shape),
        truncated=np.array([bool(response.truncated) for response in responses]).reshape(shape),
    )


def summarize(evaluation: Evaluation, task: str, greedy: bool = False) -> dict[str, float]:
    """The tags of an evaluation; which they are is said at `evaluate`.

    Args:
        evaluation: What was sampled and scored.
        task: The name in the tags.
        greedy: Whether it was decoded greedily.

    Returns:
        Tags to numbers.
    """
    right, valid = evaluation.right, evaluation.valid
    k = right.shape[1]
    prefix = f"eval/{task}/greedy_" if greedy else f"eval/{task}/"
    if greedy:
        values = {f"eval/{task}/greedy": avg_at_k(right, valid)}
    else:
        values = {f"{prefix}avg@{k}": avg_at_k(right, valid)}
        for tries in _tries(k):
            values[f"{prefix}pass@{tries}"] = pass_at_k(right, tries, valid)
        values[f"{prefix}maj@{k}"] = maj_at_k(evaluation.answers, right, valid)
    values[f"{prefix}score_mean"] = _mean(evaluation.scores[valid])
    values[f"{prefix}answering_rate"] = answering_rate(evaluation.answers, valid)
    values[f"{prefix}length_mean"] = _mean(evaluation.lengths)
    values[f"{prefix}truncated_frac"] = _mean(evaluation.truncated)
    values[f"{prefix}invalid_frac"] = _mean(~valid)
    return values


def _whole(completion: str) -> str | None:
    return " ".join(completion.split()) or None


WHOLE = AnswerParser(_whole, operator.eq)
_READINGS = {
    "boxed": AnswerParser(extract_boxed, same_answer),
    "numeric": AnswerParser(extract_final, same_answer),
}


def _spelt_alike(
    answers: Sequence[str | None], same: Callable[[str, str], bool]
) -> list[str | None]:
    """Each answer in the spelling of the first that is the same."""
    spellings: list[str] = []
    found: list[str | None] = []
    for answer in answers:
        if answer is not None:
            known = (spelling for spelling in spellings if same(answer, spelling))
            spelling = next(known, answer)
            if spelling is answer:
                spellings.append(answer)
            answer = spelling
        found.append(answer)
    return found


def _tries(k: int) -> list[int]:
    powers = [2**exponent for exponent in range(k.bit_length())]
    return powers if powers[-1] == k else [*powers, k]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
