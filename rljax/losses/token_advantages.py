"""Advantages that give each token its own: returns to go, GAE, and the gap to a teacher.

They skip what is not the policy's own: the next token is the next one of the mask.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rljax.errors import InputError
from rljax.losses.advantages import Advantage
from rljax.losses.base import Draft, Scope, Step, missing


@dataclasses.dataclass(frozen=True)
class returns_to_go(Advantage):
    """A_t = Σ of the rewards from t on, discounted, over the policy's own tokens.

    Args:
      gamma: Discount a token.
    """

    gamma: float = 1.0

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages`."""
        return draft.replace(advantages=_discounted(token_rewards(draft), draft.mask, self.gamma))


@dataclasses.dataclass(frozen=True)
class gae(Advantage):
    """Generalised advantage estimation over the policy's own tokens (arXiv:1506.02438).

    δ_t = r_t + γ·V_{t+1} - V_t and A_t = δ_t + γλ·A_{t+1}, where t + 1 is the next token of the
    mask. The response's reward lands on its last token. Returns, the critic's targets, are A + V.

    Args:
      gamma: Discount a token.
      lam: Trace decay.
      truncated: The value after a response cut off by the length limit: 'zero', or 'bootstrap'
        from `Batch.bootstrap_value`.
    """

    gamma: float = 1.0
    lam: float = 0.95
    truncated: Literal["zero", "bootstrap"] = "zero"

    def __post_init__(self) -> None:
        if self.truncated not in ("zero", "bootstrap"):
            raise InputError(f"truncated must be 'zero' or 'bootstrap', got {self.truncated!r}")

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The critic's values."""
        bootstrap = {"bootstrap"} if self.truncated == "bootstrap" else set()
        return frozenset({"values"} | bootstrap)

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages` and `draft.returns`."""
        values = draft.field("values", self)
        rewards = token_rewards(draft)
        if self.truncated == "bootstrap":
            after = draft.batch.bootstrap_value
            if after is None:
                raise missing("bootstrap_value", self, "Batch")
            after = jnp.where(draft.truncated & draft.valid, after, 0.0)
            rewards = rewards + self.gamma * at_last(after, draft.mask)
        deltas = rewards + self.gamma * _next(values, draft.mask) - values
        advantages = _discounted(deltas, draft.mask, self.gamma * self.lam)
        returns = jnp.where(draft.mask, advantages + values, 0.0)
        return draft.replace(advantages=advantages, returns=returns)


@dataclasses.dataclass(frozen=True)
class teacher_gap(Advantage):
    """A_t = log ν - log π, ν the teacher and π the live policy, gradient-stopped.

    It depends on the live policy, so `prepare` leaves it 0 and `loss` fills it in.
    """

    scope: ClassVar[Scope] = "token"

    @property
    def loss_needs(self) -> frozenset[str]:
        """The teacher's log-probabilities."""
        return frozenset({"teacher"})

    def __call__(self, draft: Draft) -> Draft:
        """Sets `draft.advantages` to 0 for now."""
        return draft.replace(advantages=jnp.zeros_like(draft.rewards))

    def live(self, step: Step) -> Step:
        """Sets `step.advantages`."""
        gap = step.field("teacher_logp", self) - step.logp
        return step.replace(advantages=jax.lax.stop_gradient(gap))


def token_rewards(draft: Draft) -> Float[Array, "B T"]:
    """Per-token rewards, with the response's reward added at its last trainable token."""
    terminal = at_last(jnp.where(draft.valid, draft.rewards, 0.0), draft.mask)
    return terminal if draft.token_rewards is None else terminal + draft.token_rewards


def at_last(x: Float[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Puts one number at the last True position of each row, 0 elsewhere."""
    positions = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(mask, positions, -1), axis=1, keepdims=True)
    return jnp.where(positions == last, x[:, None], 0.0)


@functools.partial(jax.jit, static_argnames="decay")
def _discounted(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], decay: float
) -> Float[Array, "B T"]:
    """Σ of x from t on, decaying by a token of the mask; positions outside are skipped."""

    def back(carry: Array, at_t: tuple[Array, Array]) -> tuple[Array, Array]:
        x_t, inside = at_t
        total = jnp.where(inside, x_t + decay * carry, carry)
        return total, jnp.where(inside, total, 0.0)

    start = jnp.zeros(x.shape[0], jnp.float32)
    return jax.lax.scan(back, start, (x.T, mask.T), reverse=True)[1].T


@jax.jit
def _next(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """The value at the next True position, 0 after the last."""

    def back(carry: Array, at_t: tuple[Array, Array]) -> tuple[Array, Array]:
        value, inside = at_t
        return jnp.where(inside, value, carry), carry

    start = jnp.zeros(values.shape[0], jnp.float32)
    return jax.lax.scan(back, start, (values.T, mask.T), reverse=True)[1].T
