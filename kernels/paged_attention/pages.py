"""A KV cache in pages: how its arrays lie, where each row's tokens are, and writing a new one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

Pool = dict[str, Array]
"""`k` [layers, pages, K, d, page_size] and `v` [layers, pages, K, page_size, dv], float32, or
bfloat16 as its bits in uint16. Without `v` (latent attention, K = 1) values are the first dv rows
of keys."""


@struct.dataclass
class PageTables:
    """Where the keys and values of each row lie.

    Rows come in B blocks, one after the other, of R / B rows each. The rows of a block have the
    same first tokens (a prompt), in pages that they share and that are read once for all of them.

    Attributes:
      own: The row's own pages, in order; entries past its last token may be anything valid.
      base: How many tokens of the row lie in its block's shared pages, a multiple of the page size;
        its own pages hold those that follow.
      shared: The pages that a block shares, in order; [1, 0] where there are none.
    """

    own: Int[Array, "R P"]
    base: Int[Array, " R"]
    shared: Int[Array, "B Q"]


def to_bits(x: Array) -> Array:
    """A compute dtype as it lies in a pool."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """The inverse of `to_bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def write_tokens(
    pool: Pool,
    layer: Array | int,
    new: dict[str, Array],
    tables: PageTables,
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
) -> Pool:
    """The pool with one new token of each row, in the row's own pages.

    Args:
      pool: The pool; updated in place where XLA may.
      layer: The layer.
      new: Keys, and values where the pool has some, [R, K, d].
      tables: Where each row's tokens lie.
      positions: Positions of the new tokens, at least `tables.base`.
      live: Which rows have one; nothing is written for the others.
    """
    pages, page_size = pool["k"].shape[1], pool["k"].shape[4]
    place = positions - tables.base
    page = jnp.take_along_axis(tables.own, place[:, None] // page_size, axis=1, mode="clip")[:, 0]
    # Out of bounds: dropped. No two rows write in one place, which XLA on GPU is faster to know.
    page = jnp.where(live, page, pages + jnp.arange(page.shape[0], dtype=page.dtype))
    offset = place % page_size
    out = dict(pool)
    for name, x in pool.items():
        at = x.at[layer, page, :, :, offset] if name == "k" else x.at[layer, page, :, offset]
        out[name] = at.set(to_bits(new[name]), mode="drop", unique_indices=True)
    return out


def own_range(
    tables: PageTables, positions: Int[Array, " R"], live: Bool[Array, " R"], window: int | None
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """The first place in its own pages that each row's new token sees, and the one past the last.

    Nothing is seen by rows that are not live.
    """
    stop = jnp.where(live, positions - tables.base + 1, 0)
    start = 0 if window is None else positions + 1 - window - tables.base
    return jnp.clip(start, 0, stop), stop


def shared_range(
    tables: PageTables, positions: Int[Array, " R"], live: Bool[Array, " R"], window: int | None
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """`own_range` in the pages that the row's block shares."""
    stop = jnp.where(live, tables.base, 0)
    start = 0 if window is None else positions + 1 - window
    return jnp.clip(start, 0, stop), stop
