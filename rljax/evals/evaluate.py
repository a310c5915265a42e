"""Held-out evaluation: sample every prompt, score, summarise."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.errors import InputError
from rljax.evals.metrics import answering_rate, avg_at_k, maj_at_k, pass_at_k
from rljax.losses.reports import CORRECT
from rljax.rewards.answers import extract_boxed, extract_final, same_answer

if TYPE_CHECKING:
    from rljax.data import Prompt, Tokenizer
    from rljax.rewards import Scorer
    from rljax.sampling import Engine, Response, SamplingParams


@dataclasses.dataclass(frozen=True)
class AnswerParser:
    """Extracts answers from completions, for majority votes and the answering rate.

    Attributes:
      extract: The answer in a completion; None where there is none.
      same: Whether two answers are the same.
    """

    extract: Callable[[str], str | None]
    same: Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class EvalTask:
    """One evaluation: its name in the tags, and how often and with which keys it samples.

    Attributes:
      name: The name in the tags, without '/'.
      num_generations: Samples a prompt (k).
      seed: Of the sampling keys; of a run's evaluations, `seed_for_evaluation` of its seed.
      parser: Extracts answers for maj@k and answering_rate; None: as the verifier does, which
        for all but 'boxed' and 'numeric' takes the whole text.
    """

    name: str
    num_generations: int = 1
    seed: int = 0
    parser: AnswerParser | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, in one line."""
        if not self.name or "/" in self.name:
            raise InputError(f"name={self.name!r} is no name without '/'; rename the task")
        if self.num_generations < 1:
            raise InputError(
                f"num_generations must be at least 1, got {self.num_generations}; use 1 or more"
            )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The samples of an evaluation; row i holds those of prompt i.

    Attributes:
      completions: Their texts, [prompts][k].
      answers: The answers in them, [prompts][k]; None where there is none. Of one prompt, equal
        answers are equal strings.
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
    def correct(self) -> Bool[np.ndarray, "prompts k"]:
        """Whether each sample is correct (its score above `CORRECT`); False where not valid."""
        return (self.scores > CORRECT) & self.valid


def evaluate(
    engine: "Engine",
    prompts: Sequence["Prompt"],
    scorer: "Scorer",
    tokenizer: "Tokenizer",
    sampling: "SamplingParams",
    task: EvalTask,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Score a model on held-out prompts.

    Greedy decoding is `sampling.temperature == 0` with one generation; its tags are
    `eval/<task>/greedy` and `eval/<task>/greedy_...`, so that one log line can hold it beside a
    sampled evaluation, whose tags are avg@k, pass@k (k = 1, 2, 4, ... up to num_generations, and
    num_generations itself), maj@k, score_mean, answering_rate, length_mean, truncated_frac.

    Two evaluations with the same weights and seed draw the same samples.

    A sample whose scoring failed (valid False: the verifier raised, hung or returned no number) is
    counted in `invalid_frac` and left out of all scores, not scored as wrong: means are over the
    valid samples, pass@k over the prompts with k valid ones.

    Args:
      engine: The sampler, its weights loaded.
      prompts: The prompts.
      scorer: Its first function is the verifier, whose scores decide what is correct.
      tokenizer: Decodes the samples.
      sampling: How to sample; where it names no end ids, the tokenizer's are used.
      task: Name, number of samples a prompt and seed.
      on_progress: Called with how many prompts are sampled and how many there are, after each.

    Returns:
      Tags to numbers.

    Raises:
      InputError: There are no prompts, or temperature 0 comes with k > 1.
    """
    evaluation = sample(engine, prompts, scorer, tokenizer, sampling, task, on_progress)
    return summarize(evaluation, task.name, greedy=sampling.temperature == 0)


def sample(
    engine: "Engine",
    prompts: Sequence["Prompt"],
    scorer: "Scorer",
    tokenizer: "Tokenizer",
    sampling: "SamplingParams",
    task: EvalTask,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample and score; the arguments are those of `evaluate`.

    Returns:
      The samples and their scores, in the order of the prompts.
    """
    if not prompts:
        raise InputError("prompts must not be empty, got none; give the task a held-out split")
    if sampling.temperature == 0 and task.num_generations != 1:
        raise InputError(
            f"num_generations must be 1 at temperature 0, got {task.num_generations}: "
            "greedy samples are all alike; raise the temperature or use one"
        )
    if not sampling.stop_token_ids:
        sampling = dataclasses.replace(sampling, stop_token_ids=tuple(tokenizer.end_ids))
    parser = task.parser or _PARSERS.get(scorer.names[0], WHOLE)
    groups = engine.generate(
        prompts=[prompt.tokens for prompt in prompts],
        num_generations=task.num_generations,
        sampling=sampling,
        seed=task.seed,
        prompt_ids=[prompt.id for prompt in prompts],
        draws=[prompt.draw for prompt in prompts],  # the same keys at every evaluation
    )
    responses = []
    for done, group in enumerate(groups, 1):
        responses.extend(group)
        if on_progress is not None:
            on_progress(done, len(prompts))
    # Groups are yielded as they finish; score them in the order of the prompts.
    responses.sort(key=lambda response: (response.prompt_index, response.sample_index))
    return _scored(responses, prompts, scorer, tokenizer, parser, task.num_generations)


def _scored(
    responses: Sequence["Response"],
    prompts: Sequence["Prompt"],
    scorer: "Scorer",
    tokenizer: "Tokenizer",
    parser: AnswerParser,
    num_generations: int,
) -> Evaluation:
    """Scores responses in the order of the prompts."""
    shape = (len(prompts), num_generations)
    if len(responses) != shape[0] * shape[1]:
        raise RuntimeError(f"the engine returned {len(responses)} responses, requested {shape}")
    token_ids = [[int(token) for token in response.tokens] for response in responses]
    completions = [tokenizer.decode(ids) for ids in token_ids]
    sources = [prompts[response.prompt_index] for response in responses]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    scored = scorer(
        prompts=[prompt.text for prompt in sources],
        completions=completions,
        completion_ids=token_ids,
        columns={name: [prompt.columns.get(name) for prompt in sources] for name in names},
    )
    starts = range(0, len(completions), num_generations)
    rows = [completions[start : start + num_generations] for start in starts]
    return Evaluation(
        completions=rows,
        answers=[
            _unify([parser.extract(completion) for completion in row], parser.same) for row in rows
        ],
        scores=np.asarray(scored.scores, np.float32).reshape(shape),
        valid=np.asarray(scored.valid, bool).reshape(shape),
        lengths=np.array([len(ids) for ids in token_ids]).reshape(shape),
        truncated=np.array([bool(response.truncated) for response in responses]).reshape(shape),
    )


def summarize(evaluation: Evaluation, task: str, greedy: bool = False) -> dict[str, float]:
    """The tags of an evaluation; `evaluate` lists them.

    Args:
      evaluation: What was sampled and scored.
      task: The name in the tags.
      greedy: Whether it was decoded greedily.

    Returns:
      Tags to numbers.
    """
    correct, valid = evaluation.correct, evaluation.valid
    k = correct.shape[1]
    prefix = f"eval/{task}/greedy_" if greedy else f"eval/{task}/"
    if greedy:
        values = {f"eval/{task}/greedy": avg_at_k(correct, valid)}
    else:
        values = {f"{prefix}avg@{k}": avg_at_k(correct, valid)}
        for tries in _tries(k):
            values[f"{prefix}pass@{tries}"] = pass_at_k(correct, tries, valid)
        values[f"{prefix}maj@{k}"] = maj_at_k(evaluation.answers, correct, valid)
    values[f"{prefix}score_mean"] = _mean(evaluation.scores[valid])
    values[f"{prefix}answering_rate"] = answering_rate(evaluation.answers, valid)
    values[f"{prefix}length_mean"] = _mean(evaluation.lengths)
    values[f"{prefix}truncated_frac"] = _mean(evaluation.truncated)
    values[f"{prefix}invalid_frac"] = _mean(~valid)
    return values


def _whole(completion: str) -> str | None:
    return " ".join(completion.split()) or None


WHOLE = AnswerParser(_whole, operator.eq)
_PARSERS = {
    "boxed": AnswerParser(extract_boxed, same_answer),
    "numeric": AnswerParser(extract_final, same_answer),
}


def _unify(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[str | None]:
    """Replaces each answer by the first one that is the same."""
    distinct: list[str] = []
    found: list[str | None] = []
    for answer in answers:
        if answer is not None:
            known = (other for other in distinct if same(answer, other))
            first = next(known, None)
            if first is None:
                distinct.append(answer)
            answer = answer if first is None else first
        found.append(answer)
    return found


def _tries(k: int) -> list[int]:
    powers = [2**exponent for exponent in range(k.bit_length())]
    return powers if powers[-1] == k else [*powers, k]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
