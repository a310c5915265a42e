"""What attention costs in training and scoring: who computes it, its memory, its operations."""

from __future__ import annotations

import collections

from jax.sharding import AbstractMesh, Mesh
from rljax_kernels.attention import OPERATION, RINGS, Asked

from rljax.errors import InputError
from rljax.models import Attention, LatentAttention, ModelConfig
from rljax.planning.placement import compute_itemsize
from rljax.planning.work import Work


def kinds(config: ModelConfig) -> collections.Counter[Attention | LatentAttention]:
    """The kinds of attention in a model, and how many layers have each."""
    return collections.Counter(block.attention for block in config.layers)


def heads(c: Attention | LatentAttention, tensor: int = 1) -> tuple[int, int, int, int]:
    """Heads of queries and of keys on a device, and the widths of keys and of values.

    In training the keys and values of latent attention are spelled out for each head. Key heads are
    repeated where `tensor` splits the queries' heads further than there are any.
    """
    if isinstance(c, LatentAttention):
        own = c.num_heads // tensor
        return own, own, c.nope_dim + c.rope_dim, c.value_dim
    return c.num_heads // tensor, max(c.num_kv_heads // tensor, 1), c.head_dim, c.head_dim


def implementation(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    c: Attention | LatentAttention,
    work: Work,
    platform: str,
) -> str:
    """The name of what computes a layer's attention on a device, by the kernels' rule.

    What is installed here does not matter: the machine that is planned for will have what it needs.

    Args:
      mesh: The mesh; over `context` keys go round, and not all of them do that.
      config: The model.
      c: The layer's attention.
      work: The sizes of a step.
      platform: Of the devices.

    Raises:
      InputError: The implementation that is asked for does not compute this there.
    """
    num_heads, kv_heads, width, value_width = heads(c, mesh.shape["tensor"])
    asked = Asked(
        dtype=config.dtype,
        rows=work.rows(mesh),
        queries=work.row_length // mesh.shape["context"],
        keys=work.row_length // mesh.shape["context"],
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=width,
        value_dim=value_width,
        window=c.window if isinstance(c, Attention) else None,
        sinks=isinstance(c, Attention) and c.sinks,
    )
    if config.attention_backend != "auto":
        found = OPERATION.named(config.attention_backend)
        reason = found.refuses(asked)
        if platform not in found.platforms:
            reason = f"it is for {' and '.join(found.platforms)}, not for {platform}"
        if reason:
            raise InputError(f"attention_backend={found.name!r}: {reason}; use auto")
        return found.name
    able = list(OPERATION.implementations)
    if goes_round(mesh, config):
        able = [OPERATION.named(name) for name in RINGS]
    return next(
        i.name
        for i in able
        if platform in i.platforms
        and i.refuses(asked) is None
        and (i.defers(asked, platform) is None or goes_round(mesh, config))
    )


def goes_round(mesh: Mesh | AbstractMesh, config: ModelConfig) -> bool:
    """Whether keys and values go round over `context`; else each device gathers all of a row."""
    return (
        bool(RINGS) and mesh.shape["context"] > 1 and config.attention_backend in ("auto", *RINGS)
    )


def bytes_of_layer(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    c: Attention | LatentAttention,
    work: Work,
    platform: str,
) -> tuple[int, int]:
    """Bytes that the attention of a layer holds: in a forward pass, and more in a backward pass.

    Args:
      mesh: The mesh.
      config: The model.
      c: The layer's attention.
      work: The sizes of a step.
      platform: Of the devices.
    """
    tokens, itemsize = work.tokens(mesh), compute_itemsize(config)
    num_heads, kv_heads, width, value_width = heads(c, mesh.shape["tensor"])
    queries = tokens * num_heads * width
    keys = tokens * kv_heads * (width + value_width)
    whole = mesh.shape["context"]
    round_ = goes_round(mesh, config)
    forward = itemsize * (queries + keys) + saved(mesh, config, c, work)
    # Gradients, which add up in float32 over the blocks of queries and of keys.
    backward = (4 + itemsize) * (queries + keys) + itemsize * tokens * num_heads * value_width
    chosen = implementation(mesh, config, c, work, platform)
    if chosen in ("pallas", "splash"):
        # Its kernels want heads before tokens: all of it is laid out once more.
        forward, backward = 2 * forward, 2 * backward
    if chosen == "reference":
        # Scores, their softmax and the gradients of both, in float32.
        square = 4 * tokens * num_heads * work.row_length
        forward, backward = forward + 2 * square, backward + 2 * square
    if round_:
        # What is worked on, and what comes.
        forward += itemsize * keys + 4 * tokens * num_heads * value_width
        backward += (itemsize + 4) * keys
    elif whole > 1:
        forward += itemsize * keys * whole
        backward += 4 * keys * whole
    return int(forward), int(backward)


def saved(
    mesh: Mesh | AbstractMesh, config: ModelConfig, c: Attention | LatentAttention, work: Work
) -> int:
    """Bytes of a layer's output before its projection, and of the logarithms of softmax sums."""
    num_heads, _, _, value_width = heads(c, mesh.shape["tensor"])
    return work.tokens(mesh) * num_heads * (compute_itemsize(config) * value_width + 4)


def mean_seen(c: Attention | LatentAttention, first: float, last: float) -> float:
    """Keys that a query sees, on average over the places from `first` to `last` of a sequence."""
    window = c.window if isinstance(c, Attention) and c.window is not None else last
    turn = min(max(window, first), last)  # up to here all keys before it, then a window
    rising = (turn + first) / 2 * (turn - first)
    return (rising + window * (last - turn)) / (last - first)


def operations(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, platform: str) -> float:
    """Operations of a micro-batch's scores and their products with values, forward, on a device.

    Causal: half of the square, and less with windows. Where rows are split over `context`, they are
    those of the device with the ends of rows, which the others wait for.
    """
    total, sequence = 0.0, work.sequence_length
    part = work.row_length // mesh.shape["context"]
    for c, layers in kinds(config).items():
        num_heads, _, width, value_width = heads(c, mesh.shape["tensor"])
        if implementation(mesh, config, c, work, platform) == "reference":
            seen = float(work.row_length)
        else:
            seen = mean_seen(c, max(sequence - part, 0), sequence)
        total += layers * 2 * work.tokens(mesh) * seen * num_heads * (width + value_width)
    return total
