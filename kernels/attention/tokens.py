"""Which keys a query sees: its own sequence up to itself, its prefix, and no further than a window.

A row holds packed sequences, told apart by segment numbers. The rule has no [T, S] array: blocks
work it out for their own queries and keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Tokens:
    """Where the queries, or the keys, of a row stand.

    Attributes:
      index: Places in the whole row, rising: a query sees no key of a greater one. Where a row is
        split over devices each has its own part of them.
      positions: Places in the sequence, from which windows are measured.
      segments: Sequences of a row by number; 0 is padding.
      prefix: The segment that a query sees besides its own (a prompt that several responses share),
        0 for none; None: there are none.
    """

    index: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    prefix: Int[Array, "B T"] | None = None


def whole_rows(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    prefix: Int[Array, "B T"] | None = None,
) -> Tokens:
    """The tokens of rows that are all at hand."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    return Tokens(index, positions, segments, prefix)


def sees(queries: Tokens, keys: Tokens, window: int | None = None) -> Bool[Array, "B T S"]:
    """Which keys each query sees.

    Args:
      queries: Those that look.
      keys: Those that are looked at; their `prefix` does not matter.
      window: How many positions back a query sees, its own included; None: all.
    """
    seen = queries.segments[:, :, None] == keys.segments[:, None, :]
    if queries.prefix is not None:
        ahead = queries.prefix[:, :, None]
        seen = seen | ((ahead == keys.segments[:, None, :]) & (ahead > 0))
    seen = seen & (queries.index[:, :, None] >= keys.index[:, None, :])
    if window is not None:
        seen = seen & (queries.positions[:, :, None] - keys.positions[:, None, :] < window)
    return seen
