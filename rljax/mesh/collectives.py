"""Collectives inside `shard_map` whose gradients add up in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rljax.mesh.meshes import AXES


def varies(x: Any, axis: str) -> bool:
    """Whether an array inside `shard_map` may differ between devices along a mesh axis."""
    return axis in jax.typeof(x).manual_axis_type.varying


def vary_over(tree: Any) -> tuple[str, ...]:
    """The mesh axes along which any array of a tree may differ inside `shard_map`."""
    return tuple(a for a in AXES if any(varies(x, a) for x in jax.tree.leaves(tree)))


def true_anywhere(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Whether a bool is true on any device along mesh axes, inside `shard_map` or outside.

    Devices that exchange tokens must end a loop at the same iteration.
    """
    axes = tuple(axis for axis in axes if varies(x, axis))
    return jax.lax.psum(x.astype(jnp.int32), axes) > 0 if axes else x


def vary_alike(tree: Any) -> Any:
    """Casts every array to vary over all axes that any of them varies over, inside `shard_map`.

    In the backward pass the gradients of an array's copies add up in float32.
    """
    axes = vary_over(tree)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if not varies(x, a))
        return _vary(x, missing) if missing else x

    return jax.tree.map(cast, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pcast(x, axes, to="varying")


def _vary_forward(x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _vary(x, axes), None


def _vary_backward(axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    if g.dtype == jax.dtypes.float0:  # integers have no gradient to add up
        return (g,)
    return (jax.lax.psum(g.astype(jnp.float32), axes).astype(g.dtype),)


_vary.defvjp(_vary_forward, _vary_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axes: str | tuple[str, ...], dimension: int = 0) -> jax.Array:
    """All-gather along mesh axes, inside `shard_map`: the devices' shards concatenated.

    In the backward pass the gradients of the copies add up in float32.

    Args:
      x: The device's shard.
      axes: The mesh axes to gather over.
      dimension: The dimension along which shards are concatenated.
    """
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)


def _gather_forward(
    x: jax.Array, axes: str | tuple[str, ...], dimension: int
) -> tuple[jax.Array, None]:
    return gather(x, axes, dimension), None


def _gather_backward(
    axes: str | tuple[str, ...], dimension: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    if g.dtype == jax.dtypes.float0:
        return (g,)
    total = jax.lax.psum_scatter(
        g.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True
    )
    return (total.astype(g.dtype),)


gather.defvjp(_gather_forward, _gather_backward)
