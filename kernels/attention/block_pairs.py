"""The pairs of blocks of queries and keys that a kernel has to visit: no others cost anything.

A pair is left out where no query of it sees a key, by the ranges of segments, places and positions
in its blocks. The pairs stand in one list for all rows, ordered so that those of one block of
results follow each other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from rljax_kernels.attention.tokens import Tokens

FIRST, LAST, MASKED, SEEN = 1, 2, 4, 8
"""Flags of a pair: the first and the last of its block of results, whether some of its queries do
not see some of its keys, and whether any do (a block of results without keys has one pair, too)."""
_FAR = 2**30


class Pairs(NamedTuple):
    """A list of pairs, for a kernel's scalar memory.

    Attributes:
      blocks: Block of queries · 2^16 + block of keys.
      rows: Row · 2^4 + flags.
      count: How many there are; entries past them mean nothing.
    """

    blocks: Int[Array, " n"]
    rows: Int[Array, " n"]
    count: Int[Array, ""]


class _Range(NamedTuple):
    low: Array
    high: Array


def _ranges(x: Array, real: Array, block: int) -> _Range:
    """The range of the real tokens' values in each block; an empty range where there are none."""
    cut = (x.shape[0], -1, block)
    low = jnp.where(real, x, _FAR).reshape(cut).min(-1)
    return _Range(low, jnp.where(real, x, -_FAR).reshape(cut).max(-1))


def _meet(a: _Range, b: _Range) -> Array:
    """Whether ranges of queries' blocks [B, n] and keys' blocks [B, m] overlap: [B, n, m]."""
    return (a.low[:, :, None] <= b.high[:, None]) & (a.high[:, :, None] >= b.low[:, None])


def _same(a: _Range, b: _Range) -> Array:
    """Whether all values of both blocks are one and the same: [B, n, m]."""
    one = (a.low == a.high)[:, :, None] & (b.low == b.high)[:, None]
    return one & (a.low[:, :, None] == b.low[:, None])


def block_pairs(
    queries: Tokens, keys: Tokens, window: int | None, sizes: tuple[int, int]
) -> tuple[Bool[Array, "B n m"], Bool[Array, "B n m"]]:
    """Which pairs of blocks may have a query that sees a key, and in which all see all.

    Args:
      queries: Of rows whose lengths are multiples of the blocks'; segment 0 sees nothing.
      keys: Likewise.
      window: How many positions back a query sees; None: all.
      sizes: Tokens of a block of queries, and of keys.
    """
    q_real, k_real = queries.segments > 0, keys.segments > 0
    bq, bk = sizes
    q_segment = _ranges(queries.segments, q_real, bq)
    k_segment = _ranges(keys.segments, k_real, bk)
    q_index, k_index = _ranges(queries.index, q_real, bq), _ranges(keys.index, k_real, bk)
    seen, full = _meet(q_segment, k_segment), _same(q_segment, k_segment)
    if queries.prefix is not None:
        q_prefix = _ranges(queries.prefix, q_real & (queries.prefix > 0), bq)
        seen, full = seen | _meet(q_prefix, k_segment), full | _same(q_prefix, k_segment)
        # A block that some queries with a prefix share with others without one is not full.
        some = _ranges(queries.prefix, q_real, bq)
        full &= (some.low == some.high)[:, :, None]
    seen &= q_index.high[:, :, None] >= k_index.low[:, None]
    full &= q_index.low[:, :, None] >= k_index.high[:, None]
    if window is not None:
        q_at = _ranges(queries.positions, q_real, bq)
        k_at = _ranges(keys.positions, k_real, bk)
        seen &= q_at.low[:, :, None] - k_at.high[:, None] < window
        full &= q_at.high[:, :, None] - k_at.low[:, None] < window
    rows = queries.segments.shape[0]
    q_all = q_real.reshape(rows, -1, bq).all(-1)
    k_all = k_real.reshape(rows, -1, bk).all(-1)
    return seen, seen & full & q_all[:, :, None] & k_all[:, None]


def list_pairs(seen: Bool[Array, "B n m"], full: Bool[Array, "B n m"], by_keys: bool) -> Pairs:
    """The list of the pairs that are seen, ordered by blocks of queries or of keys."""
    b, n, m = seen.shape
    results, others = (m, n) if by_keys else (n, m)
    if by_keys:
        seen, full = seen.swapaxes(1, 2), full.swapaxes(1, 2)
    listed = seen | (~seen.any(-1, keepdims=True) & (jnp.arange(others) == 0))
    flags = jnp.where(full, 0, MASKED) + jnp.where(seen, SEEN, 0)
    earlier = jnp.cumsum(listed, -1)
    flags += jnp.where(earlier == 1, FIRST, 0)
    flags += jnp.where(earlier == earlier[..., -1:], LAST, 0)
    row = jnp.arange(b)[:, None, None] << 4
    one, other = jnp.arange(results)[None, :, None], jnp.arange(others)[None, None]
    blocks = (other << 16) + one if by_keys else (one << 16) + other
    blocks = jnp.broadcast_to(blocks, listed.shape)
    order = jnp.argsort(~listed.reshape(-1), stable=True)
    pick = lambda x: x.reshape(-1)[order].astype(jnp.int32)  # noqa: E731
    return Pairs(pick(blocks), pick(row + flags), listed.sum(dtype=jnp.int32))


def block_sizes(queries: int, keys: int, most: tuple[int, int]) -> tuple[int, int]:
    """Tokens of a block: multiples of 128, no more than are needed or than `most`."""

    def fit(tokens: int, limit: int) -> int:
        blocks = -(-tokens // limit)
        return -(-tokens // (128 * blocks)) * 128

    return fit(queries, most[0]), fit(keys, most[1])


def padded(tokens: Tokens, size: int) -> Tokens:
    """Tokens of longer rows: those added are padding."""

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, size - x.shape[1])))

    return jax.tree.map(pad, tokens)
