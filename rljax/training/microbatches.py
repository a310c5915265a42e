"""Cutting rows into micro-batches, computing them in turn, and joining what came of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rljax.errors import InputError


def count_micro_batches(rows: int, shards: int, micro_batch_size: int) -> int:
    """Into how many micro-batches rows are cut: the fewest that hold at most `micro_batch_size`.

    Args:
      rows: Rows of an optimizer step.
      shards: Devices over which rows are split.
      micro_batch_size: Rows of a micro-batch on each device at most; 0: all at once.

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
    return each // max(n for n in range(1, each + 1) if each % n == 0 and n <= micro_batch_size)


def cut(tree: Any, parts: int) -> Any:
    """[R, ...] to [parts, R / parts, ...], in turns, so that no row changes device."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def join(x: Array) -> Array:
    """The inverse of `cut`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def fold(
    add: Callable[[Any, Any], Any], start: Any, tree: Any, parts: int, live: Any = None
) -> Any:
    """Takes micro-batches in turn, carrying what came of them so far.

    Args:
      add: (carried, micro-batch) -> carried.
      start: What is carried at first.
      tree: Rows [R, ...].
      parts: Micro-batches.
      live: int32, how many of them, the first ones, are computed; None: all.
    """
    if parts == 1:
        return add(start, tree)
    pieces = cut(tree, parts)

    def turn(i: Array, carried: Any) -> Any:
        return add(
            carried, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), pieces)
        )

    return jax.lax.fori_loop(0, parts if live is None else live, turn, start)


def map_parts(function: Callable[[Any], Any], tree: Any, parts: int, live: Any = None) -> Any:
    """A function's results for each micro-batch, stacked [parts, ...]; 0 for those not computed.

    Args:
      function: Of a micro-batch.
      tree: Rows [R, ...].
      parts: Micro-batches.
      live: As for `fold`.
    """
    if parts == 1:
        return jax.tree.map(lambda x: x[None], function(tree))
    if live is None:
        return jax.lax.map(function, cut(tree, parts))
    function = jax.jit(function)  # so that it is traced once
    micro = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], cut(tree, parts)), tree)
    start = jax.tree.map(
        lambda x: jnp.zeros((parts, *x.shape), x.dtype), jax.eval_shape(function, micro)
    )

    def add(carried: Any, micro: Any) -> Any:
        done, found = carried
        new = function(micro)
        found = jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, done, 0), found, new
        )
        return done + 1, found

    return fold(add, (jnp.int32(0), start), tree, parts, live)[1]
