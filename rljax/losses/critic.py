"""The critic's loss."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.losses.base import Step, Transform
from rljax.losses.metrics import Mean, Metrics, Moments


@dataclasses.dataclass(frozen=True)
class value_loss(Transform):
    """½·max of the squared errors of V and of V clipped around its old value (PPO).

    Needs `PolicyOutputs.values` (live) and, for the clip, `Rows.values` (at the start of the
    step); the targets are `Rows.returns`, from `gae`.

    Args:
      clip: How far V may move from its old value before its error counts as clipped; None: no
        clipping.
      coef: Coefficient of the loss.
      weights: 'token' for a mean over kept tokens, 'policy' for the objective's own weights.
    """

    clip: float | None = 0.2
    coef: float = 1.0
    weights: Literal["policy", "token"] = "token"

    @property
    def loss_needs(self) -> frozenset[str]:
        """The critic's values."""
        return frozenset({"values"})

    def errors(self, step: Step) -> Float[Array, "R T"]:
        """The loss of each token, before coefficient and weight."""
        values, returns = step.output("values", self), step.field("returns", self)
        free = (values - returns) ** 2
        if self.clip is None:
            return 0.5 * free
        old = step.field("values", self)
        moved = values - old
        inside = jnp.abs(moved) <= self.clip
        held = jnp.where(inside, values, old + self.clip * jnp.sign(moved))
        error = (held - returns) ** 2
        return 0.5 * jnp.where(error > free, error, free)

    def stats(self, step: Step, errors: Float[Array, "R T"]) -> Metrics:
        """critic/loss and critic/explained_var."""
        values, returns = step.output("values", self), step.field("returns", self)
        kept = step.counted()
        explained = Moments.of(returns, kept, returns - values, report="explained_variance")
        return {"critic/loss": Mean.of(errors, kept), "critic/explained_var": explained}
