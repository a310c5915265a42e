"""Bytes that devices send in an optimizer step and while sampling, by collective and mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import Attention, LatentAttention, ModelConfig
from rljax.models.experts import cheaper_dispatch
from rljax.models.pipeline import Schedule
from rljax.planning.placement import ShardedParameter, compute_itemsize
from rljax.planning.work import Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """Communication of one kind over one mesh axis.

    Attributes:
      kind: Such as `all-gather`.
      axis: The mesh axis whose devices communicate.
      bytes: Bytes that each device sends, with a ring algorithm.
      why: Its purpose, in a line.
    """

    kind: str
    axis: str
    bytes: int
    why: str


def ring_bytes(kind: str, whole: float, devices: int) -> float:
    """Bytes that each device sends in a collective with a ring algorithm.

    Args:
      kind: The collective.
      whole: Bytes of the whole buffer: after gathering, or before scattering.
      devices: How many devices take part.
    """
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * whole * (devices - 1) / devices


def update_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, placed: Sequence[ShardedParameter]
) -> Iterator[Collective]:
    """The communication of an optimizer step, where XLA partitions its program well.

    Weights and gradients are sent in the compute dtype; the gradients of experts and of the
    vocabulary add up in float32. Both are sent once for each micro-batch, and again for each
    micro-batch of a pipeline. Experts are not gathered: tokens are sent to them.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    parts, sizes, tokens = work.parts(mesh), mesh.shape, work.tokens(mesh)
    schedules = work.schedules(mesh, config)
    for axis in (*meshes.BATCH_AXES, "context"):
        if sizes[axis] > 1:
            yield from _weights(axis, sizes[axis], config, schedules, placed, parts)
    if sizes["fsdp"] > 1:
        yield Collective(
            "all-to-all",
            "fsdp",
            int(2 * parts * ring_bytes("all-to-all", hidden_bytes(config, tokens), sizes["fsdp"])),
            "embeddings, from the devices that hold their parts; and their gradients",
        )
    if sizes["stage"] > 1:
        yield from _through_stages(sizes, config, schedules, placed, tokens, parts)
    if sizes["context"] > 1:
        yield from _whole_rows(sizes, config, tokens, parts)
    # Hidden states: forward, recomputed with remat, and backward.
    recomputed = parts * config.remat
    yield from _activations(sizes, config, tokens, 2 * parts + recomputed, recomputed)


def _weights(
    axis: str,
    devices: int,
    config: ModelConfig,
    schedules: Sequence[Schedule | None],
    placed: Sequence[ShardedParameter],
    parts: int,
) -> Iterator[Collective]:
    """Gathered weights and summed gradients over one axis of the batch."""
    whole = sum(p.shard_size * _gradient_itemsize(p) for p in placed if axis not in p.mesh_axes)
    # An embedding that is only looked up is not gathered: each device looks up in its own shard.
    looked_up = "" if config.tie_embeddings else "embed"
    split = [p for p in placed if axis in p.mesh_axes and p.name != looked_up]
    if axis == "fsdp" and split:
        used = [(p, devices * _turns(p, schedules) * p.shard_size) for p in split]
        weights = sum(n * p.itemsize for p, n in used)
        gradients = sum(n * _gradient_itemsize(p) for p, n in used)
        yield Collective(
            "all-gather",
            axis,
            int(2 * parts * ring_bytes("all-gather", weights, devices)),
            "weights of each layer, for its forward and again for its backward pass",
        )
        yield Collective(
            "reduce-scatter",
            axis,
            int(parts * ring_bytes("reduce-scatter", gradients, devices)),
            "gradients of each layer, added up over rows; each device keeps its shard",
        )
    if whole:
        yield Collective(
            "all-reduce",
            axis,
            int(parts * ring_bytes("all-reduce", whole, devices)),
            f"gradients of parameters that {axis} does not split, added up over rows",
        )


def decode_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, tokens: float, rules: meshes.Rules
) -> Iterator[Collective]:
    """The communication of the sampler's forward pass.

    Args:
      mesh: The mesh.
      config: The model.
      tokens: Tokens of each device, such as one for each of its slots.
      rules: How weights are sharded while sampling.
    """
    expert_axes = meshes.axes_of([rules["experts"]])
    yield from _activations(mesh.shape, config, tokens, passes=1, expert_axes=expert_axes)


def hidden_bytes(config: ModelConfig, tokens: float) -> int:
    """Bytes of the hidden states of a number of tokens."""
    return int(tokens * config.hidden_size * compute_itemsize(config))


def _gradient_itemsize(p: ShardedParameter) -> int:
    """Bytes of one number of a gradient while devices add it up."""
    return 4 if {"experts", "vocab"} & set(p.axes) else p.itemsize


def _turns(p: ShardedParameter, schedules: Sequence[Schedule | None]) -> float:
    """How often a pass gathers a parameter: in a pipeline once for each turn of its layers."""
    plan = None if p.stack is None else schedules[p.stack]
    return 1 if plan is None else plan.turns / plan.repeats


def _through_stages(
    sizes: Mapping[str, int],
    config: ModelConfig,
    schedules: Sequence[Schedule | None],
    placed: Sequence[ShardedParameter],
    tokens: int,
    parts: int,
) -> Iterator[Collective]:
    """Rows that pass through the stages, and weights that move to the stage that uses them.

    Weights move in float32 and are cast to the compute dtype by the stage that uses them.
    """
    stages, hidden = sizes["stage"], hidden_bytes(config, tokens)
    used = [plan for plan in schedules if plan is not None]
    if used:
        turns = sum(plan.turns * stages / plan.micro_batches for plan in used)
        yield Collective(
            "collective-permute",
            "stage",
            int(2 * parts * turns * hidden),
            "hidden states of micro-batches to the next stage, and gradients to the one before",
        )
        rows = len(used) * parts * stages
        yield Collective(
            "all-gather", "stage", int(rows * ring_bytes("all-gather", hidden, stages)),
            "rows of all stages, to the first",
        )  # fmt: skip
        yield Collective(
            "reduce-scatter",
            "stage",
            int(rows * ring_bytes("reduce-scatter", 4 * tokens * config.hidden_size, stages)),
            "their gradients, back in float32",
        )
        yield Collective(
            "all-to-all", "stage", int(2 * rows * ring_bytes("all-to-all", hidden, stages)),
            "rows back from the first stage, and their gradients to it",
        )  # fmt: skip
    moved, weights, gradients = 0.0, 0.0, 0.0
    for p in placed:
        if p.stack is None or "stage" not in p.mesh_axes:
            continue
        plan, count = schedules[p.stack], p.shape[0]
        piped = 0 if plan is None else plan.layers
        if plan is not None and (plan.repeats > 1 or piped < count):
            # From layers to embed, if they are split by layers, and on to the layers of stages.
            moves = piped / count + (p.spec[0] == "stage")
            moved += 2 * moves * 4 * p.shard_size
        outside = stages * p.shard_size * (count - piped) / count
        weights += outside * p.itemsize
        gradients += outside * _gradient_itemsize(p)
    if moved:
        yield Collective(
            "all-to-all",
            "stage",
            int(parts * ring_bytes("all-to-all", moved, stages)),
            "layers to the stages that run them, and their gradients back, in float32",
        )
    if weights:
        yield Collective(
            "all-gather",
            "stage",
            int(2 * parts * ring_bytes("all-gather", weights, stages)),
            "weights of layers outside the pipeline, forward and again for the backward pass",
        )
        yield Collective(
            "reduce-scatter",
            "stage",
            int(parts * ring_bytes("reduce-scatter", gradients, stages)),
            "gradients of those layers, added up over rows; each device keeps its shard",
        )


def _whole_rows(
    sizes: Mapping[str, int], config: ModelConfig, tokens: int, parts: int
) -> Iterator[Collective]:
    """Gathered keys and values of rows that are split along their length."""
    context = sizes["context"]
    each = sum(_keys_and_values(block.attention) for block in config.layers)
    numbers = tokens * context * each // sizes["tensor"]
    forwards = parts * (2 if config.remat else 1)
    yield Collective(
        "all-gather",
        "context",
        int(forwards * ring_bytes("all-gather", compute_itemsize(config) * numbers, context)),
        "keys and values of whole rows, for the queries of their parts",
    )
    yield Collective(
        "reduce-scatter",
        "context",
        int(parts * ring_bytes("reduce-scatter", 4 * numbers, context)),
        "gradients of keys and values, added up over the parts of a row in float32",
    )


def _keys_and_values(c: Attention | LatentAttention) -> int:
    """Numbers of a token's keys and values in training."""
    if isinstance(c, LatentAttention):
        return c.num_heads * (c.nope_dim + c.rope_dim + c.value_dim)
    return 2 * c.num_kv_heads * c.head_dim


def _activations(
    sizes: Mapping[str, int],
    config: ModelConfig,
    tokens: float,
    passes: int,
    recomputed: int = 0,
    expert_axes: Sequence[str] = ("expert",),
) -> Iterator[Collective]:
    """Hidden states sent between the experts and the tensor shards of each layer.

    Args:
      sizes: Mesh axis -> size.
      config: The model.
      tokens: Tokens of a device.
      passes: Passes through the layers, recomputed ones included.
      recomputed: How many of the passes recompute activations; they send no outputs of experts.
      expert_axes: The mesh axes that split the experts.
    """
    tensor, axes = sizes["tensor"], [a for a in expert_axes if a != "tensor" and sizes[a] > 1]
    if axes and config.num_experts:
        devices = math.prod(sizes[a] for a in axes)
        yield from _dispatch(config, tokens, devices, "×".join(axes), passes, passes - recomputed)
    if tensor > 1:
        whole = passes * hidden_bytes(config, tokens) * (2 * config.num_layers + 1)
        yield Collective(
            "all-reduce",
            "tensor",
            int(ring_bytes("all-reduce", whole, tensor)),
            "outputs of attention, feed-forward and embedding, added up over heads and columns",
        )


def _dispatch(
    config: ModelConfig, tokens: float, devices: int, axis: str, inputs: int, outputs: int
) -> Iterator[Collective]:
    """Tokens sent to the experts of other devices, and the experts' outputs back, in float32.

    Args:
      config: The model.
      tokens: Tokens of a device.
      devices: How many devices the experts are split over.
      axis: The name of the axes.
      inputs: How often tokens are sent to the experts.
      outputs: How often outputs are sent back.
    """
    layers = len(config.mixture_layers)
    sent = inputs * layers * hidden_bytes(config, tokens)
    returned = outputs * layers * 4 * int(tokens * config.hidden_size)
    dispatch = config.expert_dispatch or cheaper_dispatch(int(tokens), config.top_k, devices, True)
    if dispatch == "all_gather":
        yield Collective(
            "all-gather",
            axis,
            int(ring_bytes("all-gather", sent * devices, devices)),
            "tokens of all devices, for the experts of each",
        )
        yield Collective(
            "reduce-scatter",
            axis,
            int(ring_bytes("reduce-scatter", returned * devices, devices)),
            "outputs of experts, added up over the devices that hold a token's experts",
        )
    else:
        copies = min(config.top_k, devices)
        yield Collective(
            "all-to-all",
            axis,
            int(ring_bytes("all-to-all", copies * (sent + returned), devices)),
            "tokens to the devices that hold their experts, and outputs back; an upper bound",
        )
