"""The device mesh, its logical axes and the rules that lay arrays over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rljax import processes
from rljax.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rljax.models import ModelConfig
    from rljax.planning import Layout, Work

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, in the order of the device grid; each has size 1 unless asked for. Neighbours in the
grid differ in the last: stages send each other least, and are farthest apart."""

BATCH_AXES = ("stage", "data", "fsdp", "expert")
"""The mesh axes over which rows of a batch and slots of the sampler are split. Experts and stages
are among them, so that no device is idle outside the experts or outside the layers; inside experts
tokens are exchanged, and through the stages of the layers rows pass in turns."""

Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis of a weight -> the mesh axis that splits it, or several of them, which then do so in
the order of `AXES` (None: not split)."""

Names = str | Sequence[str] | None
"""The mesh axes that are to split one dimension of an activation."""

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
"""Weights, gradients and optimizer state while training. Where layers do not divide over their mesh
axis, it splits `embed` beside that one's own, and nothing of the layers is lost or added."""

ROLLOUT_RULES: Rules = {**TRAIN_RULES, "embed": None, "layers": None}
"""Weights while sampling: whole on every stage, data and fsdp shard, so that decoding gathers
nothing and no stage waits for another.

Where experts are too large for that, `experts` may name more axes, such as `("fsdp", "expert")`:
each device then holds fewer of them, and tokens travel further."""


# On several virtual CPU devices set JAX_CPU_ENABLE_ASYNC_DISPATCH=false before jax starts: two
# programs with collectives in flight at once can wait for each other for ever.


def make(*, devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Makes a mesh with all axes of `AXES` (axis type Auto).

    Args:
      devices: The devices to use; all of `jax.devices()` by default.
      **sizes: The size of each axis that is not 1, such as `data=2, fsdp=4`.

    Raises:
      ValueError: An axis is unknown, a size is below 1, or the product of the sizes is not the
        number of devices.
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
        mend = f"choose sizes whose product is {num_devices}"
        if fits:
            mend = f"{' or '.join(fits)} would fit"
        raise InputError(f"mesh {asked} needs {total} devices, got {num_devices}; {mend}")
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
            raise InputError(
                f"mesh flag {text!r}: {part!r} is not axis=size; write fsdp=4,expert=2"
            )
        if name in sizes:
            raise InputError(f"mesh flag {text!r} names axis {name!r} twice; give it one size")
        sizes[name] = int(size)
    return sizes


def read_rules(text: str, rules: Rules) -> Rules:
    """A rule table with the changes of a flag such as `'experts=fsdp+expert,vocab='`.

    Raises:
      ValueError: The text cannot be read, or a name in it is unknown.
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

    Layers that do not divide over their mesh axis leave it to `embed`, to split beside its own;
    weights without an embed dimension, which are small, are whole there.

    Args:
      mesh: A mesh with the axes of `AXES`; of devices or abstract.
      shape: The weight's shape.
      axes: One logical axis for each dimension (None: never split).
      rules: Logical axis -> mesh axes.
      name: What to call the weight in a refusal.

    Raises:
      ValueError: A logical axis has no rule, a mesh axis is unknown or would be used twice, or a
        size does not divide.
    """
    ways = dict(mesh.shape)
    spec: list[tuple[str, ...]] = []
    left_over: tuple[str, ...] = ()
    for size, logical in zip(shape, axes, strict=True):
        if logical is not None and logical not in rules:
            raise InputError(f"{name}: logical axis {logical!r} has no rule; add it to the table")
        target = rules[logical] if logical is not None else None
        targets = (target,) if isinstance(target, str) else target or ()
        for axis in targets:
            if axis not in ways:
                raise InputError(
                    f"{name}: logical axis {logical!r} is mapped to mesh axis {axis!r} which is "
                    f"unknown; the axes are {', '.join(mesh.axis_names)}"
                )
        split = tuple(axis for axis in AXES if axis in targets and ways[axis] > 1)
        if logical == "layers" and size % math.prod(ways[axis] for axis in split):
            left_over, split = split, ()
        elif logical == "embed":
            split += left_over
        for axis in split:
            if any(axis in other for other in spec):
                raise InputError(
                    f"{name}: mesh axis {axis!r} would split two dimensions of {tuple(shape)} "
                    f"(axes {tuple(axes)}); map one of them to another mesh axis or to None"
                )
        total = math.prod(ways[axis] for axis in split)
        if size % total:
            over = "×".join(split)
            fits = [n for n in range(1, size + 1) if size % n == 0]
            below, above = [n for n in fits if n < total][-1:], [n for n in fits if n > total][:1]
            near = " and ".join(f"{over}={n}" for n in below + above)
            raise InputError(
                f"{name}: axis {logical!r} of size {size} does not divide over mesh axis "
                f"{over}={total}; the nearest that divide it: {near}"
            )
        spec.append(split)
    return NamedSharding(mesh, P(*(s[0] if len(s) == 1 else s or None for s in spec)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `BATCH_AXES`, everything else whole."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, P())


def on_host(layout: NamedSharding) -> NamedSharding:
    """The same layout in the memory of the devices' hosts.

    Raises:
      ValueError: The devices cannot reach any.
    """
    device = next(iter(layout.mesh.devices.flat))
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise InputError(
            f"host_memory: {device.platform} devices have no pinned_host memory; leave it out"
        )
    return layout.with_memory_kind("pinned_host")


def batch_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Into how many parts the rows of a batch are cut."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in BATCH_AXES)


def split(axis: str) -> bool:
    """Whether XLA splits arrays over a mesh axis here: under `jax.set_mesh`, not in `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types.get(axis) == AxisType.Auto and mesh.shape[axis] > 1


def fit(shape: Sequence[int], *names: Names) -> P:
    """The spec that splits each dimension over its mesh axes, as far as they split and divide it.

    Args:
      shape: The array's shape.
      *names: For each dimension the mesh axes, in order; those from the first on that does not
        divide what is left are dropped. Dimensions past the last stay whole.
    """
    spec: list[Any] = []
    for size, wanted in zip(shape, names, strict=False):
        kept: list[str] = []
        for axis in [wanted] if isinstance(wanted, str) else wanted or ():
            if not split(axis):
                continue
            ways = jax.sharding.get_abstract_mesh().shape[axis]
            if size % ways:
                break
            kept.append(axis)
            size //= ways
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


def map_shards(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function on each device's own part, where XLA splits anything; else the function.

    Args:
      function: Runs on parts; `varies` tells which of them differ.
      in_specs: As for `jax.shard_map`, made by `fit`.
      out_specs: Likewise.
    """
    axes = {axis for axis in AXES if split(axis)}
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def vary_over(tree: Any) -> tuple[str, ...]:
    """Along which mesh axes any array of a tree may differ inside `shard_map`."""
    return tuple(a for a in AXES if any(varies(x, a) for x in jax.tree.leaves(tree)))


def varies(x: Any, axis: str) -> bool:
    """Whether an array inside `shard_map` may differ along a mesh axis."""
    return axis in jax.typeof(x).manual_axis_type.varying


def true_anywhere(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Whether a bool is true on any device along mesh axes, inside `shard_map` or not.

    Devices that exchange tokens must agree on when a loop ends.
    """
    axes = tuple(axis for axis in axes if varies(x, axis))
    return jax.lax.psum(x.astype(jnp.int32), axes) > 0 if axes else x


def vary_alike(tree: Any) -> Any:
    """Lets every array vary over all axes that any of them varies over, inside `shard_map`.

    Backwards the gradients of the copies add up in float32.
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
    # Integers have no gradient to add up.
    if g.dtype == jax.dtypes.float0:
        return (g,)
    return (jax.lax.psum(g.astype(jnp.float32), axes).astype(g.dtype),)


_vary.defvjp(_vary_forward, _vary_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axes: str | tuple[str, ...], dimension: int = 0) -> jax.Array:
    """The parts of all devices along mesh axes, one behind the other, inside `shard_map`.

    Backwards the gradients of the copies add up in float32.
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


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays with a leading row dimension onto the mesh, split over `BATCH_AXES`.

    Raises:
      ValueError: The number of rows does not divide.
    """
    parts = batch_shards(mesh)

    def put(x: Any) -> jax.Array:
        if np.shape(x)[0] % parts:
            raise InputError(
                f"{np.shape(x)[0]} rows do not divide over stage×data×fsdp×expert = {parts} "
                "devices; change the batch size or the mesh"
            )
        return processes.put(x, batch_sharding(mesh))

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
