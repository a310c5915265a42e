"""From the sampler's responses to the trainer's batch: groups, dynamic sampling, staleness."""

from rljax.rollouts.collect import Collected, CollectState, collect
from rljax.rollouts.groups import ScoredGroup, make_batch, rollout_metrics, score_groups

__all__ = [
    "CollectState",
    "Collected",
    "ScoredGroup",
    "collect",
    "make_batch",
    "rollout_metrics",
    "score_groups",
]
