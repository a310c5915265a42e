"""Reward shaping: `Batch.rewards` is as scored; `prepare` shapes it once."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.losses.base import Draft, Scope, Transform
from rljax.losses.estimators import Estimator, check_estimator, kl_estimate
from rljax.losses.metrics import Mean

ROUNDING = 1e-5
"""Log-probabilities of one token by two programs differ by this much, relative to max(1, |log π|),
without a difference between the policies."""


@dataclasses.dataclass(frozen=True)
class Shaping(Transform):
    """Base of reward shaping: takes and gives a `Draft`."""

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.rewards` or `draft.token_rewards`."""
        raise NotImplementedError

    def response_rewards(self, rewards: Any, batch: Batch) -> Any:
        """The shaped rewards of responses, for checks of values on the host; [B]."""
        return rewards


@dataclasses.dataclass(frozen=True)
class soft_overlong(Shaping):
    """A penalty that grows linearly over the last `cache` tokens of the length limit (DAPO).

    0 up to max_length - cache, then down to -factor at max_length and beyond; by
    `completion_length`, added to the reward. Source: arXiv:2503.14476.

    Args:
      max_length: Completion tokens at which the penalty is full.
      cache: Tokens over which it grows.
      factor: The full penalty.
      truncated: A truncated response has no answer to credit: 'penalty_only' makes its reward
        the penalty alone, 'add' adds it to the reward like any other.
    """

    scope: ClassVar[Scope] = "sequence"
    max_length: int
    cache: int
    factor: float = 1.0
    truncated: Literal["penalty_only", "add"] = "penalty_only"

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise InputError(
                f"cache must be in 1 .. max_length, got cache={self.cache}, "
                f"max_length={self.max_length}: a fifth of max_length is usual"
            )
        if self.truncated not in ("penalty_only", "add"):
            raise InputError(f"truncated must be 'penalty_only' or 'add', got {self.truncated!r}")

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.rewards`."""
        rewards = self._shaped(draft.rewards, draft.length, draft.truncated)
        return draft.replace(rewards=jnp.where(draft.valid, rewards, 0.0))

    def response_rewards(self, rewards: Any, batch: Batch) -> Any:
        """With the penalty."""
        given = batch.completion_length
        length = np.asarray(batch.mask).sum(1) if given is None else np.asarray(given)
        cut = False if batch.truncated is None else np.asarray(batch.truncated).astype(bool)
        return self._shaped(rewards, length, cut)

    def _shaped(self, rewards: Any, length: Any, truncated: Any) -> Array:
        over = length - (self.max_length - self.cache)
        penalty = -self.factor * jnp.clip(over / self.cache, 0.0, 1.0)
        if self.truncated == "penalty_only":
            rewards = jnp.where(truncated, 0.0, rewards)
        return rewards + penalty


@dataclasses.dataclass(frozen=True)
class kl_in_reward(Shaping):
    """Takes β·KL to the reference from each token's reward, by the policy of the step's start.

    With k1 the expected gradient is that of KL(π‖ref). Only advantages that look at token rewards
    see it: `gae` and `returns_to_go`. Differences of the size of rounding count as 0: whitening
    would make advantages of them where all rewards are equal.

    Args:
      beta: Coefficient.
      estimator: 'k1', 'k2' or 'k3'.
    """

    beta: float
    estimator: Estimator = "k1"

    def __post_init__(self) -> None:
        check_estimator(self.estimator)

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The log-probabilities of both policies."""
        return frozenset({"old", "ref"})

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.token_rewards`."""
        old, ref = draft.field("old_logp", self), draft.field("ref_logp", self)
        same = jnp.abs(old - ref) <= ROUNDING * jnp.maximum(1.0, jnp.abs(old))
        kl = jnp.where(same, 0.0, kl_estimate(old, ref, self.estimator))
        rewards = 0.0 if draft.token_rewards is None else draft.token_rewards
        return draft.replace(
            token_rewards=jnp.where(draft.mask, rewards - self.beta * kl, 0.0),
            stats={**draft.stats, "policy/kl_ref": Mean.of(kl, draft.counted())},
        )
