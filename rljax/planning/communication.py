"""What an optimizer step sends over the links, by collective and mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import Attention, LatentAttention, ModelConfig
from rljax.models.experts import cheaper_dispatch
from rljax.models.pipeline import Schedule
from rljax.planning.placement import Placed, compute_width
from rljax.planning.work import Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """Communication of one kind over one mesh axis.

    Attributes:
      kind: Such as `all-gather`.
      axis: The mesh axis whose devices talk.
      bytes: What each device sends, by a ring.
      why: What it is for, in a line.
    """

    kind: str
    axis: str
    bytes: int
    why: str


def ring(kind: str, whole: float, ways: int) -> float:
    """Bytes that each device sends in a collective.

    Args:
      kind: The collective.
      whole: Bytes of the whole buffer: gathered, or not yet scattered.
      ways: How many devices take part.
    """
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * whole * (ways - 1) / ways


def update_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, placed: Sequence[Placed]
) -> Iterator[Collective]:
    """What an optimizer step communicates where its program is partitioned well.

    Weights travel in the compute dtype, and gradients too but for those of experts and of the
    vocabulary, which add up in float32; once for each micro-batch, and for each that goes through
    stages. Experts stay where they are, and tokens travel to them.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    parts, sizes, tokens = work.parts(mesh), mesh.shape, work.tokens(mesh)
    schedules = work.schedules(mesh, config)
    looked_up = "" if config.tie_embeddings else "embed"
    for axis in (*meshes.BATCH_AXES, "context"):
        ways = sizes[axis]
        if ways == 1:
            continue
        whole = sum(p.held * _gradient_width(p) for p in placed if axis not in p.over)
        # Of an embedding that is not multiplied by, each device looks its part up for all.
        split = [p for p in placed if axis in p.over and p.name != looked_up]
        if axis == "fsdp" and split:
            weights = ways * sum(_turns(p, schedules) * p.held * p.width for p in split)
            gradients = ways * sum(
                _turns(p, schedules) * p.held * _gradient_width(p) for p in split
            )
            yield Collective(
                "all-gather",
                axis,
                int(2 * parts * ring("all-gather", weights, ways)),
                "weights of each layer, for its forward and again for its backward pass",
            )
            yield Collective(
                "reduce-scatter",
                axis,
                int(parts * ring("reduce-scatter", gradients, ways)),
                "gradients of each layer, added up over rows; each device keeps its shard",
            )
        if whole:
            yield Collective(
                "all-reduce",
                axis,
                int(parts * ring("all-reduce", whole, ways)),
                f"gradients of what {axis} does not split, added up over rows",
            )
    if sizes["fsdp"] > 1:
        yield Collective(
            "all-to-all",
            "fsdp",
            int(2 * parts * ring("all-to-all", hidden_bytes(config, tokens), sizes["fsdp"])),
            "embeddings, from the devices that hold their parts; and their gradients",
        )
    if sizes["stage"] > 1:
        yield from _through_stages(sizes, config, schedules, placed, tokens, parts)
    if sizes["context"] > 1:
        yield from _whole_rows(sizes, config, tokens, parts)
    # Hidden states: forward, recomputed where layers are, and backward.
    recomputed = parts * config.remat
    yield from _activations(sizes, config, tokens, 2 * parts + recomputed, recomputed)


def decode_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, tokens: float, rules: meshes.Rules
) -> Iterator[Collective]:
    """What the sampler communicates to run `tokens` a device, such as one for each of its slots."""
    spread = meshes.axes_of([rules["experts"]])
    yield from _activations(mesh.shape, config, tokens, passes=1, spread=spread)


def hidden_bytes(config: ModelConfig, tokens: float) -> int:
    """Bytes of the hidden states of so many tokens."""
    return int(tokens * config.hidden_size * compute_width(config))


def _gradient_width(p: Placed) -> int:
    """Bytes of one number of a gradient while devices add it up."""
    return 4 if {"experts", "vocab"} & set(p.axes) else p.width


def _turns(p: Placed, schedules: Sequence[Schedule | None]) -> float:
    """How often a pass uses a parameter: in a pipeline at each turn of its piece of layers."""
    plan = None if p.stack is None else schedules[p.stack]
    return 1 if plan is None else plan.turns / plan.repeats


def _through_stages(
    sizes: Mapping[str, int],
    config: ModelConfig,
    schedules: Sequence[Schedule | None],
    placed: Sequence[Placed],
    tokens: int,
    parts: int,
) -> Iterator[Collective]:
    """Rows through the layers of all stages, and the weights that are elsewhere than they are used.

    Float32 weights are traded: they are cast where they are used.
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
            "all-gather", "stage", int(rows * ring("all-gather", hidden, stages)),
            "rows of all stages, to the first",
        )  # fmt: skip
        yield Collective(
            "reduce-scatter",
            "stage",
            int(rows * ring("reduce-scatter", 4 * tokens * config.hidden_size, stages)),
            "their gradients, back in float32",
        )
        yield Collective(
            "all-to-all", "stage", int(2 * rows * ring("all-to-all", hidden, stages)),
            "rows back from the first stage, and their gradients to it",
        )  # fmt: skip
    traded, weights, gradients = 0.0, 0.0, 0.0
    for p in placed:
        if p.stack is None or "stage" not in p.over:
            continue
        plan, count = schedules[p.stack], p.shape[0]
        piped = 0 if plan is None else plan.layers
        if plan is not None and (plan.repeats > 1 or piped < count):
            # From layers to embed, if they are split by layers, and on to the layers of stages.
            moves = piped / count + (p.spec[0] == "stage")
            traded += 2 * moves * 4 * p.held
        outside = stages * p.held * (count - piped) / count
        weights += outside * p.width
        gradients += outside * _gradient_width(p)
    if traded:
        yield Collective(
            "all-to-all",
            "stage",
            int(parts * ring("all-to-all", traded, stages)),
            "layers to the stages that run them, and their gradients back, in float32",
        )
    if weights:
        yield Collective(
            "all-gather",
            "stage",
            int(2 * parts * ring("all-gather", weights, stages)),
            "weights of layers outside the pipeline, forward and again for the backward pass",
        )
        yield Collective(
            "reduce-scatter",
            "stage",
            int(parts * ring("reduce-scatter", gradients, stages)),
            "gradients of those layers, added up over rows; each device keeps its shard",
        )


def _whole_rows(
    sizes: Mapping[str, int], config: ModelConfig, tokens: int, parts: int
) -> Iterator[Collective]:
    """Keys and values of rows that are split along their length."""
    context = sizes["context"]
    each = sum(_keys_and_values(block.attention) for block in config.layers)
    numbers = tokens * context * each // sizes["tensor"]
    forwards = parts * (2 if config.remat else 1)
    yield Collective(
        "all-gather",
        "context",
        int(forwards * ring("all-gather", compute_width(config) * numbers, context)),
        "keys and values of whole rows, for the queries of their parts",
    )
    yield Collective(
        "reduce-scatter",
        "context",
        int(parts * ring("reduce-scatter", 4 * numbers, context)),
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
    spread: Sequence[str] = ("expert",),
) -> Iterator[Collective]:
    """Hidden states of a device's tokens, sent `passes` times through each layer's halves.

    Experts are spread over the axes `spread`.
    """
    tensor, axes = sizes["tensor"], [a for a in spread if a != "tensor" and sizes[a] > 1]
    if axes and config.num_experts:
        yield from _met_experts(
            config,
            tokens,
            math.prod(sizes[a] for a in axes),
            "×".join(axes),
            passes,
            passes - recomputed,
        )
    if tensor > 1:
        whole = passes * hidden_bytes(config, tokens) * (2 * config.num_layers + 1)
        yield Collective(
            "all-reduce",
            "tensor",
            int(ring("all-reduce", whole, tensor)),
            "outputs of attention, feed-forward and embedding, added up over heads and columns",
        )


def _met_experts(
    config: ModelConfig, tokens: float, devices: int, axis: str, passes: int, answers: int
) -> Iterator[Collective]:
    """Tokens to experts of other devices, and in float32 the answers, which are not recomputed."""
    layers = len(config.mixture_layers)
    sent = passes * layers * hidden_bytes(config, tokens)
    answered = answers * layers * 4 * int(tokens * config.hidden_size)
    way = config.expert_dispatch or cheaper_dispatch(int(tokens), config.top_k, devices, True)
    if way == "all_gather":
        yield Collective(
            "all-gather",
            axis,
            int(ring("all-gather", sent * devices, devices)),
            "tokens, shown to the experts of all devices",
        )
        yield Collective(
            "reduce-scatter",
            axis,
            int(ring("reduce-scatter", answered * devices, devices)),
            "outputs of experts, added up over the devices that hold a token's experts",
        )
    else:
        copies = min(config.top_k, devices)
        yield Collective(
            "all-to-all",
            axis,
            int(ring("all-to-all", copies * (sent + answered), devices)),
            "tokens to the devices that hold their experts, and outputs back, at the most",
        )
