"""Bytes per device of activations, KV cache and the sampler's weights."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models import Attention, Block, Experts, LatentAttention, ModelConfig
from rljax.models.experts import at_once, token_parts
from rljax.models.pipeline import Schedule
from rljax.planning import attention
from rljax.planning.placement import (
    ShardedParameter,
    compute_itemsize,
    hidden_bytes,
    shard_parameters,
)
from rljax.planning.work import Work
from rljax.sampling.pool import make_pool, pool_sharding

_CHUNK = 1024  # tokens of a micro-batch whose logits exist at a time
INPUTS, ATTENTION, FEED_FORWARD = (
    "inputs of layers, kept for the backward pass", "attention", "feed-forward",
)  # fmt: skip
"""Kinds of temporaries."""


def activations(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work,
    placed: Sequence[ShardedParameter],
    platform: str,
) -> dict[str, int]:
    """The largest temporaries of an update, by kind.

    Of a layer's activations all exist while the backward pass is at it. What is kept of the others
    meanwhile depends on `ModelConfig.remat`.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      placed: Its parameters on the mesh.
      platform: Of the devices.
    """
    tokens, remat = work.tokens(mesh), config.remat
    blocks = collections.Counter(config.layers)
    attended = {
        b: sum(attention.bytes_of_layer(mesh, config, b.attention, work, platform)) for b in blocks
    }
    fed = {b: sum(_feed_forward(b, config, tokens, mesh)) for b in blocks}
    kept = 0.0
    if remat != "offload":
        kept = _kept_inputs(config, work.schedules(mesh, config)) * hidden_bytes(config, tokens)
    if remat == "attention":
        kept += sum(
            n * attention.saved(mesh, config, c, work) for c, n in attention.kinds(config).items()
        )

    def held(each: Mapping[Block, int]) -> int:
        """Of all layers, or of the one that the backward pass is at."""
        if remat == "none":
            return sum(n * each[b] for b, n in blocks.items())
        return max(each.values())

    return {
        INPUTS: int(kept),
        ATTENTION: held(attended),
        FEED_FORWARD: held(fed),
        "gathered weights of a layer and their gradients": 2 * _largest_layer(mesh, placed),
        "logits": 3 * _logits(mesh, config, work),
        "output matrix, gathered, and its gradient": _output_matrix(mesh, config),
        # Those of one micro-batch, before they are added to the others'.
        "gradients of a micro-batch": sum(4 * p.shard_size for p in placed)
        if work.parts(mesh) > 1
        else 0,
    }


def scoring(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work,
    placed: Sequence[ShardedParameter],
    platform: str,
) -> dict[str, int]:
    """The largest temporaries of a forward pass over a micro-batch, by kind; as `activations`."""
    tokens, blocks = work.tokens(mesh), set(config.layers)
    return {
        "hidden states": 3 * hidden_bytes(config, tokens),
        ATTENTION: max(
            attention.bytes_of_layer(mesh, config, b.attention, work, platform)[0] for b in blocks
        ),
        FEED_FORWARD: max(_feed_forward(b, config, tokens, mesh)[0] for b in blocks),
        "gathered weights of a layer": _largest_layer(mesh, placed),
        "logits": 2 * _logits(mesh, config, work),
    }


def offloaded(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work) -> int:
    """Bytes of the inputs of layers that an update keeps in the host's memory, for a device."""
    if config.remat != "offload":
        return 0
    kept = _kept_inputs(config, work.schedules(mesh, config))
    return int(kept * hidden_bytes(config, work.tokens(mesh)))


def _output_matrix(mesh: Mesh | AbstractMesh, config: ModelConfig) -> int:
    """Bytes of the output matrix, whole over fsdp, and of its gradient: of a chunk, and the sum."""
    numbers = config.vocab_size * config.hidden_size // mesh.shape["tensor"]
    return (compute_itemsize(config) + 2 * 4) * numbers


def _logits(mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work) -> int:
    """Bytes of the logits that exist at a time, in float32."""
    logits = min(max(_CHUNK, work.rows(mesh)), work.scored(mesh))
    return 4 * logits * config.vocab_size // mesh.shape["tensor"]


def _kept_inputs(config: ModelConfig, schedules: Sequence[Schedule | None]) -> float:
    """How many inputs of layers a pass keeps on each device, each of its own rows."""
    total = float(config.num_layers)
    for stack, plan in zip(config.stacks, schedules, strict=True):
        if plan is not None:
            # Turns of the pipeline's bubble keep inputs too, and so does the first stage's batch.
            total += len(stack.pattern) * plan.layers * plan.bubble / (1 - plan.bubble)
            total += plan.stages
    return total


def _feed_forward(
    block: Block,
    config: ModelConfig,
    tokens: int,
    mesh: Mesh | AbstractMesh,
    expert_axes: Sequence[str] = ("expert",),
) -> tuple[int, int]:
    """Bytes of a feed-forward's inputs, inner products and outputs, and of their gradients."""
    c, tensor, itemsize = block.feed_forward, mesh.shape["tensor"], compute_itemsize(config)
    each = itemsize * (2 * config.hidden_size + 3 * c.intermediate_size // tensor)
    if not isinstance(c, Experts):
        return tokens * each, tokens * each
    shared = itemsize * tokens * 3 * c.shared_size // tensor
    # The tokens of all devices along these axes come to each, so that none is ever dropped.
    devices = math.prod(mesh.shape[a] for a in expert_axes if a != "tensor")
    met = tokens * devices // token_parts(tokens, devices * config.hidden_size * itemsize)
    if at_once(met * c.top_k * config.hidden_size * itemsize):
        routed = met * c.top_k * each
        return routed + shared, routed + shared
    # One block of rows at a time, and sums over a token's experts in float32.
    sums = (4 + itemsize) * met * config.hidden_size
    return sums + shared, 3 * sums + shared


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
) -> tuple[int, int]:
    """Bytes of the sampler's weights on a device, and of the output matrix, which prefill spares.

    Both are 0 where it uses the trainer's buffers.

    Args:
      placed: The trainer's parameters on the mesh.
      mesh: The mesh.
      config: The model.
      rules: How weights are sharded while sampling.
    """
    sampler = shard_parameters(mesh, config, rules)
    if all(s.spec == t.spec and s.itemsize == 4 for s, t in zip(sampler, placed, strict=True)):
        return 0, 0
    each = {p.name: p.shard_size * p.itemsize for p in sampler}
    return sum(each.values()), each.get("output", 0)


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
    heads = max(b.attention.num_heads for b in set(config.layers)) // tensor
    return read + 2 * 4 * slots * (heads * work.length + config.vocab_size // tensor)


def prefill_activations(
    mesh: Mesh | AbstractMesh, config: ModelConfig, work: Work, rules: meshes.Rules
) -> int:
    """Bytes of the temporaries of the largest prefill call: what a layer computes and reads.

    Args:
      mesh: The mesh.
      config: The model.
      work: The sizes of a step.
      rules: How weights are sharded while sampling.
    """
    prompts = -(-work.slots // meshes.batch_shards(mesh))
    tokens = min(work.prefill_tokens, prompts * work.max_prompt_length)
    axes = meshes.axes_of([rules["experts"]])
    itemsize, tensor = compute_itemsize(config), mesh.shape["tensor"]
    each = max(_queries_and_outputs(b.attention) for b in set(config.layers)) // tensor
    inner = max(sum(_feed_forward(b, config, tokens, mesh, axes)[:1]) for b in set(config.layers))
    read = 2 * kv_bytes(config, tokens) // config.num_layers
    return int(3 * hidden_bytes(config, tokens) + itemsize * tokens * each + inner + read)


def _queries_and_outputs(c: Attention | LatentAttention) -> int:
    """Numbers of a token's queries and outputs where keys are kept; latents are met as they are."""
    if isinstance(c, LatentAttention):
        return c.num_heads * (2 * c.kv_rank + c.rope_dim + c.nope_dim + c.value_dim)
    return 2 * c.num_heads * c.head_dim
