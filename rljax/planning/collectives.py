"""Collectives: their kinds, and the bytes that devices send in one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Collective:
    """Communication of one kind over one mesh axis.

    Attributes:
      kind: Such as `all-gather`.
      axis: The mesh axis whose devices communicate.
      bytes: Bytes that each device sends, with a ring algorithm.
      why: Its purpose, in a line.
    """

    kind: str
    axis: str
    bytes: int
    why: str


def ring_bytes(kind: str, whole: float, devices: int) -> float:
    """Bytes that each device sends in a collective with a ring algorithm.

    Args:
      kind: The collective.
      whole: Bytes of the whole buffer: after gathering, or before scattering.
      devices: How many devices take part.
    """
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * whole * (devices - 1) / devices
