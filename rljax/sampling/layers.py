"""Each layer's weights as arrays of their own, sharing memory with the stacked ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.models.config import Block, Dense, LatentAttention, ModelConfig, Stack
from rljax.models.parameters import Params
from rljax.models.transposed import Transposed, transpose_experts, transpose_matrix


def apart(config: ModelConfig) -> ModelConfig:
    """The same model with no two layers stacked, so that they run without a loop."""
    stacks = tuple(Stack(s.pattern * s.repeats, 1) for s in config.stacks)
    return dataclasses.replace(config, stacks=stacks, remat=False)


def views(params: Params, config: ModelConfig) -> Params:
    """The parameters of `apart(config)`.

    On CPU they are the memory of `params` itself: a loop over stacked layers copies each layer's
    weights out of the stack before it multiplies by them. Elsewhere they are copies.
    """
    stacks = [
        [jax.tree.map(lambda x, i=i: _row(x, i), block) for i in range(s.repeats) for block in part]
        for s, part in zip(config.stacks, params["stacks"], strict=True)
    ]
    return {**params, "stacks": stacks}


def _row(x: Any, i: int) -> jax.Array:
    """x[i : i + 1]."""
    if next(iter(x.devices())).platform != "cpu":
        return x[i : i + 1]

    def cut(shard: jax.Array, device: jax.Device) -> jax.Array:
        # Through an array object of its own: numpy's view then dies with it, and while it lives
        # a donated `x` is copied, not overwritten.
        alias = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
        return jax.device_put(np.asarray(alias)[i : i + 1], device, may_alias=True)

    pieces = [cut(s.data, s.device) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays((1, *x.shape[1:]), x.sharding, pieces)


_FEW = 4  # experts, for each that a token uses: so many cost less together than by themselves


def transpose(params: Params, config: ModelConfig) -> Params:
    """The result of `views`, with transposed copies of its matrices.

    Matrices that the same rows go into become one: `qkv`, `gate_up`. A tied embedding is not
    copied: in the product that gives logits it is on the left as it lies. Experts are there twice,
    for few rows and for more; only as they are in mixtures whose tokens use few of them.
    """
    blocks = iter(config.layers)
    stacks = [[_transpose(p, next(blocks)) for p in stack] for stack in params["stacks"]]
    embed = params["embed"]
    tied = config.tie_embeddings
    output = Transposed(embed, embed.shape) if tied else transpose_matrix(params["output"])
    return {**params, "stacks": stacks, "output": output}


_stacked = functools.partial(transpose_matrix, layers=True)


def _transpose(layer: Params, block: Block) -> Params:
    attention, rest = dict(layer["attention"]), dict(layer["feed_forward"])
    if isinstance(block.attention, LatentAttention):
        for name in {"q", "q_down", "q_up", "kv_down"} & attention.keys():
            attention[name] = _stacked(attention[name])
    else:
        together = jnp.concatenate([attention.pop(name) for name in ("q", "k", "v")], axis=2)
        attention["qkv"] = _stacked(together)
    attention["o"] = _stacked(attention["o"], 2)
    if isinstance(block.feed_forward, Dense):
        rest = _transpose_dense(rest)
    else:
        if "shared" in rest:
            rest["shared"] = _transpose_dense(rest["shared"])
        if block.feed_forward.num_experts <= _FEW * block.feed_forward.top_k:
            for name in ("gate", "up", "down"):
                rest[f"{name}_all"] = transpose_experts(rest[name], into=name != "down")
    return {**layer, "attention": attention, "feed_forward": rest}


def _transpose_dense(p: Params) -> Params:
    both = jnp.concatenate([p["gate"], p["up"]], axis=2)
    return {"gate_up": _stacked(both), "down": _stacked(p["down"])}
