"""Advantages: how much better than expected each response, or token, was.

They act on the whole rollout batch and carry no gradient. Those of a group work on one reward a
response; `batch_whiten(per='token')` and those of `token_advantages` give one for each token.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool

from rljax.errors import InputError
from rljax.losses import groups
from rljax.losses.base import Draft, Scope, Step, Transform, missing
from rljax.losses.value_checks import ResponseValues


@dataclasses.dataclass(frozen=True)
class Advantage(Transform):
    """Base of the advantages: takes and gives a `Draft`."""

    scope: ClassVar[Scope] = "batch"

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        raise NotImplementedError

    def live(self, step: Step) -> Step:
        """Sets `step.advantages` where they depend on the live policy."""
        return step

    def check_values(self, values: ResponseValues) -> None:
        """Refuses values that it cannot use (see `Objective.check_values`)."""


@dataclasses.dataclass(frozen=True)
class advantage(Advantage):
    """A plain function of a draft as an advantage.

    The function takes a `Draft` and returns A, f32 [B] or [B, T]. Of the draft it may use
    `advantages` (the shaped rewards, or what the advantage before it in a chain gave), `scores`,
    `valid`, `group` (numbers 0 .. B-1) and `length` [B], `mask` and `counted()` [B, T], and
    `field('old_logp', name)` for other fields of the batch [B, T]; `group_statistics` has the
    mean and deviation of each response's group. Two are equal if their functions are the same
    object.

    Args:
      fn: The function.
      reads: What it reads of the batch besides rewards: names as in `Objective.needs`.
    """

    fn: Callable[[Draft], Array]
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InputError(f"advantage takes a function of a draft, got {self.fn!r}")

    @property
    def prepare_needs(self) -> frozenset[str]:
        """As given."""
        return frozenset(self.reads)

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        found = jnp.asarray(self.fn(draft), jnp.float32)
        if found.shape not in (draft.valid.shape, draft.mask.shape):
            raise InputError(
                f"{self!r} must give one advantage a response {draft.valid.shape} or a token "
                f"{draft.mask.shape}, got shape {found.shape}"
            )
        return draft.replace(advantages=found)

    def __repr__(self) -> str:
        reads = f", reads={self.reads!r}" if self.reads else ""
        return f"advantage({getattr(self.fn, '__name__', self.fn)}{reads})"


@dataclasses.dataclass(frozen=True)
class uniform(Advantage):
    """The same advantage for every token, whatever the rewards: maximum likelihood at 1.

    Args:
      value: The advantage.
    """

    value: float = 1.0

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        return draft.replace(advantages=jnp.full_like(draft.rewards, self.value))


@dataclasses.dataclass(frozen=True)
class group_center(Advantage):
    """A = R - mean of the group (Dr. GRPO, arXiv:2503.20783)."""

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        return draft.replace(advantages=_group(draft, self).centered)

    def check_values(self, values: ResponseValues) -> None:
        """Refuses prompts with one response."""
        values.refuse_single_responses(self)


@dataclasses.dataclass(frozen=True)
class group_normalize(Advantage):
    """A = (R - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300).

    Args:
      eps: Added to the standard deviation.
      ddof: The variance divides by G - ddof.
    """

    eps: float = 1e-6
    ddof: int = 1

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        stats = _group(draft, self, self.ddof)
        return draft.replace(advantages=stats.normalized(self.eps))

    def check_values(self, values: ResponseValues) -> None:
        """Refuses prompts with one response."""
        values.refuse_single_responses(self)


@dataclasses.dataclass(frozen=True)
class leave_one_out(Advantage):
    """A = R - mean of the group's others (RLOO, arXiv:2402.14740)."""

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        stats = _group(draft, self)
        others = jnp.maximum(stats.count - 1.0, 1.0)
        return draft.replace(advantages=stats.centered * stats.count / others)

    def check_values(self, values: ResponseValues) -> None:
        """Refuses prompts with one response."""
        values.refuse_single_responses(self)


@dataclasses.dataclass(frozen=True)
class mean_normalize(Advantage):
    """A = (R - mean) / mean of the group, 0 where the mean is 0 (MaxRL, arXiv:2602.02710).

    Rewards must not be negative.
    """

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        stats = _group(draft, self)
        return draft.replace(advantages=_over(stats.centered, jnp.maximum(stats.mean, 0.0)))

    def check_values(self, values: ResponseValues) -> None:
        """Refuses prompts with one response, and negative rewards."""
        values.refuse_single_responses(self)
        values.refuse_negative_rewards(self)


@dataclasses.dataclass(frozen=True)
class gdpo_normalize(Advantage):
    """Each component reward normalised in its group, summed, whitened over responses (GDPO).

    Uses `Batch.score_components`, so shaping does not enter. A component that is NaN is left out
    of its own statistics and adds 0. Source: arXiv:2601.05242.

    Args:
      weights: One for each component; None: all 1.
      eps: Added to each standard deviation.
    """

    weights: tuple[float, ...] | None = None
    eps: float = 1e-6

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The component rewards."""
        return frozenset({"components"})

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        components = draft.batch.score_components
        if components is None:
            raise missing("score_components", self, "Batch")
        number = components.shape[1]
        weights = (1.0,) * number if self.weights is None else self.weights
        if len(weights) != number:
            raise InputError(
                f"gdpo_normalize has {len(weights)} weights for {number} score_components: "
                "give one weight for each"
            )
        total = jnp.zeros_like(draft.rewards)
        for k, weight in enumerate(weights):
            component = components[:, k].astype(jnp.float32)
            valid = draft.valid & jnp.isfinite(component)
            stats = groups.statistics(component, valid, draft.group)
            total = total + weight * stats.normalized(self.eps)
        return draft.replace(advantages=groups.whiten(total, _trains(draft), 1e-8))

    def check_values(self, values: ResponseValues) -> None:
        """Refuses prompts with one response."""
        values.refuse_single_responses(self)


@dataclasses.dataclass(frozen=True)
class batch_whiten(Advantage):
    """Whitens advantages over what trains in the rollout batch.

    Args:
      per: 'token' weighs every token once, 'response' every response.
      eps: Added to the variance.
      center: Whether to subtract the mean; False only divides by the standard deviation.
    """

    per: Literal["token", "response"] = "token"
    eps: float = 1e-8
    center: bool = True

    def __post_init__(self) -> None:
        if self.per not in ("token", "response"):
            raise InputError(f"per must be 'token' or 'response', got {self.per!r}")

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        if self.per == "token":
            x, mask = draft.per_token(), draft.counted()
        elif draft.advantages.ndim == 1:
            x, mask = draft.advantages, _trains(draft)
        else:
            raise InputError(
                f"{self!r} needs one advantage a response, got one a token: use per='token'"
            )
        return draft.replace(advantages=groups.whiten(x, mask, self.eps, self.center))


def _trains(draft: Draft) -> Bool[Array, " B"]:
    return draft.counted().any(axis=1) & draft.valid


def _over(x: Array, by: Array) -> Array:
    """X / by, 0 where by is 0."""
    return jnp.where(by > 0, x / jnp.where(by > 0, by, 1.0), 0.0)


def _group(draft: Draft, user: Advantage, ddof: int = 1) -> groups.Stats:
    if draft.advantages.ndim != 1:
        raise InputError(f"{user!r} needs one reward a response, got one a token: put it first")
    return groups.statistics(draft.advantages, draft.valid, draft.group, ddof)
