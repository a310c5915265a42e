"""What an optimizer step sends over the links, by collective and mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import ModelConfig
from rljax.planning.placement import Placed
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

    Weights and gradients travel in the compute dtype, once for each micro-batch. Each device
    computes its own experts for the tokens of its batch shard, and their results are added up.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    parts, sizes = work.parts(mesh), mesh.shape
    for axis in meshes.BATCH_AXES:
        ways = sizes[axis]
        split = sum(p.held * ways * p.width for p in placed if axis in p.spec)
        whole = sum(p.held * p.width for p in placed if axis not in p.spec)
        if ways == 1:
            continue
        if split:
            yield Collective(
                "all-gather",
                axis,
                int(2 * parts * ring("all-gather", split, ways)),
                "weights of each layer, for its forward and again for its backward pass",
            )
            yield Collective(
                "reduce-scatter",
                axis,
                int(parts * ring("reduce-scatter", split, ways)),
                "gradients of each layer, added up over rows; each device keeps its shard",
            )
        if whole:
            yield Collective(
                "all-reduce",
                axis,
                int(parts * ring("all-reduce", whole, ways)),
                f"gradients of what {axis} does not split, added up over rows",
            )
    # Hidden states: forward, recomputed where layers are, and backward.
    passes = parts * (3 if config.remat else 2)
    states = passes * hidden_bytes(config, work.rows(mesh) * work.length)
    yield from _activations(sizes, config, states)


def decode_collectives(
    mesh: Mesh | AbstractMesh, config: ModelConfig, slots: int
) -> Iterator[Collective]:
    """What one decode step communicates, where each device decodes for `slots` sequences."""
    yield from _activations(mesh.shape, config, hidden_bytes(config, slots))


def hidden_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of the hidden states of so many tokens."""
    return tokens * config.hidden_size * (4 if config.dtype == "float32" else 2)


def _activations(sizes: dict[str, int], config: ModelConfig, states: int) -> Iterator[Collective]:
    """Hidden states of `states` bytes, added up after each layer's halves."""
    expert, tensor = sizes["expert"], sizes["tensor"]
    if expert > 1 and config.num_experts:
        whole = states * len(config.mixture_layers)
        yield Collective(
            "all-reduce",
            "expert",
            int(ring("all-reduce", whole, expert)),
            "outputs of experts, added up over the devices that hold a token's experts",
        )
    if tensor > 1:
        whole = states * (2 * config.num_layers + 1)
        yield Collective(
            "all-reduce",
            "tensor",
            int(ring("all-reduce", whole, tensor)),
            "outputs of attention, feed-forward and embedding, added up over heads and columns",
        )
