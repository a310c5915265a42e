"""Sampling the next token: random keys, kept set, Gumbel noise, log-probability."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

_THREEFRY = "threefry2x32"
_LOW = 0 if sys.byteorder == "little" else 1  # the low half of an int64 seen as two uint32


def key_words(keys: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
    """Random keys as the device takes them.

    Args:
      keys: seed, prompt id, draw and sample id of each; 64 bits with sign, the sample id 31 bits.

    Returns:
      uint32 [S, 7]: the low halves of all four, then the high halves of the first three.
    """
    words = np.asarray(keys, np.int64).reshape(-1, 4).view(np.uint32).reshape(-1, 4, 2)
    return np.concatenate([words[:, :, _LOW], words[:, :3, 1 - _LOW]], axis=1)


def row_keys(words: UInt[Array, "S 7"]) -> Array:
    """One random key a row from (seed, prompt id, draw, sample id), see `key_words`.

    The high halves are folded in after all low ones, and only where one of them is not 0: keys of
    31-bit numbers are those of the low halves alone.
    """

    def one(row: Array) -> Array:
        key = jax.random.key(row[0], impl=_THREEFRY)
        for word in row[1:4]:
            key = jax.random.fold_in(key, word)
        wide = key
        for word in row[4:]:
            wide = jax.random.fold_in(wide, word)
        narrow = jnp.all(row[4:] == 0)
        data = jnp.where(narrow, jax.random.key_data(key), jax.random.key_data(wide))
        return jax.random.wrap_key_data(data, impl=_THREEFRY)

    return jax.vmap(one)(words)


def keys_at(keys: Array, positions: Int[Array, " S"]) -> UInt[Array, "S 2"]:
    """The key of each row at the position that is drawn."""
    data = jax.random.key_data(keys)
    place = positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    first = _mix(data[:, 0] + place)
    return jnp.stack([first, _mix(data[:, 1] ^ first)], axis=1)


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


def likeliest(
    logits: Float[Array, "S V"], kept: Bool[Array, "S V"], cut: Bool[Array, " S"], most: int
) -> tuple[Bool[Array, "S V"], Int[Array, "S most"]]:
    """Cuts kept sets to so few tokens that they can be returned.

    Args:
      logits: Of the whole vocabulary.
      kept: Which tokens each row may draw.
      cut: Rows whose set is to be cut; others keep theirs.
      most: Tokens that a cut row keeps at most, its likeliest.

    Returns:
      The sets, and their ids; -1 past the end of a set and in rows that are not cut.
    """
    values, ids = jax.lax.top_k(jnp.where(kept, logits, -jnp.inf), most)
    ids = jnp.where((values > -jnp.inf) & cut[:, None], ids, -1)
    place = jnp.where(ids < 0, kept.shape[1], ids)  # out of bounds: dropped
    inside = (
        jnp.zeros_like(kept).at[jnp.arange(kept.shape[0])[:, None], place].set(True, mode="drop")
    )
    return jnp.where(cut[:, None], inside, kept), ids


def sample_tokens(
    keys: UInt[Array, "S 2"],
    logits: Float[Array, "S V"],
    temperature: Float[Array, " S"],
    kept: Array | None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Gumbel-argmax, which changes least when logits move by rounding.

    In the form of a race: -log of an exponential variate is Gumbel noise, so the largest of
    logit + noise is the largest of probability / variate, and probabilities are needed anyway.

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
    size = logits.shape[1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(logits - top)
    pace = mass / jnp.where(temperature[:, None] > 0, exponential(keys, size), 1.0)
    # Kept apart: fused into the reductions, the noise would be computed number by number on CPU,
    # and so would an argmax.
    mass, pace = jax.lax.optimization_barrier((mass, pace))
    first = pace == jnp.max(pace, axis=-1, keepdims=True)
    token = jnp.min(jnp.where(first, jnp.arange(size), size - 1), axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1) - top
    return token.astype(jnp.int32), chosen[:, 0] - jnp.log(jnp.sum(mass, axis=-1))


def exponential(keys: UInt[Array, "S 2"], size: int) -> Float[Array, "S size"]:
    """Standard exponential variates, each a hash of its row's key and its place.

    The smallest decide the race, so they have the finest grain: 32 bits of a uniform near 0.
    """
    place = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits = _mix(_mix(place + keys[:, :1]) ^ keys[:, 1:])
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24)))


def _mix(x: Array) -> Array:
    """A bijection of 32 bits in which each bit of the input moves every other (MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
