"""Bytes that devices send in an optimizer step and while sampling, by collective and mesh axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import ModelConfig
from rljax.models.experts import cheaper_dispatch
from rljax.models.pipeline import Schedule
from rljax.planning import attention
from rljax.planning.collectives import Collective, ring_bytes
from rljax.planning.placement import (
    ShardedParameter,
    compute_itemsize,
    gradient_itemsize,
    hidden_bytes,
)
from rljax.planning.stage_communication import through_stages
from rljax.planning.work import Work


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
        yield from through_stages(sizes, config, schedules, placed, tokens, parts)
    remat = config.remat
    if sizes["context"] > 1:
        forwards = parts * (1 + (remat in ("layer", "offload")))
        yield from _between_parts_of_rows(mesh, config, tokens, forwards, parts)
    # Hidden states: forward, recomputed with remat, and backward.
    recomputed = parts * (remat != "none")
    yield from _activations(sizes, config, tokens, 2 * parts + recomputed, recomputed)


def score_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, placed: Sequence[ShardedParameter]
) -> Iterator[Collective]:
    """The communication of a forward pass over a rollout batch; as `update_collectives`.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    parts, tokens, devices = work.score_parts(mesh), work.tokens(mesh), mesh.shape["fsdp"]
    split = [p for p in placed if "fsdp" in p.mesh_axes]
    if split:
        whole = devices * sum(p.shard_size * p.itemsize for p in split)
        yield Collective(
            "all-gather", "fsdp", int(parts * ring_bytes("all-gather", whole, devices)),
            "weights of each layer",
        )  # fmt: skip
    if mesh.shape["context"] > 1:
        yield from _between_parts_of_rows(mesh, config, tokens, parts, 0)
    yield from _activations(mesh.shape, config, tokens, parts)


def _weights(
    axis: str,
    devices: int,
    config: ModelConfig,
    schedules: Sequence[Schedule | None],
    placed: Sequence[ShardedParameter],
    parts: int,
) -> Iterator[Collective]:
    """Gathered weights and summed gradients over one axis of the batch."""
    whole = sum(p.shard_size * gradient_itemsize(p) for p in placed if axis not in p.mesh_axes)
    # An embedding that is only looked up is not gathered: each device looks up in its own shard.
    looked_up = "" if config.tie_embeddings else "embed"
    split = [p for p in placed if axis in p.mesh_axes and p.name != looked_up]
    if axis == "fsdp" and split:
        used = [(p, devices * _turns(p, schedules) * p.shard_size) for p in split]
        weights = sum(n * p.itemsize for p, n in used)
        gradients = sum(n * gradient_itemsize(p) for p, n in used)
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


def _turns(p: ShardedParameter, schedules: Sequence[Schedule | None]) -> float:
    """How often a pass gathers a parameter: in a pipeline once for each turn of its layers."""
    plan = None if p.stack is None else schedules[p.stack]
    return 1 if plan is None else plan.turns / plan.repeats


def _between_parts_of_rows(
    mesh: Mesh | AbstractMesh, config: ModelConfig, tokens: int, forwards: int, backwards: int
) -> Iterator[Collective]:
    """Keys and values that go round over `context`, or are gathered, and their gradients.

    Args:
      mesh: The mesh.
      config: The model.
      tokens: Tokens of a micro-batch on each device.
      forwards: How often attention is computed.
      backwards: How often its gradient is.
    """
    context, itemsize, numbers = mesh.shape["context"], compute_itemsize(config), 0
    for c, layers in attention.kinds(config).items():
        _, heads, width, value_width = attention.heads(c, mesh.shape["tensor"])
        numbers += layers * tokens * heads * (width + value_width)
    if attention.goes_round(mesh, config):
        # Each device passes on what it has worked on, the gradients in float32.
        sent = (forwards + backwards) * itemsize + backwards * 4
        yield Collective(
            "collective-permute", "context", context * numbers * sent,
            "keys and values from device to device, for the queries of each; and their gradients",
        )  # fmt: skip
        return
    whole = context * numbers
    yield Collective(
        "all-gather",
        "context",
        int(forwards * ring_bytes("all-gather", itemsize * whole, context)),
        "keys and values of whole rows, for the queries of their parts",
    )
    if backwards:
        yield Collective(
            "reduce-scatter",
            "context",
            int(backwards * ring_bytes("reduce-scatter", 4 * whole, context)),
            "gradients of keys and values, added up over the parts of a row in float32",
        )


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
