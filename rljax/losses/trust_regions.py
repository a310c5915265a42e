"""Trust regions: the surrogate J of a token, from ratio and advantage, and gates upon it.

One transform of a chain sets J (without one, `policy_gradient` is used); gates come before or
after it. At a tie of clipped and unclipped the gradient is the unclipped one.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rljax.errors import InputError
from rljax.losses.base import (
    Anchor,
    Scope,
    Step,
    Transform,
    needs_of_anchor,
    safe_exp,
)

_stop = jax.lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class TrustRegion(Transform):
    """Base of what follows the ratio.

    Attributes:
      closes: Whether it is a gate, which takes tokens or responses away.
    """

    closes: ClassVar[bool] = False

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate` or closes `step.gate`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class trust_region(TrustRegion):
    """A plain function of a step as a trust region.

    The function takes a `Step` and returns J, f32 [R, T] or [R, 1], or a gate, bool of the same
    shape: True lets a token's surrogate through. Of the step it may use `ratio` and `log_ratio`
    ([R, T] or [R, 1], of the ratio before it), `advantages`, `logp` (live) and `counted()` [R, T],
    `field('old_logp' | 'rollout_logp' | 'ref_logp', name)` [R, T], and `layout.means(x, mask)` or
    `layout.totals(x)` for sums along a response. Whether it couples the tokens of a response is
    found out by trying (see `coupling`). Two are equal if their functions are the same object.

    Args:
      fn: The function.
      reads: What it reads besides the ratio: names as in `Objective.needs`, e.g. ('ref',).
    """

    fn: Callable[[Step], Array]
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InputError(f"trust_region takes a function of a step, got {self.fn!r}")

    @property
    def loss_needs(self) -> frozenset[str]:
        """As given."""
        return frozenset(self.reads)

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate` or closes `step.gate`."""
        found = jnp.asarray(self.fn(step))
        if found.dtype == bool:
            return step.close(found)
        return step.with_surrogate(found)

    def __repr__(self) -> str:
        reads = f", reads={self.reads!r}" if self.reads else ""
        return f"trust_region({getattr(self.fn, '__name__', self.fn)}{reads})"


@dataclasses.dataclass(frozen=True)
class policy_gradient(TrustRegion):
    """J = r·A; without a ratio before it, A·log π."""

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        factor = step.logp if step.log_ratio is None else step.ratio
        return step.with_surrogate(factor * step.advantages)


@dataclasses.dataclass(frozen=True)
class ppo_clip(TrustRegion):
    """J = min(r·A, clip(r, 1 - low, 1 + high)·A) (PPO, arXiv:1707.06347).

    low = high = ∞ is the plain policy gradient; 0 makes the window [1, 1].

    Args:
      low: Window below 1.
      high: Window above 1.
      dual: For A < 0, J is at least dual·A (arXiv:1912.09729); more than 1. None: no such bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        _refuse_negative(self, "low", "high")
        if self.dual is not None and not self.dual > 1:
            raise InputError(f"dual must be more than 1, got {self.dual}: 3 is usual")

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        ratio, a = step.ratio, step.advantages
        free = ratio * a
        held = _stop(jnp.clip(ratio, 1.0 - self.low, 1.0 + self.high)) * a
        surrogate = jnp.where(free <= held, free, held)
        step = step.clip((a < 0) & (ratio < 1.0 - self.low), (a > 0) & (ratio > 1.0 + self.high))
        if self.dual is None:
            return step.with_surrogate(surrogate)
        floor = self.dual * a
        bounded = (a < 0) & (floor > surrogate)
        return step.with_surrogate(jnp.where(bounded, floor, surrogate)).note(
            "policy/clip_frac_dual", bounded, step.counts
        )


@dataclasses.dataclass(frozen=True)
class cispo_weight(TrustRegion):
    """J = sg(min(r, cap))·A·log π (CISPO, arXiv:2506.13585): every token keeps a gradient.

    Args:
      cap: Absolute bound on the ratio, not 1 + ε; there is no lower bound.
    """

    cap: float = 5.0

    def __post_init__(self) -> None:
        _refuse_negative(self, "cap")

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        weight = _stop(jnp.minimum(step.ratio, self.cap))
        step = step.clip(None, step.ratio > self.cap)
        return step.with_surrogate(weight * step.advantages * step.logp)


@dataclasses.dataclass(frozen=True)
class gmpo_clip(TrustRegion):
    """J = exp(mean_t of clipped log r_t)·A, clipped in log space (GMPO, arXiv:2507.20673).

    For A > 0 each log r_t is held below `high`, for A < 0 above -`low`; then the geometric mean
    over the response. GSPO takes the mean first and clips after. Needs a token ratio before it.

    Args:
      low: Log-space window below 0.
      high: Log-space window above 0.
    """

    scope: ClassVar[Scope] = "sequence"
    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        _refuse_negative(self, "low", "high")

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        if step.log_ratio is None:
            raise InputError(f"{self!r} needs a ratio before it: put token_ratio() first")
        x, a = step.log_ratio, step.advantages
        low, high = (a < 0) & (x < -self.low), (a > 0) & (x > self.high)
        held = jnp.where(high, self.high, jnp.where(low, -self.low, x))
        mean = safe_exp(step.layout.means(held, step.rows.mask))
        return step.clip(low, high).with_surrogate(mean * a)


@dataclasses.dataclass(frozen=True)
class sapo_gate(TrustRegion):
    """J = (4/τ)·σ(τ(r - 1))·A: a soft gate instead of a clip (SAPO, arXiv:2511.20347).

    Its slope is 1 at r = 1 and falls off on both sides.

    Args:
      tau_pos: τ where A > 0.
      tau_neg: τ elsewhere.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise InputError(f"tau_pos and tau_neg must be positive, got {self!r}")

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        tau = jnp.where(step.advantages > 0, self.tau_pos, self.tau_neg)
        gate = 4.0 / tau * jax.nn.sigmoid(tau * (step.ratio - 1.0))
        return step.with_surrogate(gate * step.advantages)


@dataclasses.dataclass(frozen=True)
class vespo_weight(TrustRegion):
    """J = sg(W^k·exp(λ(1 - W)))·A·log π, W the ratio of the response (VESPO, arXiv:2602.10693).

    Needs `sequence_ratio(normalize=False)` before it.

    Args:
      k_pos: k where A ≥ 0.
      lam_pos: λ where A ≥ 0.
      k_neg: k where A < 0.
      lam_neg: λ where A < 0.
    """

    k_pos: float = 2.0
    lam_pos: float = 3.0
    k_neg: float = 3.0
    lam_neg: float = 2.0

    def __call__(self, step: Step) -> Step:
        """Sets `step.surrogate`."""
        if step.log_ratio is None:
            raise InputError(
                f"{self!r} needs a ratio before it: put sequence_ratio(normalize=False) first"
            )
        good = step.advantages >= 0
        k = jnp.where(good, self.k_pos, self.k_neg)
        lam = jnp.where(good, self.lam_pos, self.lam_neg)
        log_w = jnp.clip(_stop(step.log_ratio), -20.0, 20.0)
        weight = jnp.exp(jnp.maximum(k * log_w + lam * (1.0 - jnp.exp(log_w)), -80.0))
        return step.with_surrogate(weight * step.advantages * step.logp)


@dataclasses.dataclass(frozen=True)
class clip_mask(TrustRegion):
    """Drops tokens whose ratio is past the window in the direction of A, as PPO's clip would.

    A gate, with a ratio of its own, for surrogates that do not clip (MiniRL, arXiv:2512.01374).

    Args:
      low: Window below 1, for A < 0.
      high: Window above 1, for A > 0.
      anchor: What the ratio is taken against.
    """

    closes: ClassVar[bool] = True
    low: float = 0.2
    high: float = 0.2
    anchor: Anchor = "old"

    def __post_init__(self) -> None:
        _refuse_negative(self, "low", "high")
        needs_of_anchor(self.anchor)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The anchor's log-probabilities."""
        return needs_of_anchor(self.anchor)

    def __call__(self, step: Step) -> Step:
        """Closes `step.gate`."""
        ratio = safe_exp(_stop(step.logp) - step.anchor(self.anchor, self))
        low = (step.advantages < 0) & (ratio < 1.0 - self.low)
        high = (step.advantages > 0) & (ratio > 1.0 + self.high)
        return step.clip(low, high).close(~(low | high))


@dataclasses.dataclass(frozen=True)
class dppo_tv(TrustRegion):
    """Drops tokens whose probability has moved too far in the direction of A (DPPO).

    In probability space: dropped where A > 0 and π - anchor > high, or A < 0 and
    π - anchor < -low. A gate; source: arXiv:2602.04879.

    Args:
      low: Largest fall of probability.
      high: Largest rise of probability.
      anchor: What the probability is compared with.
    """

    closes: ClassVar[bool] = True
    low: float = 0.15
    high: float = 0.15
    anchor: Anchor = "rollout"

    def __post_init__(self) -> None:
        _refuse_negative(self, "low", "high")
        needs_of_anchor(self.anchor)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The anchor's log-probabilities."""
        return needs_of_anchor(self.anchor)

    def __call__(self, step: Step) -> Step:
        """Closes `step.gate`."""
        moved = jnp.exp(_stop(step.logp)) - jnp.exp(step.anchor(self.anchor, self))
        low = (step.advantages < 0) & (moved < -self.low)
        high = (step.advantages > 0) & (moved > self.high)
        return step.clip(low, high).close(~(low | high))


@dataclasses.dataclass(frozen=True)
class off_policy_mask(TrustRegion):
    """Drops responses with A < 0 from which the live policy has moved away (DeepSeek-V3.2).

    Dropped where A < 0 and mean_t(log anchor - log π) > δ: the KL of the anchor from the live
    policy, estimated on the response. A gate; source: arXiv:2512.02556.

    Args:
      delta: Largest mean difference, nats a token.
      anchor: The policy that sampled.
    """

    closes: ClassVar[bool] = True
    scope: ClassVar[Scope] = "sequence"
    delta: float = 0.5
    anchor: Anchor = "rollout"

    def __post_init__(self) -> None:
        needs_of_anchor(self.anchor)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The anchor's log-probabilities."""
        return needs_of_anchor(self.anchor)

    def __call__(self, step: Step) -> Step:
        """Closes `step.gate`."""
        gap = step.anchor(self.anchor, self) - _stop(step.logp)
        far = step.layout.means(gap, step.rows.mask) > self.delta
        dropped = (step.advantages < 0) & far
        return step.close(~dropped).note("policy/off_policy_frac", dropped, "sequence")


def _refuse_negative(transform: Transform, *names: str) -> None:
    for name in names:
        value = getattr(transform, name)
        if math.isnan(value) or value < 0:
            raise InputError(f"{name} must be at least 0, got {value} in {transform!r}")
