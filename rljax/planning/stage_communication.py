"""Bytes that the stages of a pipeline send each other in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rljax.models import ModelConfig
from rljax.models.pipeline import Schedule
from rljax.planning.collectives import Collective, ring_bytes
from rljax.planning.placement import ShardedParameter, gradient_itemsize, hidden_bytes


def through_stages(
    sizes: Mapping[str, int],
    config: ModelConfig,
    schedules: Sequence[Schedule | None],
    placed: Sequence[ShardedParameter],
    tokens: int,
    parts: int,
) -> Iterator[Collective]:
    """Rows that pass through the stages, and weights that move to the stage that uses them.

    Weights move in float32 and are cast to the compute dtype by the stage that uses them.

    Args:
      sizes: Mesh axis -> size.
      config: The model.
      schedules: The pipeline schedule of each stack of layers.
      placed: Its parameters on the mesh.
      tokens: Tokens of a micro-batch on each device.
      parts: Micro-batches of an optimizer step.
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
    yield from _weights_of_stages(stages, schedules, placed, parts)


def _weights_of_stages(
    stages: int,
    schedules: Sequence[Schedule | None],
    placed: Sequence[ShardedParameter],
    parts: int,
) -> Iterator[Collective]:
    """Layers that move to the stages that run them, and those outside the pipeline."""
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
        gradients += outside * gradient_itemsize(p)
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
