"""Where every parameter lies on a mesh, and what training keeps of it."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.models import ModelConfig

KINDS = ("master weights", "optimizer moments", "gradients", "compute weights")
"""What training keeps of every parameter."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """One parameter on a mesh.

    Attributes:
      name: Its place in the tree, such as `stacks/0/0/attention/q`.
      shape: Its global shape.
      axes: Its logical axes.
      spec: The mesh axis, or axes, that split each dimension; None: none does.
      shard: The shape that a device holds.
      width: Bytes of one of its numbers in the dtype it is computed with.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    shard: tuple[int, ...]
    width: int

    @property
    def over(self) -> tuple[str, ...]:
        """All mesh axes that split it."""
        return meshes.axes_of(self.spec)

    @property
    def stack(self) -> int | None:
        """The number of the stack whose layers it belongs to; None: it belongs to none."""
        parts = self.name.split("/")
        return int(parts[1]) if parts[0] == "stacks" else None

    @property
    def held(self) -> int:
        """Numbers that a device holds."""
        return math.prod(self.shard)

    def bytes(self, parts: int = 1) -> dict[str, int]:
        """Bytes per device of each of `KINDS`, at so many micro-batches."""
        each = bytes_per_parameter(self.width, parts)
        return {kind: n * self.held for kind, n in each.items()}


def bytes_per_parameter(width: int = 2, parts: int = 1) -> dict[str, int]:
    """Bytes of each kind that training keeps of one number.

    With bfloat16 compute: 4 (float32 master) + 8 (AdamW's two float32 moments) + 2 (gradient) + 2
    (weight to compute with) = 16; with micro-batches gradients add up in float32: 18. With float32
    compute the master itself is computed with: 16.

    Args:
      width: Bytes of the dtype it is computed with.
      parts: Micro-batches of an optimizer step.
    """
    gradient = 4 if parts > 1 else width
    compute = 0 if width == 4 else width
    return dict(zip(KINDS, (4, 8, gradient, compute), strict=True))


def compute_width(config: ModelConfig) -> int:
    """Bytes of a number in the compute dtype."""
    return jax.numpy.dtype(config.dtype).itemsize


def place(
    mesh: Mesh | AbstractMesh, config: ModelConfig, rules: meshes.Rules = meshes.TRAIN_RULES
) -> list[Placed]:
    """Every parameter of a model on a mesh; nothing is allocated.

    Args:
      mesh: A mesh with the axes of `rljax.mesh.AXES`; it may be abstract.
      config: The model.
      rules: Logical axis -> mesh axis.

    Raises:
      ValueError: A parameter does not divide over the mesh; named, with the sizes that work.
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
        Placed(
            name=name,
            shape=p.shape,
            axes=p.axes,
            spec=tuple(sharding.spec),
            shard=sharding.shard_shape(p.shape),
            width=4 if p.precise else compute_width(config),
        )
        for name, p, sharding in zip(names, declared, shardings, strict=True)
    ]
