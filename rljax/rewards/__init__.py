"""Reward functions and the scorer that calls them; importing it loads no jax."""

from rljax.rewards.scorer import RewardFunction, Scorer, Scores
from rljax.rewards.verifiers import VERIFIERS, boxed, exact_match, numeric

__all__ = ["VERIFIERS", "RewardFunction", "Scorer", "Scores", "boxed", "exact_match", "numeric"]
