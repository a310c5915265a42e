"""Corrections for sampling by another policy: c from ρ = π_old/μ, gradient-stopped.

They multiply the surrogate only. Rejected tokens stay in the denominators unless
`keep_denominator=False`. None goes on top of a ratio already taken against μ, and one that differs
from token to token does not go with a ratio of the whole sequence; both are refused.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rljax.errors import InputError
from rljax.losses.base import Draft, Level, Scope, Transform, check_level, safe_exp
from rljax.losses.metrics import Mean, merge
from rljax.losses.sequences import SequenceLayout

_ROWS = SequenceLayout()  # prepare works on one response a row


@dataclasses.dataclass(frozen=True)
class Correction(Transform):
    """Base of the corrections: takes and gives a `Draft`."""

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The log-probabilities of both policies."""
        return frozenset({"old", "rollout"})

    @property
    def weighs(self) -> bool:
        """Whether c is an importance weight; two of them would correct twice."""
        return False

    def log_rho(self, draft: Draft) -> Float[Array, "B T"]:
        """Log π_old - log μ, 0 outside the mask."""
        return draft.field("old_logp", self) - draft.field("rollout_logp", self)

    def reject(self, draft: Draft, rejected: Bool[Array, "B _"], keep_denominator: bool) -> Draft:
        """Drops tokens and counts them."""
        frac = Mean.of(jnp.broadcast_to(rejected, draft.mask.shape), draft.counted())
        stats = merge(draft.stats, {"mismatch/masked_frac": frac})
        return draft.drop(rejected, keep_denominator).replace(stats=stats)

    def __call__(self, draft: Draft) -> Draft:
        """Multiplies `draft.correction`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class truncated_is(Correction):
    """c = min(ρ, cap): truncated importance sampling (Ionides, 2008; TIS).

    At level 'sequence' ρ is the product over the response, Π_t π_old/μ, truncated once: the weight
    under which the whole response was sampled from π_old, and what verl's `rollout_is='sequence'`
    computes. (Its geometric mean, as in GSPO's ratio, would not correct the sampling.)

    Args:
      cap: Absolute bound; ∞ does not truncate (the exponent is still held within ±20).
      level: 'token' takes ρ of each token, 'sequence' the product over the response.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_level(self.level)
        if not self.cap > 0:
            raise InputError(f"cap must be positive, got {self.cap}")

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        """As the level."""
        return self.level

    @property
    def gates_tokens(self) -> bool:  # type: ignore[override]
        """Whether tokens of one response differ in c."""
        return self.level == "token"

    @property
    def weighs(self) -> bool:
        """Always."""
        return True

    def for_sequences(self) -> "truncated_is":
        """The product over the response, truncated once."""
        return dataclasses.replace(self, level="sequence")

    def __call__(self, draft: Draft) -> Draft:
        """Multiplies `draft.correction`."""
        log_rho = self.log_rho(draft)
        if self.level == "sequence":
            log_rho = _ROWS.totals(log_rho)
        weight = jnp.minimum(safe_exp(log_rho), self.cap)
        return draft.replace(correction=draft.correction * weight)


@dataclasses.dataclass(frozen=True)
class icepop(Correction):
    """c = ρ where low ≤ ρ ≤ high, else 0, for each token (IcePop, arXiv:2510.18855).

    Args:
      low: Smallest ρ kept.
      high: Largest ρ kept.
      keep_denominator: Whether rejected tokens still count in the denominators.
    """

    gates_tokens: ClassVar[bool] = True
    low: float = 0.5
    high: float = 5.0
    keep_denominator: bool = True

    @property
    def weighs(self) -> bool:
        """Always."""
        return True

    def __call__(self, draft: Draft) -> Draft:
        """Multiplies `draft.correction`."""
        rho = safe_exp(self.log_rho(draft))
        kept = (rho >= self.low) & (rho <= self.high)
        draft = draft.replace(correction=draft.correction * rho)
        return self.reject(draft, draft.mask & ~kept, self.keep_denominator)


@dataclasses.dataclass(frozen=True)
class sequence_mask_is(Correction):
    """Rejects responses by the product of ρ, which is length-biased.

    Args:
      high: Largest product kept.
      low: Smallest product kept.
      weigh: Whether the product also weighs what is kept; otherwise c is 0 or 1.
      keep_denominator: Whether rejected tokens still count in the denominators.
    """

    scope: ClassVar[Scope] = "sequence"
    high: float = 3.0
    low: float = 0.0
    weigh: bool = False
    keep_denominator: bool = True

    @property
    def weighs(self) -> bool:
        """As given."""
        return self.weigh

    def __call__(self, draft: Draft) -> Draft:
        """Multiplies `draft.correction`."""
        rho = safe_exp(_ROWS.totals(self.log_rho(draft)))
        if self.weigh:
            draft = draft.replace(correction=draft.correction * rho)
        return self.reject(draft, (rho < self.low) | (rho > self.high), self.keep_denominator)


@dataclasses.dataclass(frozen=True)
class geometric_mask_is(Correction):
    """Rejects responses by the geometric mean of ρ, whatever their length.

    Args:
      low: Smallest mean kept.
      high: Largest mean kept.
      keep_denominator: Whether rejected tokens still count in the denominators.
    """

    scope: ClassVar[Scope] = "sequence"
    low: float = 0.999
    high: float = 1.001
    keep_denominator: bool = True

    def __call__(self, draft: Draft) -> Draft:
        """Multiplies `draft.correction`."""
        rho = safe_exp(_ROWS.means(self.log_rho(draft), draft.mask))
        return self.reject(draft, (rho < self.low) | (rho > self.high), self.keep_denominator)
