"""Where rows that are sorted by group lie while they are multiplied."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

_LARGEST_FIRST, _BLOCK = 512, 128  # larger ones are no faster, and hold more padding


class RowLayout(NamedTuple):
    """Where rows lie for `grouped`.

    Attributes:
      groups: Their number, E.
      rows: Places in all.
      first: Rows of the first block of each group, which is there whether it is used or not. All
        of these go through one batched product, which costs less than a loop. 0: there are none.
      block: Rows of each block behind them, all of one group; only those used cost anything.
        0: there are no blocks; rows lie one behind the other, as all backends but `blocks` have
        them.
      backend: What multiplies them.
    """

    groups: int
    rows: int
    first: int
    block: int
    backend: str = "ragged"

    def places(self, group: Int[Array, " M"], group_sizes: Int[Array, " E"]) -> Int[Array, " M"]:
        """The place of each sorted row, given its group; rows of no group get none: `rows`."""
        place = jnp.arange(group.shape[0], dtype=jnp.int32)
        if self.block:
            mine = jnp.minimum(group, self.groups - 1)
            rank = place - (jnp.cumsum(group_sizes) - group_sizes)[mine]
            blocks = self.blocks_behind(group_sizes)
            behind = self.groups * self.first + (jnp.cumsum(blocks) - blocks)[mine] * self.block
            inside = rank < self.first
            place = jnp.where(inside, mine * self.first + rank, behind + rank - self.first)
        return jnp.where(group < self.groups, place, self.rows)

    def blocks_behind(self, group_sizes: Int[Array, " E"]) -> Int[Array, " E"]:
        """How many blocks each group needs besides its first one."""
        return -(-jnp.maximum(group_sizes - self.first, 0) // self.block)


def row_layout(
    rows: int,
    groups: int,
    backend: str,
    *,
    expected: int | None = None,
    largest: int | None = None,
) -> RowLayout:
    """The layout that any split of rows into groups fits in, chosen for an even one.

    Args:
      rows: At most so many rows have a group.
      groups: Number of groups.
      backend: What multiplies them, as `rljax_kernels.grouped_matmul.choose_backend` gives it.
      expected: How many rows are expected to have one; None: all.
      largest: No group has more; None: `rows`.
    """
    if backend != "blocks":
        return RowLayout(groups, rows, 0, 0, backend)
    expected, largest = rows if expected is None else expected, min(largest or rows, rows)
    mean = expected / groups
    # Groups that chance makes larger than their mean mostly fit, too.
    fits = max(1, min(-(-math.ceil(mean + 3 * mean**0.5) // 8) * 8, largest, _LARGEST_FIRST))
    first = fits if mean >= 0.5 else 0  # else most groups are empty
    block = min(fits, _BLOCK)
    # At most so many blocks are needed behind: all rows in one group, or few in each of many.
    behind = min(-(-max(rows - first, 0) // block) if first else rows // block + groups, rows)
    behind = min(behind, groups * -(-(largest - first) // block))
    return RowLayout(groups, groups * first + behind * block, first, block, backend)


def group_of(sizes: Array, index: Array) -> Array:
    """The group of each of some sorted rows or blocks."""
    return (jnp.cumsum(sizes) <= index[..., None]).sum(-1, dtype=jnp.int32)
