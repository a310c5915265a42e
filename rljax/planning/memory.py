"""Bytes per device of activations, KV cache and the sampler's weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models import Block, Experts, ModelConfig
from rljax.models.pipeline import Schedule
from rljax.planning.communication import hidden_bytes
from rljax.planning.placement import ShardedParameter, compute_itemsize, shard_parameters
from rljax.planning.work import Work
from rljax.sampling.pool import make_pool, pool_sharding

_CHUNK = 1024  # tokens of a micro-batch whose logits exist at a time


def activations(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, placed: Sequence[ShardedParameter]
) -> dict[str, int]:
    """The largest temporaries of an update, by kind.

    Args:
      mesh: The mesh.
      config: The model. With `remat` only the inputs of layers are kept for the backward pass, and
        other activations exist for one layer at a time; without it those of all layers are kept.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
    """
    rows, tokens, tensor = work.rows(mesh), work.tokens(mesh), mesh.shape["tensor"]
    # Scores, their softmax and the gradients of both, in float32.
    heads = max(b.attention.num_heads for b in config.layers)
    scores = 4 * 4 * tokens * heads * work.length // tensor
    # Inputs, inner products and outputs of the largest feed-forward, and their gradients.
    inner = max(_feed_forward(b, config, tokens, mesh) for b in config.layers)
    inner *= 2 * compute_itemsize(config)
    layers = 1 if config.remat else config.num_layers
    logits = min(max(_CHUNK, rows), work.scored(mesh))
    return {
        "inputs of layers, kept for the backward pass": int(
            _kept_inputs(config, work.schedules(mesh, config)) * hidden_bytes(config, tokens)
        ),
        "attention scores": layers * scores,
        "feed-forward": layers * inner,
        "gathered weights of a layer and their gradients": 2 * _largest_layer(mesh, placed),
        "logits": 3 * 4 * logits * config.vocab_size // tensor,
    }


def _kept_inputs(config: ModelConfig, schedules: Sequence[Schedule | None]) -> float:
    """How many inputs of layers a pass keeps on each device, each of its own rows."""
    total = float(config.num_layers)
    for stack, plan in zip(config.stacks, schedules, strict=True):
        if plan is not None:
            # Turns of the pipeline's bubble keep inputs too, and so does the first stage's batch.
            total += len(stack.pattern) * plan.layers * plan.bubble / (1 - plan.bubble)
            total += plan.stages
    return total


def _feed_forward(block: Block, config: ModelConfig, tokens: int, mesh: Mesh | AbstractMesh) -> int:
    c, tensor = block.feed_forward, mesh.shape["tensor"]
    each = 2 * config.hidden_size + 3 * c.intermediate_size // tensor
    if not isinstance(c, Experts):
        return tokens * each
    # Buffers hold the tokens of all devices along `expert`, so that none is ever dropped.
    routed = tokens * mesh.shape["expert"] * c.top_k * each
    return routed + tokens * 3 * c.shared_size // tensor


def _largest_layer(mesh: Mesh | AbstractMesh, placed: Sequence[ShardedParameter]) -> int:
    """Bytes of the largest layer's weights in the compute dtype, gathered over fsdp."""
    layers: dict[str, int] = {}
    for p in placed:
        if p.name.startswith("stacks/"):
            layer = "/".join(p.name.split("/")[:3])
            ways = mesh.shape["fsdp"] if "fsdp" in p.mesh_axes else 1
            layers[layer] = layers.get(layer, 0) + p.shard_size * ways * p.itemsize // p.shape[0]
    return max(layers.values())


def rollout_weights(
    placed: Sequence[ShardedParameter],
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    rules: meshes.Rules,
) -> int:
    """Bytes of the sampler's weights on a device; 0 where it uses the trainer's buffers.

    Args:
      placed: The trainer's parameters on the mesh.
      mesh: The mesh.
      config: The model.
      rules: How weights are sharded while sampling.
    """
    sampler = shard_parameters(mesh, config, rules)
    if all(s.spec == t.spec and s.itemsize == 4 for s, t in zip(sampler, placed, strict=True)):
        return 0
    return sum(p.shard_size * p.itemsize for p in sampler)


def kv_pool(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work) -> int:
    """Bytes of the KV cache's pages on a device.

    Raises:
      InputError: The pages do not divide, or layers differ in their number of KV heads.
    """
    shards = meshes.batch_shards(mesh)
    if work.pages % shards:
        raise InputError(
            f"num_pages={work.pages} do not divide over stage×data×fsdp×expert = {shards}; use a "
            "multiple"
        )
    pool = jax.eval_shape(functools.partial(make_pool, config, work.pages, work.page_size))
    sharding = pool_sharding(config, mesh)
    return sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in pool.values())


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of the keys and values of a number of tokens, in all layers."""
    pool = jax.eval_shape(functools.partial(make_pool, config, tokens, 1))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in pool.values())


def decode_activations(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work) -> int:
    """Bytes of a decode step's temporaries: keys and values read by one layer, and logits."""
    slots, tensor = work.slots // meshes.batch_shards(mesh), mesh.shape["tensor"]
    read = 2 * kv_bytes(config, slots * work.length) // config.num_layers
    heads = max(b.attention.num_heads for b in config.layers) // tensor
    return read + 2 * 4 * slots * (heads * work.length + config.vocab_size // tensor)
