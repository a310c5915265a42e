"""The forward pass of every model: embedding, layers, final hidden states, logits.

One function for training, scoring, prefill and decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped
from rljax_kernels.attention import MASKED_SCORE
from rljax_kernels.cpu import Native

from rljax.mesh import BATCH_AXES, axes_of, constrain_rows, fit, map_shards, varies
from rljax.models import pipeline
from rljax.models.attention import Attend, FullAttention, attention
from rljax.models.config import Dense, Experts, ModelConfig, Stack
from rljax.models.layers import dense, enter, rms_norm
from rljax.models.mixture import RouterInputs, RouterOutputs, join_outputs, mixture
from rljax.models.parameters import Params, declare
from rljax.models.pipeline import Layers, Outputs
from rljax.models.remat import checkpointed

UNROLLED = 8  # so few layers run faster one by one than as a loop
EMBED_AXES = ("tensor", "fsdp")
"""The mesh axes that split the embedding where it enters `shard_map`; those of the output matrix
are in the other order."""


def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch D"]:
    """The embeddings of tokens, in the compute dtype."""
    table, rows = params["embed"], fit(tokens.shape, BATCH_AXES, "context")
    laid, _ = enter(table, EMBED_AXES, axes_of(rows))
    local = functools.partial(_embed_part, dtype=config.dtype)
    return map_shards(local, (laid, rows), rows)(table, tokens)


def _embed_part(table: Array, tokens: Array, *, dtype: str) -> Array:
    """`embed` of one device, which has some of the vocabulary and a part of each embedding.

    It looks its part up for the tokens of all devices that have the others, and trades the
    results: activations are fewer than a vocabulary.
    """
    parted, sliced = varies(table, "fsdp"), varies(table, "tensor")
    if parted:
        tokens = jax.lax.all_gather(tokens, "fsdp", tiled=True)
    if sliced:
        tokens = tokens - jax.lax.axis_index("tensor") * table.shape[0]
    found = table[tokens]
    if sliced:
        mine = (tokens >= 0) & (tokens < table.shape[0])
        found = jax.lax.psum(jnp.where(mine[..., None], found, 0), "tensor")
    # Cast after the look-up: the gradients of a token's places then add up in the parameters'
    # dtype, and no second embedding is formed.
    found = found.astype(dtype)
    if parted:
        found = jax.lax.all_to_all(found, "fsdp", 0, found.ndim - 1, tiled=True)
    return found


def output_logits(params: Params, config: ModelConfig, hidden: Array) -> Array:
    """Logits in float32 [..., V] from final hidden states [..., D].

    Inside `shard_map`, V is the device's slice of the vocabulary. Ids without a token
    (`ModelConfig.num_tokens`) get `MASKED_SCORE`.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])  # for the reason given in `matmul`
    if isinstance(params.get("output"), Native):
        flat = params["output"].astype(hidden.dtype).product(flat)
    else:
        # The tied embedding is contracted as it lies: turning it would copy it at every step.
        name, axis = ("embed", 1) if config.tie_embeddings else ("output", 0)
        w = params[name].astype(hidden.dtype)
        flat = jax.lax.dot_general(
            flat,
            w,
            (((1,), (axis,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    if config.num_tokens is not None and config.num_tokens < config.vocab_size:
        ids = jnp.arange(flat.shape[1])
        if flat.shape[1] < config.vocab_size:
            ids = ids + jax.lax.axis_index("tensor") * flat.shape[1]
        flat = jnp.where(ids < config.num_tokens, flat, MASKED_SCORE)
    return flat.reshape(*hidden.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """What layers are told of the tokens, besides their hidden states.

    Attributes:
      positions: int32 [B, T], rotary positions.
      counted: [B, T], whether, or how often, tokens count in the routers' statistics.
      attend: Attention over whatever keys the caller keeps.
    """

    positions: Array
    counted: Array
    attend: Attend


def _run_layers(
    stack: Stack,
    config: ModelConfig,
    layers: Layers,
    x: Array,
    tokens: _Tokens,
    cache: Any,
    layer: int,
) -> tuple[Array, Any, Outputs]:
    """Runs layers of a stack one after the other; the first is the layer-th of the model."""

    def repeat(
        carry: tuple[Array, Any, Array | int], layers: Layers
    ) -> tuple[tuple[Array, Any, Array | int], Outputs]:
        x, cache, layer = carry
        outputs: list[dict[str, Array]] = []
        for i, (block, p) in enumerate(zip(stack.pattern, layers.weights, strict=True)):
            before = block.norms == "before"
            with jax.named_scope("attention"):
                y = rms_norm(x, p["attention_norm"], config.norm_eps) if before else x
                y, cache = attention(
                    p["attention"],
                    y,
                    tokens.positions,
                    block.attention,
                    config.norm_eps,
                    tokens.attend,
                    layer + i,
                    cache,
                )
                y = y if before else rms_norm(y, p["attention_norm"], config.norm_eps)
                x = constrain_rows(x + y)
            with jax.named_scope("feed_forward"):
                y = rms_norm(x, p["feed_forward_norm"], config.norm_eps) if before else x
                if isinstance(block.feed_forward, Dense):
                    y = dense(p["feed_forward"], y)
                else:
                    replay = None if layers.replay is None else layers.replay[len(outputs)]
                    load = None if layers.loads is None else layers.loads[len(outputs)]
                    y, stats = mixture(
                        p["feed_forward"],
                        y,
                        block.feed_forward,
                        config,
                        tokens.counted,
                        replay,
                        load,
                    )
                    outputs.append(stats)
                y = y if before else rms_norm(y, p["feed_forward_norm"], config.norm_eps)
                x = constrain_rows(x + y)
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *outputs) if outputs else None
        return (x, cache, layer + len(stack.pattern)), stacked

    body = checkpointed(repeat, config.remat)
    if layers.count == 1:  # no loop: a cache may then hold an array for each layer
        once = jax.tree.map(lambda a: a[0], layers)
        (x, cache, _), stats = body((x, cache, layer), once)
        return x, cache, jax.tree.map(lambda a: a[None], stats)
    (x, cache, _), stats = jax.lax.scan(
        body,
        (x, cache, jnp.int32(layer)),
        layers,
        unroll=config.remat == "none" and layers.count <= UNROLLED,
    )
    return x, cache, stats


def _run_stage_layers(
    stack: Stack, config: ModelConfig, layers: Layers, x: Array, rows: tuple[Any, ...]
) -> tuple[Array, Outputs]:
    """`_run_layers` in a pipeline, where all that layers are told is split by rows."""
    x, _, stats = _run_layers(stack, config, layers, x, _Tokens(*rows), None, 0)
    return x, stats


def _run_stack(
    stack: Stack,
    declared: list[Params],
    config: ModelConfig,
    layers: Layers,
    x: Array,
    tokens: _Tokens,
    cache: Any,
    layer: int,
) -> tuple[Array, Any, list[dict[str, Array]]]:
    """Runs a stack, as a pipeline as far as the mesh has stages.

    Returns:
      Hidden states, the cache, and the mixtures' outputs, each leaf [layers, ...].
    """
    outputs: list[Outputs] = []
    schedule = pipeline.schedule_here(stack.repeats, x.shape, config)
    if schedule is not None and isinstance(tokens.attend, FullAttention):
        remat = "none" if schedule.recomputed else config.remat
        inner = dataclasses.replace(config, remat=remat)
        rows = (tokens.positions, tokens.counted, tokens.attend)
        piped, layers = pipeline.divide(schedule, layers, declared)
        run = functools.partial(_run_stage_layers, stack, inner)
        x, stats = pipeline.run(schedule, run, piped, x, rows)
        outputs.append(stats)
    if layers.count:
        x, cache, stats = _run_layers(stack, config, layers, x, tokens, cache, layer)
        outputs.append(stats)
    return (
        x,
        cache,
        [
            jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stats)
            for stats in outputs
            if stats is not None
        ],
    )


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    *,
    cache: Any = None,
    counted: Shaped[Array, "B T"] | None = None,
    routers: RouterInputs | None = None,
) -> tuple[Float[Array, "B T D"], Any, RouterOutputs | None]:
    """Runs all layers; attention is the caller's, so that the same code trains and decodes.

    Args:
      params: In the shape of `declare(config)`, in any dtype; cast to the compute dtype at use.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions.
      attend: Attention over whatever keys the caller keeps.
      cache: Carried through the layers and handed to `attend` (never through a scan's outputs,
        which would copy it).
      counted: Whether, or how often, tokens count in the routers' statistics; once by default.
      routers: What the routers are told; nothing by default.

    Returns:
      Final hidden states after the last norm, the cache, and what the routers did (None for a
      dense model).
    """
    x = constrain_rows(embed(params, config, tokens))
    counted = jnp.ones(tokens.shape, bool) if counted is None else counted
    routers = RouterInputs() if routers is None else routers
    told = _Tokens(positions, counted, attend)
    found: list[dict[str, Array]] = []
    layer, first = 0, 0
    for stack, weights, declared in zip(
        config.stacks, params["stacks"], declare(config)["stacks"], strict=True
    ):
        mixtures = sum(isinstance(b.feed_forward, Experts) for b in stack.pattern)
        layers = Layers(weights, *routers.of_stack(first, stack.repeats, mixtures))
        x, cache, outputs = _run_stack(stack, declared, config, layers, x, told, cache, layer)
        found += outputs
        layer += stack.repeats * len(stack.pattern)
        first += stack.repeats * mixtures
    x = rms_norm(x, params["norm"], config.norm_eps)
    return x, cache, join_outputs(found, counted, config.num_experts) if found else None
