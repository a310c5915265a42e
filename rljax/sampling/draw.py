"""Drawing the next token: temperature, kept set, Gumbel noise, log-probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def row_keys(ids: Int[Array, "S 4"]) -> Array:
    """One random key a row from (seed, prompt id, draw, sample id)."""

    def one(row: Array) -> Array:
        key = jax.random.key(row[0])
        for i in range(1, 4):
            key = jax.random.fold_in(key, row[i])
        return key

    return jax.vmap(one)(ids)


def keep_mask(
    logits: Float[Array, "S V"],
    top_p: Float[Array, " S"],
    top_k: Int[Array, " S"],
    min_p: Float[Array, " S"],
) -> Array:
    """Which tokens each row may draw: top-k first, then top-p of what is left, then min-p.

    Args:
      logits: Divided by the temperature already.
      top_p: Mass to reach within the top k; the token that reaches it is kept. 1: all.
      top_k: How many to keep; 0: all. Ties at the border are all kept.
      min_p: Least probability relative to the likeliest. 0: all.

    Returns:
      bool [S, V]; the likeliest token is always kept.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    ordered = jnp.sort(probs, axis=-1, descending=True)
    most = jnp.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ordered = jnp.where(jnp.arange(logits.shape[1]) < most, ordered, 0.0)
    mass = ordered / jnp.sum(ordered, axis=-1, keepdims=True)
    within = jnp.cumsum(mass, axis=-1) - mass < jnp.where(top_p < 1, top_p, jnp.inf)[:, None]
    count = jnp.sum(within & (ordered > 0), axis=-1)
    floor = jnp.take_along_axis(ordered, jnp.maximum(count - 1, 0)[:, None], axis=-1)
    return probs >= jnp.maximum(floor, min_p[:, None] * ordered[:, :1])


def draw(
    keys: Array,
    logits: Float[Array, "S V"],
    temperature: Float[Array, " S"],
    kept: Array | None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Gumbel-argmax, which changes least when logits move by rounding.

    Args:
      keys: One random key a row.
      logits: float32, already divided by the temperature (1 where it is 0).
      temperature: 0 in greedy rows.
      kept: bool [S, V], or None for all.

    Returns:
      The tokens, and their log-probabilities under the renormalised kept set (under the whole
      distribution in greedy rows).
    """
    if kept is not None:
        kept = kept | (temperature == 0)[:, None]
        logits = jnp.where(kept, logits, -jnp.inf)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    token = jnp.argmax(logits + jnp.where(temperature[:, None] > 0, noise, 0.0), axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)
