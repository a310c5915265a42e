"""Making a mesh: its axes, their sizes, and the flags that ask for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from rljax.errors import InputError

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, in the order of the device grid; each has size 1 unless asked for. Neighbouring
devices differ in the last axis. Pipeline stages communicate least and are farthest apart."""

BATCH_AXES = ("stage", "data", "fsdp", "expert")
"""The mesh axes over which rows of a batch and slots of the sampler are split. Experts and stages
are among them, so that every device has rows outside the experts and outside the layers. Inside the
experts tokens are exchanged; through the layers of the stages rows pass in micro-batches."""


# On several virtual CPU devices set JAX_CPU_ENABLE_ASYNC_DISPATCH=false before jax starts: two
# programs with collectives in flight at once can wait for each other for ever.


def make(*, devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Makes a mesh with all axes of `AXES` (axis type Auto).

    Args:
      devices: The devices to use; all of `jax.devices()` by default.
      **sizes: The size of each axis that is not 1, such as `data=2, fsdp=4`.

    Raises:
      InputError: An axis is unknown, a size is below 1, or the product of the sizes is not the
        number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    grid = np.asarray(devices).reshape(_shape(sizes, len(devices)))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_abstract(num_devices: int, **sizes: int) -> AbstractMesh:
    """Makes a mesh without devices, to plan with.

    Args:
      num_devices: The number of devices to plan for.
      **sizes: As for `make`.

    Raises:
      InputError: As `make`.
    """
    shape = _shape(sizes, num_devices)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _shape(sizes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise InputError(f"mesh axis {unknown[0]!r} is unknown; the axes are {', '.join(AXES)}")
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"mesh axis {name}={size} must be at least 1")
    shape = tuple(sizes.get(name, 1) for name in AXES)
    total = math.prod(shape)
    if total != num_devices:
        asked = ",".join(f"{n}={s}" for n, s in sizes.items()) or "all axes 1"
        fits = [
            f"{n}={s * num_devices // total}"
            for n, s in sizes.items()
            if s * num_devices % total == 0
        ]
        fix = f"choose sizes whose product is {num_devices}"
        if fits:
            fix = f"{' or '.join(fits)} would fit"
        raise InputError(f"mesh {asked} needs {total} devices, got {num_devices}; {fix}")
    return shape


def from_flags(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh from a flag such as `'fsdp=4,expert=2'`; empty: all devices on fsdp.

    Args:
      text: Axes and sizes, separated by commas.
      devices: As for `make`.

    Raises:
      InputError: The text cannot be read, or `make` refuses the sizes.
    """
    devices = list(jax.devices() if devices is None else devices)
    return make(devices=devices, **read_flags(text, len(devices)))


def read_flags(text: str, num_devices: int) -> dict[str, int]:
    """The axis sizes in a flag such as `'fsdp=4,expert=2'`; empty: all devices on fsdp.

    Raises:
      InputError: The text cannot be read.
    """
    if not text.strip():
        return {"fsdp": num_devices}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if not size.strip().isdigit():
            raise InputError(
                f"mesh flag {text!r}: {part!r} is not axis=size; write fsdp=4,expert=2"
            )
        if name in sizes:
            raise InputError(f"mesh flag {text!r} names axis {name!r} twice; give it one size")
        sizes[name] = int(size)
    return sizes


def batch_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Into how many parts the rows of a batch are split; without a mesh 1."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in BATCH_AXES)
