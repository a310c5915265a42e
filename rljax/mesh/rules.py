"""Sharding rules: which mesh axes split which logical axis of a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rljax.errors import InputError
from rljax.mesh.meshes import AXES

Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis of a weight -> the mesh axis that splits it, or several of them, which then split it
in the order of `AXES` (None: not split)."""

TRAIN_RULES: Rules = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "layers": "stage",
}
"""Weights, gradients and optimizer state while training. Where the number of layers does not divide
over `stage`, that axis splits `embed` instead, beside `fsdp`."""

ROLLOUT_RULES: Rules = {**TRAIN_RULES, "embed": None, "layers": None}
"""Weights while sampling: replicated over stage, data and fsdp, so that decoding gathers no weights
and no stage waits for another.

Where the experts are too large for that, `experts` may name more axes, such as
`("fsdp", "expert")`: each device then holds fewer experts, and tokens travel to more devices."""


def read_rules(text: str, rules: Rules) -> Rules:
    """A rule table with the changes of a flag such as `'experts=fsdp+expert,vocab='`.

    Args:
      text: Logical axes and their mesh axes, separated by commas; no mesh axis: not split.
      rules: The table to change; it is not modified.

    Raises:
      InputError: The text cannot be read, or a name in it is unknown.
    """
    changed = dict(rules)
    for part in filter(None, text.replace(" ", "").split(",")):
        logical, equals, targets = part.partition("=")
        if not equals or logical not in rules:
            raise InputError(
                f"rules flag {text!r}: {part!r} is not logical axis=mesh axes; write "
                f"experts=fsdp+expert; the logical axes are {', '.join(rules)}"
            )
        axes = tuple(filter(None, targets.split("+")))
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise InputError(
                f"rules flag {text!r}: mesh axis {unknown[0]!r} is unknown; the axes are "
                f"{', '.join(AXES)}"
            )
        changed[logical] = axes or None
    return changed


def sharding(
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int],
    axes: Sequence[str | None],
    rules: Rules,
    name: str = "array",
) -> NamedSharding:
    """The sharding of one weight: its logical axes mapped through a rule table.

    Where `layers` does not divide over its mesh axis, that axis splits `embed` instead, beside the
    axis of `embed` itself. Weights without `embed`, which are small, are then replicated over it.

    Args:
      mesh: A mesh with the axes of `AXES`; of devices or abstract.
      shape: The weight's shape.
      axes: One logical axis for each dimension (None: never split).
      rules: Logical axis -> mesh axes.
      name: The weight's name, for the error message.

    Raises:
      InputError: A logical axis has no rule, a mesh axis is unknown or would be used twice, or a
        size does not divide.
    """
    sizes = dict(mesh.shape)
    spec: list[tuple[str, ...]] = []
    instead_of_layers: tuple[str, ...] = ()
    for size, logical in zip(shape, axes, strict=True):
        split = _mesh_axes(sizes, logical, rules, name)
        if logical == "layers" and size % math.prod(sizes[axis] for axis in split):
            instead_of_layers, split = split, ()
        elif logical == "embed":
            split += instead_of_layers
        for axis in split:
            if any(axis in other for other in spec):
                raise InputError(
                    f"{name}: mesh axis {axis!r} would split two dimensions of {tuple(shape)} "
                    f"(axes {tuple(axes)}); map one of them to another mesh axis or to None"
                )
        _check_divides(size, math.prod(sizes[axis] for axis in split), logical, split, name)
        spec.append(split)
    return NamedSharding(mesh, P(*(s[0] if len(s) == 1 else s or None for s in spec)))


def _mesh_axes(
    sizes: Mapping[str, int], logical: str | None, rules: Rules, name: str
) -> tuple[str, ...]:
    """The mesh axes of more than one device that a logical axis is mapped to."""
    if logical is None:
        return ()
    if logical not in rules:
        raise InputError(f"{name}: logical axis {logical!r} has no rule; add it to the table")
    target = rules[logical]
    targets = (target,) if isinstance(target, str) else target or ()
    for axis in targets:
        if axis not in sizes:
            raise InputError(
                f"{name}: logical axis {logical!r} is mapped to mesh axis {axis!r} which is "
                f"unknown; the axes are {', '.join(sizes)}"
            )
    return tuple(axis for axis in AXES if axis in targets and sizes[axis] > 1)


def _check_divides(
    size: int, shards: int, logical: str | None, split: Sequence[str], name: str
) -> None:
    if size % shards == 0:
        return
    over = "×".join(split)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = [n for n in divisors if n < shards][-1:] + [n for n in divisors if n > shards][:1]
    raise InputError(
        f"{name}: axis {logical!r} of size {size} does not divide over mesh axis "
        f"{over}={shards}; the nearest that divide it: "
        + " and ".join(f"{over}={n}" for n in nearest)
    )
