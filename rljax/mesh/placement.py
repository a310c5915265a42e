"""Putting arrays on a mesh: batches split by rows, replicated arrays, arrays in host memory."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rljax import processes
from rljax.errors import InputError
from rljax.mesh.meshes import BATCH_AXES, batch_shards


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `BATCH_AXES`; the other dimensions are not split."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the memory of the devices' hosts.

    Raises:
      InputError: The devices have no pinned host memory.
    """
    device = next(iter(sharding.mesh.devices.flat))
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise InputError(
            f"host_memory: {device.platform} devices have no pinned_host memory; leave it out"
        )
    return sharding.with_memory_kind("pinned_host")


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays with a leading row dimension onto the mesh, split over `BATCH_AXES`.

    Args:
      tree: Arrays [rows, ...], whole on every process.
      mesh: The mesh.

    Raises:
      InputError: The number of rows does not divide.
    """
    shards = batch_shards(mesh)

    def put(x: Any) -> jax.Array:
        if np.shape(x)[0] % shards:
            raise InputError(
                f"{np.shape(x)[0]} rows do not divide over stage×data×fsdp×expert = {shards} "
                "devices; change the batch size or the mesh"
            )
        return processes.put(x, batch_sharding(mesh))

    return jax.tree.map(put, tree)
