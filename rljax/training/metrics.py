"""Metrics of a step: put together from what its stages returned, and finished once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rljax import losses as L
from rljax import processes
from rljax.models import ModelConfig
from rljax.monitoring.flops import mfu
from rljax.rollouts import ScoredGroup

Metrics = Mapping[str, Any]
"""Tags to numbers, or to metrics of `rljax.losses` that still merge."""


def finish(*parts: Metrics) -> dict[str, float]:
    """The metrics of a step as numbers.

    Args:
      *parts: What its stages returned. Mergeable metrics of the same tag are merged; a plain
        number stands once.

    Returns:
      Tags to numbers.
    """
    mergeable = [{k: v for k, v in part.items() if not isinstance(v, float)} for part in parts]
    numbers = {k: v for part in parts for k, v in part.items() if isinstance(v, float)}
    return L.finish(processes.fetch(L.merge(*mergeable))) | numbers


def throughput(groups: Sequence[ScoredGroup], seconds: float, rollout_s: float) -> dict[str, float]:
    """Seconds and tokens per second of a whole step.

    Args:
      groups: The groups of the step.
      seconds: What the step took.
      rollout_s: What sampling took of it.
    """
    tokens = float(sum(len(r.tokens) for g in groups for r in g.responses))
    return {
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_tokens_per_s": tokens / max(rollout_s, 1e-9),
    }


def utilisation(
    model: ModelConfig, groups: Sequence[ScoredGroup], passes: int, seconds: float
) -> dict[str, float]:
    """`perf/mfu` of the updates of a step, where the devices' peak is known; else nothing.

    Args:
      model: The model.
      groups: The groups of the step.
      passes: How often each was trained on.
      seconds: What the updates took.
    """
    lengths = [len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses]
    context = sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
    kinds = [d.device_kind for d in jax.devices()]
    found = mfu(model, passes * sum(lengths), context, seconds, kinds)
    return {} if found is None else {"perf/mfu": found}


def device_memory() -> dict[str, float]:
    """The most memory in use so far on a device, where devices tell it."""
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    known = [p for p in peaks if p is not None]
    return {"perf/device_memory_gb": max(known) / 1e9} if known else {}


def sample_lines(groups: Sequence[ScoredGroup], count: int) -> list[dict[str, Any]]:
    """One response of each of the first groups, as samples.jsonl holds it."""
    return [
        {
            "prompt": g.prompt.text,
            "answer": g.prompt.columns.get("answer"),
            "completion": g.texts[0],
            "reward": float(g.rewards[0]),
            "score": float(g.scores[0]),
            "valid": bool(g.valid[0]),
            "tokens": len(g.responses[0].tokens),
            "finish_reason": g.responses[0].finish_reason,
        }
        for g in groups[:count]
    ]
