"""Weights on their way from the devices that train to those that sample."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.models.parameters import Params

CHUNK = 2**30
"""Bytes of a parameter that travel at a time, at least one layer's."""


def move(params: Params, wanted: Params) -> Params:
    """Brings weights to other devices, one parameter after the other.

    Each is cast where it is, so that no more travels than is used; a larger one than `CHUNK` goes
    some layers at a time, so that little memory is needed beside what is kept.

    Args:
      params: The weights, on any devices or in host memory.
      wanted: Their shapes, dtypes and shardings, as `jax.ShapeDtypeStruct`s.
    """
    return jax.tree.map(_moved, params, wanted)


def _moved(x: jax.Array | np.ndarray, want: jax.ShapeDtypeStruct) -> jax.Array:
    layers, layout = (x.shape or (1,))[0], want.sharding
    each = math.prod(want.shape) * want.dtype.itemsize // layers
    step = max(CHUNK // each, 1)
    if step >= layers or layout.shard_shape(want.shape)[0] < layers:
        return jax.block_until_ready(jax.device_put(x.astype(want.dtype), layout))
    whole = jax.jit(functools.partial(jnp.zeros, want.shape, want.dtype), out_shardings=layout)()
    for start in range(0, layers, step):
        piece = jax.device_put(x[start : start + step].astype(want.dtype), layout)
        # What is under way is waited for, or all of it would be at once.
        whole = jax.block_until_ready(_write(whole, piece, start))
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, piece: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, axis=0)
