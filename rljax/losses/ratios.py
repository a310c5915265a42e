"""Ratios of the live policy to an anchor: of a token, or of its whole sequence.

The anchor is 'old' (the proximal policy, at the start of the step), 'rollout' (the behaviour
policy, which sampled) or 'self' (the live policy without gradient: a ratio of 1). Log-ratios are
kept; `Step.ratio` takes the exponent, clamped at ±20.
"""

import dataclasses
from typing import ClassVar

import jax

from rljax.losses.base import Anchor, Scope, Step, Transform, needs_of_anchor


@dataclasses.dataclass(frozen=True)
class Ratio(Transform):
    """Base of the ratios.

    Args:
      anchor: What the ratio is taken against.
    """

    anchor: Anchor = "old"

    def __post_init__(self) -> None:
        needs_of_anchor(self.anchor)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The anchor's log-probabilities."""
        return needs_of_anchor(self.anchor)

    def __call__(self, step: Step) -> Step:
        """Sets `step.log_ratio`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class token_ratio(Ratio):
    """r_t = π(y_t) / anchor(y_t).

    Args:
      anchor: 'old', 'rollout' or 'self'.
    """

    def __call__(self, step: Step) -> Step:
        """Sets `step.log_ratio`."""
        return step.replace(log_ratio=step.logp - step.anchor(self.anchor, self))


@dataclasses.dataclass(frozen=True)
class sequence_ratio(Ratio):
    """s = exp(mean_t log r_t), one ratio for the whole response (GSPO, arXiv:2507.18071).

    Args:
      anchor: 'old', 'rollout' or 'self'.
      normalize: Take the mean of the log-ratios; False takes their sum, the ratio of the whole
        response's probabilities (RLOO).
    """

    scope: ClassVar[Scope] = "sequence"
    normalize: bool = True

    def __call__(self, step: Step) -> Step:
        """Sets `step.log_ratio`."""
        log_ratio = step.logp - step.anchor(self.anchor, self)
        if self.normalize:
            whole = step.layout.means(log_ratio, step.rows.mask)
        else:
            whole = step.layout.totals(log_ratio)
        return step.replace(log_ratio=whole, counts="sequence")


@dataclasses.dataclass(frozen=True)
class sequence_token_ratio(Ratio):
    """s_t = sg(s)·π(y_t)/sg(π(y_t)): the sequence's value, the token's gradient (GSPO-token).

    Args:
      anchor: 'old', 'rollout' or 'self'.
    """

    def __call__(self, step: Step) -> Step:
        """Sets `step.log_ratio`."""
        stop = jax.lax.stop_gradient
        whole = step.layout.means(step.logp - step.anchor(self.anchor, self), step.rows.mask)
        log_ratio = stop(whole) + (step.logp - stop(step.logp))
        return step.replace(log_ratio=log_ratio, counts="sequence")
