"""Scored groups of responses, and the `Batch` that is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch
from rljax.data import Prompt, Tokenizer
from rljax.errors import InputError
from rljax.losses import Mean, equal_scores
from rljax.rewards import Scorer
from rljax.sampling import Response


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A prompt, its G responses and what the reward functions said of them.

    Attributes:
      prompt: The question.
      responses: G responses, by sample index.
      texts: Their texts.
      rewards: float32 [G], weighted sum of the reward functions.
      scores: float32 [G], the verifier's.
      components: float32 [G, K], each function apart; NaN where it failed.
      valid: bool [G], False where scoring failed.
    """

    prompt: Prompt
    responses: list[Response]
    texts: list[str]
    rewards: np.ndarray
    scores: np.ndarray
    components: np.ndarray
    valid: np.ndarray

    @property
    def degenerate(self) -> bool:
        """Whether the raw scores of the valid responses are all equal: nothing to learn from.

        By the rule of the losses: what fills the batch is what gets an advantage.
        """
        return equal_scores(self.scores, self.valid)


def score_groups(
    prompts: list[Prompt], groups: list[list[Response]], tokenizer: Tokenizer, scorer: Scorer
) -> list[ScoredGroup]:
    """Scores groups of responses in one call of the reward functions.

    Args:
      prompts: One a group.
      groups: The responses of each.
      tokenizer: Decodes the responses.
      scorer: The reward functions.
    """
    flat = [(p, r) for p, g in zip(prompts, groups, strict=True) for r in g]
    texts = [tokenizer.decode(r.tokens.tolist()) for _, r in flat]
    columns = list(dict.fromkeys(name for p in prompts for name in p.columns))
    scores = scorer(
        prompts=[p.text for p, _ in flat],
        completions=texts,
        completion_ids=[r.tokens.tolist() for _, r in flat],
        columns={name: [p.columns.get(name) for p, _ in flat] for name in columns},
    )
    scored, start = [], 0
    for prompt, group in zip(prompts, groups, strict=True):
        part = slice(start, start + len(group))
        start += len(group)
        scored.append(
            ScoredGroup(
                prompt,
                group,
                texts[part],
                scores.rewards[part],
                scores.scores[part],
                scores.components[part],
                scores.valid[part],
            )
        )
    return scored


def make_batch(groups: Sequence[ScoredGroup], length: int | None = None) -> Batch:
    """Lays groups out as a `Batch` of numpy arrays, one response a row, groups in order.

    Args:
      groups: Scored groups.
      length: T; the longest prompt plus response by default.

    Raises:
      ValueError: There are no groups, or a response is longer than `length`.
    """
    rows = [(i, g, k) for i, g in enumerate(groups) for k in range(len(g.responses))]
    if not rows:
        raise InputError("a batch needs at least one group, got none")
    sizes = [len(g.prompt.tokens) + len(g.responses[k].tokens) for _, g, k in rows]
    length = max(sizes) if length is None else length
    if max(sizes) > length:
        raise InputError(
            f"a response with its prompt has {max(sizes)} tokens; length={length} is "
            "too short for it"
        )
    shape = (len(rows), length)
    tokens, version = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments = np.zeros(shape, np.int32)
    mask, logp = np.zeros(shape, bool), np.zeros(shape, np.float32)
    first = groups[0].responses[0].routing
    routing = None if first is None else np.full((*shape, *first.shape[1:]), -1, np.int32)
    kept = groups[0].responses[0].support
    support = None if kept is None else np.full((*shape, kept.shape[1]), -1, np.int32)
    for b, (_, group, k) in enumerate(rows):
        response, n = group.responses[k], len(group.prompt.tokens)
        end = n + len(response.tokens)
        tokens[b, :n], tokens[b, n:end] = group.prompt.tokens, response.tokens
        segments[b, :end], mask[b, n:end] = 1, True
        logp[b, n:end], version[b, n:end] = response.logp, response.version
        if routing is not None and response.routing is not None:
            routing[b, :end] = response.routing
        if support is not None and response.support is not None:
            support[b, n:end] = response.support
    valid = np.concatenate([g.valid for g in groups])
    fields: dict[str, Any] = dict(  # numpy arrays, which the device takes as they are
        tokens=tokens,
        mask=mask,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        segments=segments,
        group=np.asarray([i for i, _, _ in rows], np.int32),
        scores=np.concatenate([g.scores for g in groups]).astype(np.float32),
        rewards=np.concatenate([g.rewards for g in groups]).astype(np.float32),
        score_components=np.concatenate([g.components for g in groups]).astype(np.float32),
        valid=valid,
        completion_length=mask.sum(1).astype(np.int32),
        truncated=np.asarray([g.responses[k].truncated for _, g, k in rows]),
        rollout_logp=logp,
        version=version,
        routing=routing,
        support=support,
    )
    return Batch(**fields)


def component_metrics(groups: Sequence[ScoredGroup], names: tuple[str, ...]) -> dict[str, Any]:
    """The mean of each reward function, and the share of responses whose scoring failed.

    Args:
      groups: The groups of the batch.
      names: Names of the reward functions.

    Returns:
      Mergeable metrics `reward/<function>/mean` (over valid responses) and `reward/invalid_frac`.
    """
    valid = np.concatenate([g.valid for g in groups])
    components = np.concatenate([g.components for g in groups])
    metrics: dict[str, Any] = {
        f"reward/{name}/mean": Mean.of(jnp.asarray(components[:, k]), jnp.asarray(valid))
        for k, name in enumerate(names)
    }
    return metrics | {"reward/invalid_frac": Mean.of(jnp.asarray(~valid), jnp.ones(len(valid)))}
