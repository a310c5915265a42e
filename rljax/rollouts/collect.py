"""Filling a rollout batch with groups: plain, or by dynamic sampling in waves."""

from __future__ import annotations

import base64
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rljax.data import Prompt, Tokenizer
from rljax.errors import InputError
from rljax.rewards import Scorer
from rljax.rollouts.groups import ScoredGroup, score_groups
from rljax.sampling import Engine, Response, SamplingParams

_log = logging.getLogger(__name__)

_MEMORY = 0.8  # of the running estimate of the degenerate rate, per wave


@dataclasses.dataclass(frozen=True)
class CollectState:
    """What collecting remembers from step to step; part of every checkpoint.

    Attributes:
      degenerate_rate: Running estimate of the share of groups whose scores are all equal; None:
        not known yet.
      surplus: Groups generated beyond the last batch, oldest first.
    """

    degenerate_rate: float | None = None
    surplus: tuple[ScoredGroup, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it, bit for bit; of a prompt its id and draw."""
        surplus = []
        for group in self.surplus:
            fields = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
            fields["prompt"] = {"id": group.prompt.id, "draw": group.prompt.draw}
            fields["responses"] = [dataclasses.asdict(r) for r in group.responses]
            surplus.append(_pack(fields))
        return {"degenerate_rate": self.degenerate_rate, "surplus": surplus}

    @classmethod
    def from_json(cls, saved: dict[str, Any], prompts: Sequence[Prompt]) -> CollectState:
        """The inverse of `to_json`.

        Args:
          saved: What it gave.
          prompts: The prompts of the run.

        Raises:
          InputError: A kept group answers a prompt that is not among them.
        """
        by_id = {prompt.id: prompt for prompt in prompts} if saved["surplus"] else {}
        groups = []
        for item in saved["surplus"]:
            fields = _unpack(item)
            name, draw = fields["prompt"]["id"], fields["prompt"]["draw"]
            if name not in by_id:
                raise InputError(
                    f"the checkpoint holds responses to prompt {name}, which the data lack; give "
                    "the data of the run"
                )
            fields["prompt"] = dataclasses.replace(by_id[name], draw=draw)
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
class CollectSettings:
    """How many groups of what size make a batch, and which of them count.

    Attributes:
      num_groups: Groups of a batch.
      num_generations: Responses a group, G.
      seed: Part of every sampling key.
      dynamic: Whether groups whose raw scores are all equal are left out.
      max_oversampling: With `dynamic`, at most this many times `num_groups` are generated.
      max_staleness: How many versions older than the engine's a surplus group may be.
    """

    num_groups: int
    num_generations: int
    seed: int
    dynamic: bool = False
    max_oversampling: float = 4.0
    max_staleness: int = 0


@dataclasses.dataclass(frozen=True)
class GroupSource:
    """Where scored groups come from: the engine and the reward functions.

    Attributes:
      engine: The sampler, its weights loaded.
      tokenizer: Decodes the responses.
      scorer: The reward functions.
      sampling: How to draw.
    """

    engine: Engine
    tokenizer: Tokenizer
    scorer: Scorer
    sampling: SamplingParams

    def __post_init__(self) -> None:
        """Refuses sampling that the trainer cannot score under."""
        if self.sampling.reshapes:
            raise InputError(
                f"{', '.join(self.sampling.reshapes)} changes the distribution in a way that the "
                "trainer cannot follow; leave it out of training"
            )

    def generate(
        self, prompts: list[Prompt], num_generations: int, seed: int
    ) -> tuple[list[ScoredGroup], float, float]:
        """Samples and scores one group a prompt.

        Returns:
          The groups in the order of the prompts, seconds of sampling, seconds of scoring.
        """
        started = time.perf_counter()
        responses = sorted(
            self.engine.generate(
                [p.tokens for p in prompts],
                num_generations,
                self.sampling,
                seed=seed,
                prompt_ids=[p.id for p in prompts],
                draws=[p.draw for p in prompts],
            ),
            key=lambda group: group[0].prompt_index,
        )
        sampled = time.perf_counter()
        groups = score_groups(prompts, responses, self.tokenizer, self.scorer)
        return groups, sampled - started, time.perf_counter() - sampled


@dataclasses.dataclass(frozen=True)
class Collected:
    """A full batch and how it was collected.

    Attributes:
      groups: Exactly as many as were asked for, in the order of the requests.
      generated: Groups that were sampled for it.
      reused: Groups taken from the surplus of earlier steps.
      dropped_degenerate: Groups left out because their scores were all equal.
      dropped_stale: Groups of the surplus that were too old.
      dropped_unused: Good groups beyond the batch that staleness 0 does not let keep.
      filled: Groups with equal scores that had to be used because the cap was reached.
      sampling_seconds, scoring_seconds: Time spent.
    """

    groups: list[ScoredGroup]
    generated: int
    reused: int
    dropped_degenerate: int
    dropped_stale: int
    dropped_unused: int
    filled: int
    sampling_seconds: float
    scoring_seconds: float

    def metrics(self) -> dict[str, float]:
        """The account under the names of the tag table."""
        group_size = len(self.groups[0].responses)
        dropped = self.dropped_degenerate + self.dropped_stale + self.dropped_unused
        return {
            "perf/rollout_s": self.sampling_seconds,
            "perf/reward_s": self.scoring_seconds,
            "group/generated": float(self.generated),
            "group/kept": float(len(self.groups)),
            "group/dropped": float(dropped),
            "group/oversampling": self.generated / max(len(self.groups) - self.reused, 1),
            "staleness/dropped": float(self.dropped_stale * group_size),
        }


def collect(
    source: GroupSource,
    prompts: Iterator[Prompt],
    state: CollectState,
    settings: CollectSettings,
) -> tuple[Collected, CollectState]:
    """Samples and scores groups until a batch is full.

    With dynamic sampling (DAPO, Yu et al., 2025, section 3.2) groups whose raw scores are all
    equal are left out and more are asked for, in waves sized by the running estimate of their
    share, until `max_oversampling` times `num_groups` were generated; then the batch is completed
    with such groups and a warning is logged. Which groups make the batch is decided in the order
    of the requests, not by which finished first.

    Args:
      source: The engine and the reward functions.
      prompts: Where prompts come from; exactly as many are taken as are asked.
      state: What the last call remembered.
      settings: The size of the batch, and which groups count.

    Returns:
      The batch's groups with the account of them, and what to remember.
    """
    version = source.engine.version
    fresh = [g for g in state.surplus if version - _version(g) <= settings.max_staleness]
    kept, degenerate = list(fresh), list[ScoredGroup]()
    rate, generated, sampling_seconds, scoring_seconds = state.degenerate_rate, 0, 0.0, 0.0
    cap = math.ceil((settings.max_oversampling if settings.dynamic else 1) * settings.num_groups)
    while len(kept) < settings.num_groups and generated < cap:
        size = _wave(settings, settings.num_groups - len(kept), cap - generated, rate)
        groups, *seconds = source.generate(
            [next(prompts) for _ in range(size)], settings.num_generations, settings.seed
        )
        sampling_seconds, scoring_seconds = (
            sampling_seconds + seconds[0],
            scoring_seconds + seconds[1],
        )
        generated += size
        found = sum(g.degenerate for g in groups) / size
        rate = found if rate is None else _MEMORY * rate + (1 - _MEMORY) * found
        for group in groups:
            left_out = settings.dynamic and group.degenerate
            (degenerate if left_out else kept).append(group)
    filled = max(settings.num_groups - len(kept), 0)
    surplus = tuple(kept[settings.num_groups :])
    collected = Collected(
        groups=(kept + degenerate[:filled])[: settings.num_groups],
        generated=generated,
        reused=min(len(fresh), settings.num_groups),
        dropped_degenerate=len(degenerate) - filled,
        dropped_stale=len(state.surplus) - len(fresh),
        dropped_unused=0 if settings.max_staleness else len(surplus),
        filled=filled,
        sampling_seconds=sampling_seconds,
        scoring_seconds=scoring_seconds,
    )
    _report(collected, settings)
    return collected, CollectState(rate, surplus if settings.max_staleness else ())


def _wave(settings: CollectSettings, missing: int, most: int, rate: float | None) -> int:
    """How many groups to ask for, so that those whose scores differ fill the batch."""
    if not settings.dynamic:
        return missing
    useful = max(1.0 - (rate or 0.0), 1.0 / settings.max_oversampling)
    return min(math.ceil(missing / useful), most)


def _report(collected: Collected, settings: CollectSettings) -> None:
    if collected.filled:
        _log.warning(
            "dynamic sampling: %d groups generated (max_oversampling=%g), only %d of %d have "
            "scores that differ; %d that do not complete the batch",
            collected.generated,
            settings.max_oversampling,
            settings.num_groups - collected.filled,
            settings.num_groups,
            collected.filled,
        )
    elif collected.generated > settings.num_groups:
        _log.info(
            "dynamic sampling: %d groups generated, %d kept (%d from earlier steps), %d dropped "
            "as degenerate",
            collected.generated,
            len(collected.groups),
            collected.reused,
            collected.dropped_degenerate,
        )


def _version(group: ScoredGroup) -> int:
    return min(int(r.version.min()) for r in group.responses)
