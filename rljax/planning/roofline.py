"""The least time of a rollout and of an update, from the peak rates of the chips."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import ModelConfig
from rljax.models.pipeline import Schedule
from rljax.planning import attention
from rljax.planning.chips import Chip
from rljax.planning.collectives import Collective
from rljax.planning.communication import decode_collectives, score_collectives
from rljax.planning.memory import kv_bytes
from rljax.planning.placement import ShardedParameter
from rljax.planning.work import Work


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that each resource of a chip is busy, at its peak rate.

    Attributes:
      compute: Matmuls.
      memory: Reads and writes of the chip's memory.
      links: Bytes sent over all links to other chips.
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """The time if all three overlap perfectly."""
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        """The resource that is busy for all of that time."""
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


def update(
    chip: Chip,
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work,
    placed: Sequence[ShardedParameter],
    collectives: Sequence[Collective],
) -> Roofline:
    """One optimizer step: forward, recomputed with remat, backward (twice forward), AdamW.

    Args:
      chip: The kind of chip.
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
      collectives: The communication of the step.
    """
    parts, remat = work.parts(mesh), config.remat
    forward = parts * _work_of(mesh, config, work, placed)
    # A backward pass computes twice as much; attention by blocks computes its scores once more.
    passes = 3 + (remat != "none")
    attended = parts * _attended(mesh, config, work, chip)
    attending = 3.5 + (remat in ("layer", "offload"))
    schedules = work.schedules(mesh, config)

    def reads(p: ShardedParameter) -> int:
        plan = None if p.stack is None else schedules[p.stack]
        return 1 if plan is None else plan.micro_batches // plan.stages

    read = sum(reads(p) * p.shard_size * _gathered(p, mesh) * p.itemsize for p in placed)
    state = sum(n for p in placed for n in p.bytes(parts).values())
    return Roofline(
        compute=(passes * forward + attending * attended) / chip.flops,
        # Each pass reads the weights once, in a pipeline once for each micro-batch; AdamW reads and
        # writes the whole state.
        memory=(passes * parts * read + 2 * state) / chip.memory_bandwidth,
        links=sum(c.bytes for c in collectives) / chip.link_bandwidth,
    )


def score(
    chip: Chip,
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work,
    placed: Sequence[ShardedParameter],
) -> Roofline:
    """The trainer's forward pass over a rollout batch.

    Args:
      chip: The kind of chip.
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    parts = work.score_parts(mesh)
    forward = _work_of(mesh, config, work, placed) + _attended(mesh, config, work, chip)
    read = sum(p.shard_size * _gathered(p, mesh) * p.itemsize for p in placed)
    sent = score_collectives(mesh, config, work, placed)
    return Roofline(
        compute=parts * forward / chip.flops,
        memory=parts * read / chip.memory_bandwidth,
        links=sum(c.bytes for c in sent) / chip.link_bandwidth,
    )


def _work_of(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, placed: Sequence[ShardedParameter]
) -> float:
    """Operations of a micro-batch's matmuls with weights, forward."""
    layers = _forward(mesh, config, placed, work.tokens(mesh), 0)
    waiting = _bubble_factor(config, work.schedules(mesh, config))
    return waiting * layers + _forward(mesh, config, placed, 0, work.scored(mesh))


def _attended(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, chip: Chip) -> float:
    """Operations of a micro-batch's attention, forward."""
    waiting = _bubble_factor(config, work.schedules(mesh, config))
    return waiting * attention.operations(mesh, config, work, chip.platform)


def rollout(
    chip: Chip,
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work,
    placed: Sequence[ShardedParameter],
    weights: int,
    rules: meshes.Rules,
) -> Roofline:
    """A rollout batch: each prompt prefilled once, then decode steps with all slots full.

    Args:
      chip: The kind of chip.
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
      weights: Bytes of the weights on a device while sampling.
      rules: How weights are sharded while sampling.
    """
    shards = meshes.batch_shards(mesh)
    prompts = work.prompts_per_step * work.max_prompt_length / shards
    prefill = _forward(mesh, config, placed, prompts, 0)
    prefill += _decoded(mesh, config, prompts, 0, work.max_prompt_length)
    slots = work.slots / shards
    # Slots are filled again as responses end.
    steps = max(-(-work.responses // work.slots) * work.mean_completion, work.max_completion_length)
    longest = work.max_prompt_length + work.mean_completion
    seen = work.max_prompt_length + work.mean_completion / 2
    prefilled = sum(c.bytes for c in decode_collectives(mesh, config, prompts, rules))
    decoded = sum(c.bytes for c in decode_collectives(mesh, config, slots, rules))
    each = _forward(mesh, config, placed, slots, slots)
    each += _decoded(mesh, config, slots, work.max_prompt_length, longest)
    return Roofline(
        compute=(prefill + steps * each) / chip.flops,
        memory=steps
        * (weights + slots * kv_bytes(config, work.length) * seen / work.length)
        / chip.memory_bandwidth,
        links=(prefilled + steps * decoded) / chip.link_bandwidth,
    )


def _gathered(p: ShardedParameter, mesh: Mesh | AbstractMesh) -> int:
    """How many times its own shard of a parameter a device computes with, for its own rows.

    With stages, a device computes with its own layers for the rows of all stages: as many
    operations.
    """
    return math.prod(mesh.shape[axis] for axis in ("fsdp", "stage") if axis in p.mesh_axes)


def _bubble_factor(config: ModelConfig, schedules: Sequence[Schedule | None]) -> float:
    """The factor by which pipeline bubbles lengthen the layers, on average over layers."""
    waited = sum(
        len(stack.pattern) * s.layers * s.bubble / (1 - s.bubble)
        for stack, s in zip(config.stacks, schedules, strict=True)
        if s is not None
    )
    return 1 + waited / config.num_layers


def _forward(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    placed: Sequence[ShardedParameter],
    tokens: float,
    scored: float,
) -> float:
    """Operations of a device's matmuls with weights; logits are computed for `scored` tokens."""
    total, chosen = 0.0, config.top_k / max(config.num_experts, 1)
    for p in placed:
        if len(p.shape) - ("layers" in p.axes) < 2:
            continue
        used = float(p.shard_size * _gathered(p, mesh))
        if "experts" in p.axes:
            used *= chosen * mesh.shape["expert"]  # for the tokens of all devices along it
        output = p.name == ("embed" if config.tie_embeddings else "output")
        if p.name == "embed" and not output:
            continue  # looked up, not multiplied
        total += 2 * used * (scored if output else tokens)
    return total


def _decoded(
    mesh: Mesh | AbstractMesh, config: ModelConfig, tokens: float, first: float, last: float
) -> float:
    """Operations of attention where keys are kept, of tokens between two places of a sequence."""
    total = 0.0
    for c, layers in attention.kinds(config).items():
        heads, _, width, value_width = attention.heads(c, mesh.shape["tensor"])
        seen = attention.mean_seen(c, first, last)
        total += layers * 2 * tokens * seen * heads * (width + value_width)
    return total
