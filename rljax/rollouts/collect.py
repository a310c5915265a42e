"""Filling a rollout batch with groups: plain, or by dynamic sampling in waves."""

from __future__ import annotations

import base64
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rljax.data import Prompt, Tokenizer
from rljax.rewards import Scorer
from rljax.rollouts.groups import ScoredGroup, score_groups
from rljax.sampling import Engine, Response, SamplingParams

_log = logging.getLogger(__name__)

_MEMORY = 0.8  # of the running estimate of the degenerate rate, per wave


@dataclasses.dataclass(frozen=True)
class CollectState:
    """What collecting remembers from step to step; part of every checkpoint.

    Attributes:
      degenerate_rate: Running estimate of the share of groups whose scores are all equal.
      surplus: Groups generated beyond the last batch, oldest first.
    """

    degenerate_rate: float = 0.0
    surplus: tuple[ScoredGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it, bit for bit."""
        return {
            "degenerate_rate": self.degenerate_rate,
            "surplus": [_pack(dataclasses.asdict(g)) for g in self.surplus],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CollectState:
        """The inverse of `to_json`."""
        groups = []
        for item in saved["surplus"]:
            fields = _unpack(item)
            fields["prompt"] = Prompt(**fields["prompt"])
            fields["responses"] = [Response(**r) for r in fields["responses"]]
            groups.append(ScoredGroup(**fields))
        return cls(saved["degenerate_rate"], tuple(groups))


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__array__": [value.dtype.str, list(value.shape), raw]}
    if isinstance(value, dict):
        return {k: _pack(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(v) for v in value]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and "__array__" in value:
        dtype, shape, raw = value["__array__"]
        return np.frombuffer(base64.b64decode(raw), dtype).reshape(shape).copy()
    if isinstance(value, dict):
        return {k: _unpack(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    return value


@dataclasses.dataclass(frozen=True)
class Collected:
    """A full batch and how it came about.

    Attributes:
      groups: Exactly as many as were asked for, in the order of the requests.
      generated: Groups that were sampled for it.
      reused: Groups taken from the surplus of earlier steps.
      dropped_degenerate: Groups left out because their scores were all equal.
      dropped_stale: Groups of the surplus thrown away as too old.
      filled: Groups with equal scores that had to be used because the cap was reached.
      sampling_seconds, scoring_seconds: Time spent.
    """

    groups: list[ScoredGroup]
    generated: int
    reused: int
    dropped_degenerate: int
    dropped_stale: int
    filled: int
    sampling_seconds: float
    scoring_seconds: float


def collect(
    engine: Engine,
    prompts: Iterator[Prompt],
    tokenizer: Tokenizer,
    scorer: Scorer,
    sampling: SamplingParams,
    state: CollectState,
    *,
    num_groups: int,
    num_generations: int,
    seed: int,
    dynamic: bool = False,
    max_oversampling: float = 4.0,
    max_staleness: int = 0,
) -> tuple[Collected, CollectState]:
    """Samples and scores groups until a batch is full.

    With dynamic sampling (DAPO, Yu et al., 2025, section 3.2) groups whose raw scores are all
    equal are left out and more are asked for, in waves sized by the running estimate of their
    rate, up to the cap. Which groups make the batch is decided in the order of requests, not by
    who finished first, which would favour short responses.

    Args:
      engine: The sampler, its weights loaded.
      prompts: The stream of prompts.
      tokenizer: Decodes responses.
      scorer: The reward functions.
      sampling: How to draw.
      state: What was remembered from the last step.
      num_groups: Groups of the batch.
      num_generations: Responses of a group, G.
      seed: Of the sampling keys.
      dynamic: Whether degenerate groups are replaced.
      max_oversampling: At most this many times `num_groups` groups are generated for a batch; at
        the cap it is filled up with degenerate groups, oldest first, and a warning says so.
      max_staleness: How many versions older than the engine's a surplus group may be.

    Returns:
      The batch's groups with the account of them, and what to remember.
    """
    fresh = [g for g in state.surplus if engine.version - _version(g) <= max_staleness]
    stale = len(state.surplus) - len(fresh)
    kept, spare = list(fresh), []
    reused = min(len(fresh), num_groups)
    rate, generated = state.degenerate_rate, 0
    cap = math.ceil(max_oversampling * num_groups) if dynamic else num_groups
    sampling_seconds = scoring_seconds = 0.0
    while len(kept) < num_groups and generated < cap:
        wave = num_groups - len(kept)
        if dynamic:
            wave = min(math.ceil(wave / max(1.0 - rate, 1.0 / max_oversampling)), cap - generated)
        asked = [next(prompts) for _ in range(wave)]
        started = time.perf_counter()
        responses = sorted(
            engine.generate(
                [p.tokens for p in asked],
                num_generations,
                sampling,
                seed=seed,
                prompt_ids=[p.id for p in asked],
                draws=[p.draw for p in asked],
            ),
            key=lambda group: group[0].prompt_index,
        )
        sampling_seconds += time.perf_counter() - started
        started = time.perf_counter()
        groups = score_groups(asked, responses, tokenizer, scorer)
        scoring_seconds += time.perf_counter() - started
        generated += wave
        found = sum(g.degenerate for g in groups) / wave
        rate = (
            found
            if generated == wave and not state.degenerate_rate
            else (_MEMORY * rate + (1 - _MEMORY) * found)
        )
        kept += [g for g in groups if not (dynamic and g.degenerate)]
        spare += [g for g in groups if dynamic and g.degenerate]
    filled = max(num_groups - len(kept), 0)
    if filled:
        _log.warning(
            "dynamic sampling: %d groups generated (max_oversampling=%g), only %d of %d have "
            "scores that differ; filling up with %d that do not",
            generated,
            max_oversampling,
            len(kept),
            num_groups,
            filled,
        )
        kept += spare[:filled]
    surplus = tuple(kept[num_groups:])
    if max_staleness == 0 and surplus:
        stale, surplus = stale + len(surplus), ()
    return (
        Collected(
            groups=kept[:num_groups],
            generated=generated,
            reused=reused,
            dropped_degenerate=len(spare) - filled,
            dropped_stale=stale,
            filled=filled,
            sampling_seconds=sampling_seconds,
            scoring_seconds=scoring_seconds,
        ),
        CollectState(rate, surplus),
    )


def _version(group: ScoredGroup) -> int:
    return min(int(r.version.min()) for r in group.responses)
