"""What the backward pass recomputes where `remat` is auto: it follows from the memory."""

from __future__ import annotations

import dataclasses
import logging
import os

import jax
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax.config import Config
from rljax.errors import InputError
from rljax.models import Experts, LatentAttention, ModelConfig
from rljax.models.remat import Remat

_log = logging.getLogger(__name__)
MEMORY_SHARE = 0.25
"""Activations are kept where they are estimated to take at most this share of a device's memory."""


def activation_bytes(model: ModelConfig, tokens: int) -> int:
    """What the backward pass of so many tokens finds of all layers where nothing is recomputed.

    An estimate: six times the hidden state, four times queries, keys and values, five times the
    inner width of the feed-forward, each in the compute dtype; attention by blocks.

    Args:
      model: The model.
      tokens: Of a micro-batch on a device.
    """
    numbers = 0
    for block in model.layers:
        a, f = block.attention, block.feed_forward
        if isinstance(a, LatentAttention):
            heads = a.num_heads * (2 * (a.nope_dim + a.rope_dim) + a.value_dim)
        else:
            heads = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        width = f.intermediate_size
        if isinstance(f, Experts):
            width = f.top_k * (width + model.hidden_size) + f.shared_size
        numbers += 6 * model.hidden_size + 4 * heads + 5 * width
    return numbers * tokens * (4 if model.dtype == "float32" else 2)


def device_bytes(device: jax.Device) -> int:
    """The memory of a device; of a CPU device, its share of the machine's."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine // jax.local_device_count()


def micro_batch_tokens(config: Config, shards: int) -> int:
    """The most tokens of a micro-batch on a device."""
    update = config.update
    longest = config.data.max_prompt_length + config.rollout.max_completion_length
    each = -(-config.mini_batch_size // shards)
    at_once = min(update.micro_batch_size or each, each)
    if update.packing == "auto" and update.micro_batch_tokens:
        return max(min(update.micro_batch_tokens, each * longest), longest)
    return at_once * longest


def choose_remat(config: Config, model: ModelConfig, mesh: Mesh) -> Remat:
    """The value of `ModelConfig.remat` for a run.

    Where it is `auto`: `none` if the activations of a micro-batch fit in `MEMORY_SHARE` of a
    device's memory, else `attention`, which recomputes all but attention.

    Args:
      config: Of the run.
      model: The model.
      mesh: The devices.

    Raises:
      InputError: `offload` on devices without memory of their host.
    """
    wanted = config.model.remat
    if wanted == "offload":
        try:
            meshes.on_host(meshes.batch_sharding(mesh))
        except InputError:
            kind = mesh.devices.flat[0].platform
            raise InputError(
                f"remat=offload: {kind} devices have no pinned_host memory; use attention or layer"
            ) from None
    if wanted != "auto":
        return wanted
    tokens = micro_batch_tokens(config, meshes.batch_shards(mesh)) // mesh.shape["context"]
    if mesh.devices.flat[0].platform == "cpu":  # XLA computes bfloat16 in float32 there
        model = dataclasses.replace(model, dtype="float32")
    need = activation_bytes(model, tokens) // mesh.shape["tensor"]
    memory = device_bytes(jax.local_devices()[0])
    chosen: Remat = "none" if need <= MEMORY_SHARE * memory else "attention"
    _log.info(
        "remat=auto is %s: the activations of %d tokens take about %.2f GB of %.1f GB",
        chosen, tokens, need / 1e9, memory / 1e9,
    )  # fmt: skip
    return chosen
