"""From the sampler's responses to the trainer's batch: groups, dynamic sampling, staleness."""

from rljax.rollouts.collect import (
    Collected,
    CollectSettings,
    CollectState,
    GroupSource,
    collect,
)
from rljax.rollouts.groups import ScoredGroup, component_metrics, make_batch, score_groups

__all__ = [
    "CollectSettings",
    "CollectState",
    "Collected",
    "GroupSource",
    "ScoredGroup",
    "collect",
    "component_metrics",
    "make_batch",
    "score_groups",
]
