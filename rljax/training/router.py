"""Sums over what the routers of a mixture did; micro-batches add to them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from rljax import models, processes


@struct.dataclass
class RouterSums:
    """What the routers did, summed over tokens, so that micro-batches add.

    Attributes:
      load: float32 [layers, E], tokens given to each expert.
      entropy: float32 [layers], nats, summed over tokens.
      flips: float32 [layers], tokens whose own experts differ from the sampler's.
      tokens: float32, tokens counted.
    """

    load: Float[Array, "layers E"]
    entropy: Float[Array, " layers"]
    flips: Float[Array, " layers"]
    tokens: Float[Array, ""]

    def metrics(self) -> dict[str, float]:
        """Under the names of the tag table."""
        load, entropy, flips, tokens = processes.fetch(
            (self.load, self.entropy, self.flips, self.tokens)
        )
        if not tokens:
            return {}
        over_mean = load.max(1) / load.mean(1)
        values = {
            "moe/load_max_over_mean": float(over_mean.mean()),
            "moe/router_entropy": float(entropy.mean() / tokens),
            "moe/dead_frac": float((load == 0).mean()),
            "mismatch/routing_flip_frac": float(flips.mean() / tokens),
        }
        for i, share in enumerate(load.max(1) / load.sum(1)):
            values[f"moe/expert_{i}_load"] = float(share)
        return values


def router_sums(
    router: models.RouterOutputs | None,
    other: Int[Array, "R T layers k"] | None,
    counted: Shaped[Array, "R T"],
) -> RouterSums | None:
    """Sums over the routers of a forward pass.

    Args:
      router: What the forward pass gave; None for a dense model.
      other: Another routing, to count the tokens that were routed otherwise; None: the flips that
        the forward pass counted itself.
      counted: Whether, or how often, tokens count where `other` is compared.
    """
    if router is None:
        return None
    flips = router.flips
    if other is not None:
        known = counted * (other[..., 0, 0] >= 0).astype(jnp.float32)
        differ = jnp.any(jnp.sort(router.experts, -1) != jnp.sort(other, -1), axis=-1)
        flips = flips + jnp.sum(known[..., None] * differ, axis=(0, 1))
    return RouterSums(router.load, router.entropy, flips, router.tokens)
