"""Weights from the trainer to the sampler: cast, laid out, or brought from other devices."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from rljax import mesh as meshes
from rljax import models, processes
from rljax.models.config import ModelConfig
from rljax.models.parameters import Params

_log = logging.getLogger(__name__)

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
    whole = _zeros(want.shape, want.dtype, layout)
    for start in range(0, layers, step):
        size = min(step, layers - start)
        if isinstance(x, jax.Array):
            piece = _piece(x, start, size, want.dtype)
        else:
            piece = x[start : start + size].astype(want.dtype)
        # Each piece is waited for, or all would be in flight at once.
        whole = jax.block_until_ready(_write(whole, jax.device_put(piece, layout), start))
    return whole


@functools.cache
def _zeros_program(shape: tuple[int, ...], dtype: Any, layout: Sharding) -> Callable[[], jax.Array]:
    """One program for all loads: a jitted function made anew would be compiled anew."""
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=layout)


def _zeros(shape: tuple[int, ...], dtype: Any, layout: Sharding) -> jax.Array:
    return _zeros_program(shape, dtype, layout)()


@functools.partial(jax.jit, static_argnums=(2, 3))
def _piece(x: jax.Array, start: Any, size: int, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size).astype(dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, piece: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, axis=0)


class WeightSync:
    """Takes the trainer's weights over for sampling.

    Attributes:
      moved: Bytes of weights that the last `adopt` laid out anew or brought from other devices.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None, rules: meshes.Rules) -> None:
        self._config, self._mesh, self._rules = config, mesh, rules
        self.moved = 0

    def wanted(self, config: ModelConfig) -> Params:
        """Shapes, dtypes and layout of the weights that the programs of a model take."""
        laid = models.abstract(config, mesh=self._mesh, rules=self._rules)
        cast = jax.eval_shape(lambda p: models.cast_for_compute(p, config), laid)
        return jax.tree.map(
            lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w.sharding), cast, laid
        )

    def adopt(self, params: Params, version: int) -> Params:
        """The weights in the compute dtypes and the rollout layout.

        They are the very same buffers where they have both already. Else they are cast and laid out
        by one jitted function, or brought from other devices piece by piece; bytes and time are
        logged.

        Args:
          params: The weights.
          version: Their version, for the log.
        """
        wanted = self.wanted(self._config)
        self.moved = 0
        if all(jax.tree.leaves(jax.tree.map(self._fits, params, wanted))):
            return params
        started = time.perf_counter()
        near = all(map(self._is_here, jax.tree.leaves(params)))
        params = self._convert(params) if near else move(params, wanted)
        jax.block_until_ready(params)
        self.moved = sum(x.nbytes for x in jax.tree.leaves(params))
        _log.debug(
            "version %d: %d bytes of weights %s in %.3f s",
            version,
            self.moved,
            "laid out for sampling" if near else "brought from other devices",
            time.perf_counter() - started,
        )
        return params

    def _fits(self, have: Any, want: jax.ShapeDtypeStruct) -> bool:
        if not isinstance(have, jax.Array) or have.dtype != want.dtype:
            return False
        return self._mesh is None or have.sharding.is_equivalent_to(want.sharding, have.ndim)

    def _is_here(self, x: Any) -> bool:
        return self._mesh is None or (
            isinstance(x, jax.Array) and x.sharding.device_set == set(self._mesh.devices.flat)
        )

    @functools.cached_property
    def _convert(self) -> Callable:
        """Casts weights and lays them out for rollouts; one program for all loads."""
        out = None
        if self._mesh is not None:
            out = models.shardings(self._config, self._mesh, self._rules)
        convert = jax.jit(lambda p: models.cast_for_compute(p, self._config), out_shardings=out)
        return processes.run_serially(convert)
