"""Cutting rows into micro-batches and joining what came of them."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from rljax.errors import InputError


def count_micro_batches(rows: int, shards: int, micro_batch_size: int, unit: int = 1) -> int:
    """Into how many micro-batches rows are cut: the fewest that hold at most `micro_batch_size`.

    Args:
      rows: Responses of an optimizer step.
      shards: Devices over which rows are split.
      micro_batch_size: Responses of a micro-batch on each device at most; 0: all at once.
      unit: Responses that stay together: G where groups share their prompts.

    Raises:
      InputError: The rows do not divide over the devices.
    """
    if rows % shards:
        raise InputError(
            f"{rows} responses of an update do not divide over stage×data×fsdp×expert = {shards} "
            "devices; change mini_batch_size or the mesh"
        )
    each = rows // shards
    if not micro_batch_size or micro_batch_size >= each:
        return 1
    sizes = [n for n in range(unit, each + 1, unit) if each % n == 0]
    return each // max((n for n in sizes if n <= micro_batch_size), default=sizes[0])


def cut(tree: Any, parts: int, unit: int = 1) -> Any:
    """[R, ...] to [parts, R / parts, ...], `unit` rows in turn, so that no row changes device."""

    def one(x: Array) -> Array:
        turns = x.reshape(-1, parts, unit, *x.shape[1:]).swapaxes(0, 1)
        return turns.reshape(parts, -1, *x.shape[1:])

    return jax.tree.map(one, tree)


def join(x: Array, unit: int = 1) -> Array:
    """The inverse of `cut`."""
    turns = x.reshape(x.shape[0], -1, unit, *x.shape[2:]).swapaxes(0, 1)
    return turns.reshape(-1, *x.shape[2:])
