"""The device mesh, its logical axes and the rules that lay arrays over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rljax.models import ModelConfig
    from rljax.planning import Layout, Work

AXES = ("data", "fsdp", "expert", "context", "tensor", "stage")
"""Mesh axes, in the order of the device grid; each has size 1 unless asked for."""

BATCH_AXES = ("data", "fsdp")
"""The mesh axes over which rows of a batch are split."""

Rules = Mapping[str, str | None]
"""Logical axis of a weight -> the mesh axis that splits it (None: not split)."""

TRAIN_RULES: Rules = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": None,
}
"""Weights, gradients and optimizer state while training."""

ROLLOUT_RULES: Rules = {**TRAIN_RULES, "embed": None}
"""Weights while sampling: whole on every data and fsdp shard, so that decoding gathers nothing."""


# On several virtual CPU devices set JAX_CPU_ENABLE_ASYNC_DISPATCH=false before jax starts: two
# programs with collectives in flight at once can wait for each other for ever.


def make(*, devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Makes a mesh with all axes of `AXES` (axis type Auto).

    Args:
      devices: The devices to use; all of `jax.devices()` by default.
      **sizes: The size of each axis that is not 1, such as `data=2, fsdp=4`.

    Raises:
      ValueError: An axis is unknown, a size is below 1, or the product of the sizes is not
        the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    grid = np.asarray(devices).reshape(_shape(sizes, len(devices)))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_abstract(num_devices: int, **sizes: int) -> AbstractMesh:
    """A mesh without devices, to plan with; axes and refusals are those of `make`."""
    shape = _shape(sizes, num_devices)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _shape(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is unknown; the axes are {', '.join(AXES)}")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name}={size} must be at least 1")
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if math.prod(shape) != num_devices:
        asked = ",".join(f"{n}={s}" for n, s in sizes.items()) or "all axes 1"
        raise ValueError(
            f"mesh {asked} needs {math.prod(shape)} devices, got {num_devices}; change a size "
            "until the product fits, or pass fewer devices"
        )
    return shape


def from_flags(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh from a flag such as `'fsdp=4,expert=2'`; empty puts all devices on fsdp.

    Raises:
      ValueError: The text cannot be read, or `make` refuses the sizes.
    """
    devices = list(jax.devices() if devices is None else devices)
    return make(devices=devices, **read_flags(text, len(devices)))


def read_flags(text: str, num_devices: int) -> dict[str, int]:
    """The sizes of axes that a flag asks for; empty puts all devices on fsdp.

    Raises:
      ValueError: The text cannot be read.
    """
    if not text.strip():
        return {"fsdp": num_devices}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if not size.strip().isdigit():
            raise ValueError(
                f"mesh flag {text!r}: {part!r} is not axis=size; write fsdp=4,expert=2"
            )
        if name in sizes:
            raise ValueError(f"mesh flag {text!r} names axis {name!r} twice; give it one size")
        sizes[name] = int(size)
    return sizes


def sharding(
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int],
    axes: Sequence[str | None],
    rules: Rules,
    name: str = "array",
) -> NamedSharding:
    """The sharding of one weight: its logical axes mapped through a rule table.

    Args:
      mesh: A mesh with the axes of `AXES`; of devices or abstract.
      shape: The weight's shape.
      axes: One logical axis for each dimension (None: never split).
      rules: Logical axis -> mesh axis.
      name: What to call the weight in a refusal.

    Raises:
      ValueError: A logical axis has no rule, a mesh axis is unknown or would be used twice, or a
        size does not divide.
    """
    spec: list[str | None] = []
    for size, logical in zip(shape, axes, strict=True):
        if logical is not None and logical not in rules:
            raise ValueError(f"{name}: logical axis {logical!r} has no rule; add it to the table")
        target = rules[logical] if logical is not None else None
        if target is not None and target not in mesh.shape:
            raise ValueError(
                f"{name}: logical axis {logical!r} is mapped to mesh axis {target!r} which is "
                f"unknown; the axes are {', '.join(mesh.axis_names)}"
            )
        ways = mesh.shape[target] if target is not None else 1
        if ways == 1:
            spec.append(None)
            continue
        if target in spec:
            raise ValueError(
                f"{name}: mesh axis {target!r} would split two dimensions of {tuple(shape)} "
                f"(axes {tuple(axes)}); map one of them to another mesh axis or to None"
            )
        if size % ways:
            fits = [n for n in range(1, size + 1) if size % n == 0]
            below = max(n for n in fits if n <= ways)
            above = min((n for n in fits if n >= ways), default=size)
            raise ValueError(
                f"{name}: axis {logical!r} of size {size} does not divide over mesh axis "
                f"{target}={ways}; the nearest sizes that do are {below} and {above}"
            )
        spec.append(target)
    return NamedSharding(mesh, P(*spec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `BATCH_AXES`, everything else whole."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, P())


def batch_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Into how many parts the rows of a batch are cut."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in BATCH_AXES)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Keeps the leading dimension of an activation split over `BATCH_AXES`.

    Does nothing outside `jax.set_mesh`, so that model code needs no mesh.
    """
    if _mesh_in_use() is None:
        return x
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES))


def shards_in_use() -> int:
    """Into how many parts rows are cut under `jax.set_mesh`; 1 outside it."""
    return batch_shards(_mesh_in_use())


def _mesh_in_use() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, where rows are split over it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(BATCH_AXES) <= set(mesh.axis_names):
        return None
    if any(t != AxisType.Auto for t in mesh.axis_types):  # inside shard_map all is local already
        return None
    return mesh


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays with a leading row dimension onto the mesh, split over `BATCH_AXES`.

    Raises:
      ValueError: The number of rows does not divide.
    """
    parts = batch_shards(mesh)

    def put(x: Any) -> jax.Array:
        if np.shape(x)[0] % parts:
            raise ValueError(
                f"{np.shape(x)[0]} rows do not divide over data×fsdp = {parts} devices; "
                "change the batch size or the mesh"
            )
        return jax.device_put(x, batch_sharding(mesh))

    return jax.tree.map(put, tree)


def describe(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work | None = None,
    rules: Rules = TRAIN_RULES,
) -> Layout:
    """The table of a model on a mesh: shards, bytes per device, what a step communicates.

    Args:
      mesh: A mesh with the axes of `AXES`; it may be abstract. Nothing is allocated.
      config: The model.
      work: The sizes of a step; by default one response for each part of the batch.
      rules: Logical axis -> mesh axis.

    Returns:
      What prints as tables, and shows as such in a notebook.

    Raises:
      ValueError: A parameter or the batch does not divide over the mesh.
    """
    from rljax import planning

    return planning.describe(mesh, config, work, rules)


def draw(
    mesh: Mesh | AbstractMesh, config: ModelConfig, parameter: str, rules: Rules = TRAIN_RULES
) -> Figure:
    """The device grid beside a weight, both in the colours of the weight's shards.

    Args:
      mesh: A mesh with the axes of `AXES`; it may be abstract.
      config: The model.
      parameter: Its name, or the end of it, such as `feed_forward/gate`.
      rules: Logical axis -> mesh axis.

    Raises:
      ValueError: The model has no such parameter, or it does not divide over the mesh.
    """
    from rljax import planning

    return planning.draw(mesh, config, parameter, rules)
