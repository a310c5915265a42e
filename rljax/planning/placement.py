"""Every parameter of a model on a mesh: its shard, and the bytes that training keeps for it."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.models import ModelConfig

KINDS = ("master weights", "optimizer moments", "gradients", "compute weights")
"""The kinds of bytes that training keeps for every parameter."""


@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """One parameter on a mesh.

    Attributes:
      name: Its path in the tree, such as `stacks/0/0/attention/q`.
      shape: Its global shape.
      axes: Its logical axes.
      spec: The mesh axis, or axes, that split each dimension; None: none does.
      shard: The shape that a device holds.
      itemsize: Bytes of one number of it in the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    shard: tuple[int, ...]
    itemsize: int

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """All mesh axes that split it."""
        return meshes.axes_of(self.spec)

    @property
    def stack(self) -> int | None:
        """The index of the stack of layers that it belongs to; None: it belongs to none."""
        parts = self.name.split("/")
        return int(parts[1]) if parts[0] == "stacks" else None

    @property
    def shard_size(self) -> int:
        """How many numbers of it a device holds."""
        return math.prod(self.shard)

    def bytes(self, parts: int = 1) -> dict[str, int]:
        """Bytes per device of each of `KINDS`, with `parts` micro-batches in a step."""
        each = bytes_per_parameter(self.itemsize, parts)
        return {kind: n * self.shard_size for kind, n in each.items()}


def bytes_per_parameter(itemsize: int = 2, parts: int = 1) -> dict[str, int]:
    """Bytes of each kind that training keeps for one number.

    With bfloat16 compute: 4 (float32 master) + 8 (AdamW's two float32 moments) + 2 (gradient) + 2
    (compute weight) = 16; with micro-batches gradients add up in float32: 18. With float32 compute
    the master weight is the compute weight: 16.

    Args:
      itemsize: Bytes of the compute dtype.
      parts: Micro-batches of an optimizer step.
    """
    gradient = 4 if parts > 1 else itemsize
    compute = 0 if itemsize == 4 else itemsize
    return dict(zip(KINDS, (4, 8, gradient, compute), strict=True))


def compute_itemsize(config: ModelConfig) -> int:
    """Bytes of a number in the compute dtype."""
    return jax.numpy.dtype(config.dtype).itemsize


def hidden_bytes(config: ModelConfig, tokens: float) -> int:
    """Bytes of the hidden states of a number of tokens."""
    return int(tokens * config.hidden_size * compute_itemsize(config))


def gradient_itemsize(p: ShardedParameter) -> int:
    """Bytes of one number of a gradient while devices add it up."""
    return 4 if {"experts", "vocab"} & set(p.axes) else p.itemsize


def shard_parameters(
    mesh: Mesh | AbstractMesh, config: ModelConfig, rules: meshes.Rules = meshes.TRAIN_RULES
) -> list[ShardedParameter]:
    """Every parameter of a model on a mesh; nothing is allocated.

    Args:
      mesh: A mesh with the axes of `rljax.mesh.AXES`; it may be abstract.
      config: The model.
      rules: Logical axis -> mesh axes.

    Raises:
      InputError: A parameter does not divide over the mesh; with its name and the sizes that do.
    """
    names, declared, shardings = (
        jax.tree.leaves(tree)
        for tree in (
            models.names(config),
            models.declare(config),
            models.shardings(config, mesh, rules),
        )
    )
    return [
        ShardedParameter(
            name=name,
            shape=p.shape,
            axes=p.axes,
            spec=tuple(sharding.spec),
            shard=sharding.shard_shape(p.shape),
            itemsize=4 if p.precise else compute_itemsize(config),
        )
        for name, p, sharding in zip(names, declared, shardings, strict=True)
    ]
