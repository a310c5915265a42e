"""Equal layers as a pipeline: each stage of the mesh holds some, and rows pass through all.

GPipe (Huang et al., 2019, arXiv:1811.06965): a forward pass cuts its rows into micro-batches, and
while a stage works on one of them the stage before it works on the next. Stages wait for the first
micro-batch to come and for the last to pass: of the time of a pass, `bubble` of it is lost. It is
less with more micro-batches, and with circular repeats (Narayanan et al., 2021, arXiv:2104.04473,
section 2.2; there backward passes mingle with forward ones, here they follow): a stage then holds
several pieces of layers that are not neighbours, and each micro-batch goes round that often.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rljax import mesh as meshes
from rljax.models.config import ModelConfig
from rljax.models.parameters import Parameter, Params


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How equal layers run as a pipeline.

    Attributes:
      stages: Number of stages that share them.
      repeats: How many pieces of layers a stage holds.
      depth: Layers of a piece.
      micro_batches: Into how many micro-batches rows are cut.
    """

    stages: int
    repeats: int
    depth: int
    micro_batches: int

    @property
    def layers(self) -> int:
        """Layers in the pipeline; others run on all devices, as they would without stages."""
        return self.repeats * self.stages * self.depth

    @property
    def turns(self) -> int:
        """How often each stage runs a piece, or waits as long."""
        return self.repeats * self.micro_batches + self.stages - 1

    @property
    def recomputed(self) -> bool:
        """Whether a piece is recomputed as a whole in the backward pass.

        Where a stage holds several, each turn would keep a copy of its piece's weights otherwise.
        """
        return self.repeats > 1

    @property
    def bubble(self) -> float:
        """The share of its turns that a stage waits."""
        return (self.stages - 1) / self.turns


def schedule(layers: int, stages: int, rows: int, repeats: int, micro_rows: int) -> Schedule:
    """The schedule of so many equal layers.

    Args:
      layers: Those that there are. What does not divide over stages and repeats is left out, so
        no stage ever runs an empty layer.
      stages: Stages of the mesh.
      rows: Rows of a forward pass on each device.
      repeats: Pieces that a stage is to hold, as far as there are layers.
      micro_rows: Rows of a micro-batch on each device, as far as they divide.
    """
    repeats = max(1, min(repeats, layers // stages))
    micro_batches = stages * (rows // math.gcd(rows, micro_rows))
    return Schedule(stages, repeats, layers // (stages * repeats), micro_batches)


def schedule_here(layers: int, shape: Sequence[int], config: ModelConfig) -> Schedule | None:
    """The schedule of equal layers under `jax.set_mesh`, for hidden states of a shape.

    None where they do not run as a pipeline: there are no stages, or more than layers, or they
    cannot have the same number of rows.
    """
    spec = meshes.fit(shape, meshes.BATCH_AXES)
    axes = meshes.axes_of(spec)
    if "stage" not in axes:
        return None
    sizes = jax.sharding.get_abstract_mesh().shape
    if layers < sizes["stage"]:
        return None
    rows = shape[0] // math.prod(sizes[axis] for axis in axes)
    return schedule(layers, sizes["stage"], rows, config.pipeline_repeats, config.pipeline_rows)


@struct.dataclass
class Layers:
    """Equal layers, or patterns of them, and what they are told.

    Attributes:
      weights: For each block of the pattern its weights, each leaf [repeats, ...].
      replay: int32 [repeats, mixtures, B, T, k], experts to use, -1 where unset, or None.
      loads: float32 [repeats, mixtures, E], tokens given to each expert, or None.
    """

    weights: list[Params]
    replay: Array | None
    loads: Array | None

    @property
    def count(self) -> int:
        """How often the pattern is repeated."""
        return jax.tree.leaves(self.weights)[0].shape[0]


Outputs = dict[str, Array] | None
"""What mixtures report, each leaf [repeats, mixtures, ...]; None from dense layers."""
PER_TOKEN = ("experts", "auxiliary")
"""Outputs [repeats, mixtures, B, T, ...]; others are sums over rows."""


def divide(plan: Schedule, layers: Layers, declared: list[Params]) -> tuple[Layers, Layers]:
    """The layers in the pipeline, and the others.

    Args:
      plan: The schedule.
      layers: All of them.
      declared: What their weights are.
    """

    def movable(w: Array, p: Parameter) -> Array:
        """Split over `stage` along embed: stages then trade parts, where else XLA gathers all."""
        if "embed" not in p.axes:
            return w
        place = p.axes.index("embed")
        spec: list[Any] = [P.UNCONSTRAINED] * w.ndim
        spec[place] = meshes.fit(w.shape[place : place + 1], ("fsdp", "stage"))[0]
        return jax.lax.with_sharding_constraint(w, P(*spec))

    def take(start: int, stop: int) -> Layers:
        # A slice whose stride is named: gradients added in place (`jax.new_ref`) need it.
        return jax.tree.map(lambda a: jax.lax.slice_in_dim(a, start, stop, stride=1), layers)

    piped, others = take(0, plan.layers), take(plan.layers, layers.count)
    if plan.repeats == 1 and plan.layers == layers.count:
        return piped, others

    def spread(part: Layers) -> Layers:
        weights = jax.tree.map(movable, part.weights, declared)
        return dataclasses.replace(part, weights=weights)

    return spread(piped), spread(others)


def run(
    plan: Schedule,
    run_layers: Callable[[Layers, Array, Any], tuple[Array, Outputs]],
    layers: Layers,
    x: Float[Array, "B T D"],
    rows: Any,
) -> tuple[Float[Array, "B T D"], Outputs]:
    """Runs `plan.layers` layers as a pipeline, under `jax.set_mesh`.

    Args:
      plan: The schedule.
      run_layers: Runs some layers one after the other, for some rows; as this function does.
      layers: The layers.
      x: Hidden states, split over `BATCH_AXES`.
      rows: What layers are told of each row, without gradients: a tree of arrays [B, ...].

    Returns:
      Hidden states, and the outputs of all layers.
    """
    pieces = (plan.repeats, plan.stages, plan.depth)
    if layers.replay is not None:
        layers = dataclasses.replace(layers, replay=_cut(plan, layers.replay, 2))
    layers = jax.tree.map(lambda a: a.reshape(*pieces, *a.shape[1:]), layers)
    given = jax.tree.map(functools.partial(_cut, plan), (x, rows))
    whole = jax.tree.map(_to_all_stages, given)
    # Without checks of what varies over stages: with them JAX lays what the nested `shard_map`s
    # keep for the backward pass over stages once more. Every stage has its own of everything that
    # has a gradient, so nothing is left for them to find.
    pipeline = jax.shard_map(
        functools.partial(_run_stage, plan, run_layers),
        in_specs=(P(None, "stage"), P("stage")),
        out_specs=(P("stage"), P(None, "stage")),
        axis_names={"stage"},
        check_vma=False,
    )
    kept, outputs = pipeline(layers, whole)
    x = meshes.constrain_rows(_join(plan, _from_first_stage(kept)))
    if outputs is None:
        return x, None

    def joined(name: str, a: Array) -> Array:
        a = _merge(a)
        if name not in PER_TOKEN:
            return a
        return meshes.constrain(_join(plan, a, 2), None, None, meshes.BATCH_AXES, "context")

    return x, {name: joined(name, a) for name, a in outputs.items()}


def _run_stage(
    plan: Schedule, run_layers: Callable[..., Any], layers: Layers, given: Any
) -> tuple[Array, Outputs]:
    """What one stage does, with its layers [repeats, 1, depth, ...] and all rows.

    The first stage keeps all rows between their rounds: it sends each micro-batch on its way and
    takes it in when the last stage has done with it. All stages run the same program, so the
    others compute and discard the same, and what they run before the first micro-batch has come
    is not used.
    """
    stages, count, repeats = plan.stages, plan.micro_batches, plan.repeats
    stage = jax.lax.axis_index("stage")
    last = repeats * count - 1
    kept, rows = jax.tree.map(lambda a: a[0], given)
    layers = jax.tree.map(lambda a: a[0, 0] if repeats == 1 else a[:, 0], layers)

    def run_piece(x: Array, layers: Layers, rows: Any, number: Array) -> tuple[Array, Outputs]:
        """The number-th of the stage's runs: a piece of its layers, on a micro-batch."""
        piece, micro_batch = number // count, number % count
        if repeats > 1:
            layers = jax.tree.map(lambda a: a[piece], layers)
        if layers.replay is not None:
            layers = dataclasses.replace(layers, replay=layers.replay[:, :, micro_batch])
        return run_layers(layers, x, jax.tree.map(lambda a: a[micro_batch], rows))

    if plan.recomputed:
        run_piece = jax.checkpoint(run_piece)

    def take_in(kept: Array, x: Array, number: Array) -> Array:
        """What the first stage keeps, with the micro-batch that has come round."""
        place = number % count
        return kept.at[place].set(jnp.where(number >= 0, x, kept[place]))

    def turn(carry: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], Outputs]:
        kept, x = carry
        kept = take_in(kept, x, t - stages)
        x = jnp.where(stage == 0, kept[t % count], x)
        x, outputs = run_piece(x, layers, rows, jnp.clip(t - stage, 0, last))
        to_next = [(s, (s + 1) % stages) for s in range(stages)]
        return (kept, jax.lax.ppermute(x, "stage", to_next)), outputs

    start = (kept, jnp.zeros_like(kept[0]))
    (kept, x), outputs = jax.lax.scan(turn, start, jnp.arange(plan.turns))
    kept = take_in(kept, x, jnp.int32(last))

    def collect(name: str, a: Array) -> Array:
        """Outputs of the turns that were the stage's own, as [repeats, depth, mixtures, ...]."""
        own = jax.lax.dynamic_slice_in_dim(a, stage, last + 1)
        own = own.reshape(repeats, count, *a.shape[1:])
        return jnp.moveaxis(own, 1, 3) if name in PER_TOKEN else own.sum(1)

    if outputs is not None:
        outputs = {name: collect(name, a) for name, a in outputs.items()}
    return kept[None], outputs


def _cut(plan: Schedule, a: Array, axis: int = 0) -> Array:
    """Rows along a dimension to [micro-batches, rows]; in turns, so that none changes device."""
    turns = (plan.stages, -1, plan.micro_batches // plan.stages)
    a = a.reshape(*a.shape[:axis], *turns, *a.shape[axis + 1 :])
    return _merge(a.swapaxes(axis + 1, axis + 2), axis)


def _join(plan: Schedule, a: Array, axis: int = 0) -> Array:
    """The inverse of `_cut`."""
    turns = (plan.stages, plan.micro_batches // plan.stages)
    a = a.reshape(*a.shape[:axis], *turns, *a.shape[axis + 1 :])
    return _merge(_merge(a.swapaxes(axis + 1, axis + 2), axis), axis)


def _merge(a: Array, axis: int = 0) -> Array:
    """Dimension `axis` and the next as one."""
    return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])


def _to_all_stages(a: Array) -> Array:
    """Micro-batches [M, B, ...] of all stages, for each stage: [stages, M, B, ...]."""
    spec = meshes.fit(a.shape, "stage", _ROWS, "context")
    return meshes.map_shards(
        lambda a: meshes.gather(a, "stage")[None], (spec,), P("stage", None, *spec[1:])
    )(a)


def _from_first_stage(a: Array) -> Array:
    """[stages, M, B, ...] to each stage's own of the first stage's [M, B, ...]."""
    spec = meshes.fit(a.shape[1:], "stage", _ROWS, "context")
    each = a.shape[1] // a.shape[0]
    return meshes.map_shards(
        lambda a: jax.lax.all_to_all(a[0], "stage", 0, 0, tiled=True)[:each],
        (P("stage", None, *spec[1:]),),
        spec,
    )(a)


_ROWS = tuple(axis for axis in meshes.BATCH_AXES if axis != "stage")
