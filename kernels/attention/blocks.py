"""Rows cut into blocks: which pairs of blocks hold a key that a query sees, and how arrays lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from rljax_kernels.attention.tokens import Tokens, sees
from rljax_kernels.registry import platform_here

_FAR = 2**30  # beyond every index, position and segment
_SHORT = 1536  # tokens of a row that is likely to hold several short sequences


class Blocks(NamedTuple):
    """Sizes of blocks, in tokens.

    Attributes:
      queries: Of a block of queries.
      keys: Of a block of keys.
    """

    queries: int
    keys: int


def block_sizes(queries: int, keys: int, heads: int, platform: str | None = None) -> Blocks:
    """Sizes that are fast on a platform, for rows of so many queries and keys.

    On CPU the scores of a block should stay in the cache. Elsewhere larger products are faster, as
    long as the scores of a block, over all heads, are few beside the model's activations.
    """
    if (platform or platform_here()) == "cpu":
        size = 64 if keys <= _SHORT else 256
    else:
        size = 512 if heads <= 32 else 256
    return Blocks(*(min(size, -(-n // 8) * 8) for n in (queries, keys)))


def cut(x: Array, size: int) -> Array:
    """[B, T, ...] to [B, blocks, size, ...], with zeros where the last block ends behind T."""
    blocks = -(-x.shape[1] // size)
    pad = blocks * size - x.shape[1]
    if pad:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(x.shape[0], blocks, size, *x.shape[2:])


def cut_queries(x: Array, size: int, kv_heads: int) -> Array:
    """[B, T, H, ...] to [B * blocks, K, rows, ...].

    The rows of a key head are all of its queries' heads, one after the other, so that its products
    are those of plain matrices.
    """
    x = cut(x, size)
    rows, blocks, _, heads, *rest = x.shape
    x = x.reshape(rows * blocks, size, kv_heads, heads // kv_heads, *rest)
    return jnp.moveaxis(x, 1, 3).reshape(rows * blocks, kv_heads, -1, *rest)


def join_queries(x: Array, rows: int, tokens: int, size: int) -> Array:
    """The inverse of `cut_queries`: [B * blocks, K, rows, ...] to [B, T, H, ...]."""
    blocks, kv_heads, _, *rest = x.shape
    x = jnp.moveaxis(x.reshape(blocks, kv_heads, -1, size, *rest), 3, 1)
    return x.reshape(rows, blocks // rows * size, -1, *rest)[:, :tokens]


def cut_keys(x: Array, size: int) -> Array:
    """[B, S, K, d] to [B * blocks, K, size, d]."""
    x = cut(x, size)
    return x.reshape(-1, *x.shape[2:]).swapaxes(1, 2)


def cut_tokens(tokens: Tokens, size: int) -> Tokens:
    """Each [B, T] to [B, blocks, size]; what fills the last block is padding."""
    return jax.tree.map(lambda x: cut(x, size), tokens)


def tile(queries: Tokens, keys: Tokens, window: int | None) -> Bool[Array, "queries keys"]:
    """Which keys of a block each query of a block sees; padding sees nothing and is not seen."""
    queries, keys = jax.tree.map(lambda x: x[None], (queries, keys))
    return sees(queries, keys, window)[0] & (keys.segments[0] > 0)


def needed(queries: Tokens, keys: Tokens, window: int | None) -> Bool[Array, "B nq nk"]:
    """Which pairs of blocks may hold a key that a query sees.

    It is worked out from each block's least and greatest numbers: pairs are found that hold
    nothing where segments interleave, and none is missed.

    Args:
      queries: In blocks, each [B, nq, size].
      keys: In blocks, each [B, nk, size].
      window: How many positions back a query sees; None: all.
    """
    looks, seen = queries.segments > 0, keys.segments > 0

    def low(x: Array, among: Array) -> Array:
        return jnp.where(among, x, _FAR).min(-1)

    def high(x: Array, among: Array) -> Array:
        return jnp.where(among, x, -_FAR).max(-1)

    first, last = low(keys.segments, seen)[:, None], high(keys.segments, seen)[:, None]

    def meet(segments: Array, among: Array) -> Array:
        """Whether the ranges of segments overlap."""
        return (low(segments, among)[..., None] <= last) & (
            high(segments, among)[..., None] >= first
        )

    found = meet(queries.segments, looks)
    if queries.prefix is not None:
        found = found | meet(queries.prefix, looks & (queries.prefix > 0))
    found &= high(queries.index, looks)[..., None] >= low(keys.index, seen)[:, None]
    if window is not None:
        nearest = low(queries.positions, looks)[..., None] - high(keys.positions, seen)[:, None]
        found &= nearest < window
    return found


class Visits(NamedTuple):
    """The blocks of keys that each block of queries needs.

    Attributes:
      counts: How many they are.
      blocks: Their numbers among the blocks of all rows, in order; those behind `counts` are not
        needed.
    """

    counts: Int[Array, " blocks"]
    blocks: Int[Array, "blocks nk"]


def visits(pairs: Bool[Array, "B nq nk"]) -> Visits:
    """The lists of what `needed` found, for blocks of queries of all rows."""
    rows, queries, keys = pairs.shape
    order = jnp.argsort(~pairs, axis=-1, stable=True).astype(jnp.int32)
    order = order + keys * jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    counts = pairs.sum(-1, dtype=jnp.int32)
    return Visits(counts.reshape(-1), order.reshape(rows * queries, keys))


def visited(
    queries: Tokens, keys: Tokens, blocks: Blocks, window: int | None = None
) -> Int[Array, " B"]:
    """How many pairs of blocks are worked on in each row.

    Args:
      queries: Where the queries stand, each [B, T].
      keys: Where the keys stand, each [B, S].
      blocks: Sizes of the blocks.
      window: How many positions back a query sees; None: all.
    """
    pairs = needed(cut_tokens(queries, blocks.queries), cut_tokens(keys, blocks.keys), window)
    return pairs.sum((1, 2), dtype=jnp.int32)


def vary_as(tree: Any, *like: Any) -> Any:
    """Arrays as inputs of a loop whose results are computed from others.

    Inside `shard_map` what a loop carries has to differ over the same mesh axes before and after.
    """
    leaves = [jnp.isnan(x.reshape(-1)[0]) for x in jax.tree.leaves(like) if x.size]
    nothing = sum((x.astype(jnp.int32) * 0 for x in leaves), jnp.int32(0))
    return jax.tree.map(lambda x: x + nothing.astype(x.dtype), tree)
