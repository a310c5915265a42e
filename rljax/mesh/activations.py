"""Sharding activations inside model code; without a mesh these functions do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rljax.mesh.meshes import AXES, BATCH_AXES

Names = str | Sequence[str] | None
"""The mesh axes that are to split one dimension of an activation."""


def split(axis: str) -> bool:
    """Whether XLA splits arrays over a mesh axis here: under `jax.set_mesh`, not in `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types.get(axis) == AxisType.Auto and mesh.shape[axis] > 1


def fit(shape: Sequence[int], *names: Names) -> P:
    """The spec that splits each dimension over those of the given mesh axes that divide it.

    Args:
      shape: The array's shape.
      *names: For each dimension its mesh axes, in order. The first one that does not divide what
        the ones before it left, and all after it, are dropped. Dimensions without an entry are not
        split.
    """
    spec: list[Any] = []
    for size, wanted in zip(shape, names, strict=False):
        kept: list[str] = []
        for axis in [wanted] if isinstance(wanted, str) else wanted or ():
            if not split(axis):
                continue
            devices = jax.sharding.get_abstract_mesh().shape[axis]
            if size % devices:
                break
            kept.append(axis)
            size //= devices
        spec.append(tuple(kept) or None)
    return P(*spec)


def axes_of(spec: Iterable[Names]) -> tuple[str, ...]:
    """The mesh axes that a spec names."""
    return tuple(a for part in spec for a in ((part,) if isinstance(part, str) else part or ()))


def constrain(x: jax.Array, *names: Names) -> jax.Array:
    """Keeps an activation split over mesh axes; see `fit`.

    Does nothing outside `jax.set_mesh`, so that model code needs no mesh.
    """
    spec = fit(x.shape, *names)
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x


def constrain_rows(x: jax.Array) -> jax.Array:
    """Keeps an activation [B, T, ...] split over `BATCH_AXES` and, along T, over `context`."""
    return constrain(x, BATCH_AXES, "context")


def map_shards(
    function: Callable[..., Any], in_specs: Any, out_specs: Any, checked: bool = True
) -> Callable[..., Any]:
    """`jax.shard_map` over all axes that XLA splits here; the function itself where there are none.

    Args:
      function: Computes on each device's shards; `varies` tells over which axes an array differs.
      in_specs: As for `jax.shard_map`, made by `fit`.
      out_specs: Likewise.
      checked: Whether JAX checks over which axes results differ, which some kernels do not say;
        without that `varies` knows nothing.
    """
    if not any(map(split, AXES)):
        return function
    # Axes of one device too: the compiler of Pallas takes no program that XLA could split further.
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = {axis for axis, kind in types if kind == AxisType.Auto}
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=checked
    )
