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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rljax import mesh as meshes
from rljax.models.config import ModelConfig
from rljax.models.parameters import Parameter, Params


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How equal layers run as a pipeline.

    Attributes:
      stages: Over how many stages they are spread.
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

    if plan.repeats > 1 or plan.layers < layers.count:
        layers = dataclasses.replace(
            layers, weights=jax.tree.map(movable, layers.weights, declared)
        )
    return (
        jax.tree.map(lambda a: a[: plan.layers], layers),
        jax.tree.map(lambda a: a[plan.layers :], layers),
    )


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
    stage = P(None, "stage")
    # Without checks of what varies over stages: with them JAX lays what the nested `shard_map`s
    # keep for the backward pass over stages once more. Every stage has its own of everything that
    # has a gradient, so nothing is left for them to find.
    pipeline = jax.shard_map(
        functools.partial(_run_stage, plan, run_layers),
        in_specs=(stage, P("stage"), P()),
        out_specs=(P("stage"), stage),
        axis_names={"stage"},
        check_vma=False,
    )
    pieces = (plan.repeats, plan.stages, plan.depth)
    staged = jax.tree.map(lambda a: a.reshape(*pieces, *a.shape[1:]), layers)
    out, stats = pipeline(staged, x, rows)
    return out, jax.tree.map(_merge, stats)


def _run_stage(
    plan: Schedule, run_layers: Callable[..., Any], layers: Layers, x: Array, rows: Any
) -> tuple[Array, Outputs]:
    """`run` of one stage, which has a part of the rows, and of the layers [repeats, 1, depth, ...].

    The first stage keeps all rows between their rounds: it sends each micro-batch on its way and
    takes it in when the last stage has done with it. All stages run the same program, so the
    others do as if, and what they run before the first micro-batch has come is read by nobody.
    """
    stages, count = plan.stages, plan.micro_batches
    stage = jax.lax.axis_index("stage")
    last = plan.repeats * count - 1

    def micro_batches(a: Array, axis: int = 0) -> Array:
        """[stages, rows, ...] to [micro-batches, rows, ...]; rows in turns: none changes device."""
        turns = a.reshape(*a.shape[: axis + 1], -1, count // stages, *a.shape[axis + 2 :])
        return _merge(turns.swapaxes(axis + 1, axis + 2), axis)

    def joined(a: Array, axis: int = 0) -> Array:
        """The inverse."""
        turns = a.reshape(*a.shape[:axis], stages, -1, *a.shape[axis + 1 :])
        return _merge(turns.swapaxes(axis + 1, axis + 2), axis + 1)

    def by_stage(a: Array, axis: int = 0) -> Array:
        return a.reshape(*a.shape[:axis], stages, -1, *a.shape[axis + 1 :])

    rows = jax.tree.map(lambda a: micro_batches(by_stage(a)), rows)
    kept = micro_batches(meshes.gather(x[None], "stage"))
    kept = meshes.constrain(kept, None, meshes.BATCH_AXES, "context")
    layers = jax.tree.map(lambda a: a[:, 0], layers)
    if layers.replay is not None:
        layers = dataclasses.replace(layers, replay=micro_batches(by_stage(layers.replay, 3), 3))
    if plan.repeats == 1:
        layers = jax.tree.map(lambda a: a[0], layers)

    def run_piece(x: Array, layers: Layers, rows: Any, number: Array) -> tuple[Array, Outputs]:
        """The number-th of the stage's runs: a piece of its layers, on a micro-batch."""
        piece, micro_batch = number // count, number % count
        if plan.repeats > 1:
            layers = jax.tree.map(lambda a: checkpoint_name(a[piece], "piece"), layers)
        if layers.replay is not None:
            layers = dataclasses.replace(layers, replay=layers.replay[:, :, micro_batch])
        return run_layers(layers, x, jax.tree.map(lambda a: a[micro_batch], rows))

    if plan.repeats > 1:
        # A piece of the weights is cut out again for the backward pass, not kept for each turn.
        policy = jax.checkpoint_policies.save_anything_except_these_names("piece")
        run_piece = jax.checkpoint(run_piece, policy=policy)

    def turn(carry: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], Outputs]:
        kept, x = carry
        kept = _take_in(kept, x, t - stages)
        x = jnp.where(stage == 0, kept[t % count], x)
        x, stats = run_piece(x, layers, rows, jnp.clip(t - stage, 0, last))
        to_next = [(s, (s + 1) % stages) for s in range(stages)]
        return (kept, jax.lax.ppermute(x, "stage", to_next)), stats

    (kept, x), stats = jax.lax.scan(turn, (kept, jnp.zeros_like(kept[0])), jnp.arange(plan.turns))
    kept = _take_in(kept, x, jnp.int32(last))
    # Each stage gets its own rows from the first.
    out = joined(jax.lax.all_to_all(kept, "stage", 0, 0, tiled=True))[0]

    def collect(name: str, a: Array) -> Array:
        """Outputs of the turns that were the stage's own, as [repeats, depth, mixtures, ...]."""
        own = jax.lax.dynamic_slice_in_dim(a, stage, last + 1)
        own = own.reshape(plan.repeats, count, *a.shape[1:])
        if name not in PER_TOKEN:
            return own.sum(1)
        return _merge(joined(jnp.moveaxis(own, 1, 3), 3), 3)

    return out, None if stats is None else {name: collect(name, a) for name, a in stats.items()}


def _take_in(kept: Array, x: Array, number: Array) -> Array:
    """What the first stage keeps, with the micro-batch that has come round."""
    place = number % kept.shape[0]
    return kept.at[place].set(jnp.where(number >= 0, x, kept[place]))


def _merge(a: Array, axis: int = 0) -> Array:
    """Dimension `axis` and the next as one."""
    return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])
