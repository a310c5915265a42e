"""Sums along a sequence, for padded, packed and context-parallel rows alike.

Transforms never write `sum(axis=-1)`: where rows are packed it would add other responses, and where
the sequence is cut over devices it would miss the rest.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from rljax.batch import Rows
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How sequences lie in rows [R, T], and the sums and spreads over them.

    Attributes:
      segments: 0 on padding, else the number of the sequence in its row, from 1; int [R, T].
        None: every row is one sequence.
      count: Sequences a row may hold (S); 1 takes the plain sum over the row.
      axis: Mesh axis over which T is cut inside `shard_map`; None: rows are whole.
    """

    segments: Int[Array, "R T"] | None = None
    count: int = 1
    axis: str | None = None

    @classmethod
    def of(cls, rows: Rows) -> "SequenceLayout":
        """The layout of some rows."""
        return cls(rows.segments, rows.max_segments, rows.context_axis)

    def sums(self, x: Shaped[Array, "R T"]) -> Shaped[Array, "R S"]:
        """Adds up each sequence; an absent sequence gives 0."""
        if self.count == 1:
            sums = x.sum(axis=1, keepdims=True)
        else:
            sums = self._by_slot(jax.ops.segment_sum, x)
        return sums if self.axis is None else jax.lax.psum(sums, self.axis)

    def spread(self, per_sequence: Shaped[Array, "R S"]) -> Shaped[Array, "R _"]:
        """Gives every position its sequence's entry; packed, padding gets 0.

        Unpacked it stays [R, 1], which broadcasts.
        """
        if self.count == 1:
            return per_sequence
        padded = jnp.pad(per_sequence, ((0, 0), (1, 0)))
        return jnp.take_along_axis(padded, self._slots(), axis=1)

    def totals(self, x: Shaped[Array, "R T"]) -> Shaped[Array, "R _"]:
        """Each position's sequence sum."""
        return self.spread(self.sums(x))

    def means(self, x: Float[Array, "R T"], mask: Shaped[Array, "R T"]) -> Float[Array, "R _"]:
        """Each position's sequence mean over the mask; 0 where the mask is empty."""
        return self.spread(self.averages(x, mask))

    def averages(self, x: Float[Array, "R T"], mask: Shaped[Array, "R T"]) -> Float[Array, "R S"]:
        """The mean of each sequence over the mask; 0 where the mask is empty."""
        sums = self.sums(jnp.where(mask, x, 0.0))
        return sums / jnp.maximum(self.sums(mask.astype(jnp.float32)), 1.0)

    def any(self, mask: Shaped[Array, "R T"]) -> Shaped[Array, "R S"]:
        """Whether a sequence has any True position; bool [R, S]."""
        return self.sums(mask.astype(jnp.int32)) > 0

    def constant(self, x: Int[Array, "R T"]) -> Int[Array, "R S"]:
        """The entry of each sequence for a field that is the same all along it.

        Taken as the maximum, so positions outside may hold anything smaller; absent sequences
        give the smallest integer.
        """
        if self.count == 1:
            entry = x.max(axis=1, keepdims=True)
        else:
            entry = self._by_slot(jax.ops.segment_max, x)
        return entry if self.axis is None else jax.lax.pmax(entry, self.axis)

    def _by_slot(self, reduce: Callable[..., Array], x: Array) -> Array:
        rows, slots = x.shape[0], self.count + 1
        flat = (jnp.arange(rows)[:, None] * slots + self._slots()).reshape(-1)
        return reduce(x.reshape(-1), flat, rows * slots).reshape(rows, slots)[:, 1:]

    def _slots(self) -> Int[Array, "R T"]:
        if self.segments is None:
            raise InputError("a layout of several sequences a row needs segments, got None")
        return jnp.minimum(self.segments, self.count)
