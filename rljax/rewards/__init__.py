"""Reward functions and the scorer that calls them; importing it loads no jax."""

from rljax.rewards.scorer import RewardFunction, Scorer, Scores
from rljax.rewards.verifiers import VERIFIERS, exact_match

__all__ = ["VERIFIERS", "RewardFunction", "Scorer", "Scores", "exact_match"]
