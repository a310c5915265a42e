"""Estimators of KL(π‖ref) from one sample a token: k1, k2, k3 (Schulman, 2020).

With d = log π - log ref: k1 = d, k2 = d²/2, k3 = e^(-d) - 1 + d. As values, k1 and k3 are unbiased
on-policy. As losses their expected gradients differ: k2's is that of KL(π‖ref), k3's that of
KL(ref‖π), and k1's is 0.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.errors import InputError
from rljax.losses.base import clamped

Estimator = Literal["k1", "k2", "k3"]


def check_estimator(estimator: str) -> None:
    """Refuses an unknown estimator."""
    if estimator not in ("k1", "k2", "k3"):
        raise InputError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def kl_estimate(
    logp: Float[Array, "..."], ref: Float[Array, "..."], estimator: Estimator = "k3"
) -> Float[Array, "..."]:
    """Estimates KL(π‖ref) for each token, with its gradient.

    Args:
      logp: log π of the sampled tokens, nats.
      ref: log ref of the same tokens.
      estimator: 'k1', 'k2' or 'k3'; k3's difference is held within ±20, with gradient 0 beyond.

    Returns:
      One estimate a token, nats.
    """
    difference = logp - ref
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    held = clamped(-difference)
    return jnp.expm1(held) - held
