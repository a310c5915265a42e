"""Each layer's weights as arrays of their own, sharing memory with the stacked ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rljax.models.config import Dense, Experts, ModelConfig, Stack
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


_CONTRACTED = {"q": 1, "k": 1, "v": 1, "o": 2, "q_down": 1, "q_up": 1, "kv_down": 1}
"""How many dimensions each matrix of attention contracts."""
_FEW = 4  # experts, for each that a token uses: so many cost less together than by themselves


def transpose(params: Params, config: ModelConfig) -> Params:
    """The result of `views`, with transposed copies of its matrices.

    A tied embedding is not copied: in the product that gives logits it is on the left as it lies.
    Experts stay as they are in mixtures whose tokens use few of them.
    """
    blocks = iter(config.layers)
    stacks = [[_transpose(p, next(blocks).feed_forward) for p in s] for s in params["stacks"]]
    embed = params["embed"]
    tied = config.tie_embeddings
    output = Transposed(embed, embed.shape) if tied else transpose_matrix(params["output"])
    return {**params, "stacks": stacks, "output": output}


_stacked = functools.partial(transpose_matrix, layers=True)


def _transpose(layer: Params, feed_forward: Dense | Experts) -> Params:
    attention, rest = layer["attention"], layer["feed_forward"]
    attention = {
        name: transpose_matrix(w, _CONTRACTED[name], layers=True) if name in _CONTRACTED else w
        for name, w in attention.items()
    }
    if isinstance(feed_forward, Dense):
        rest = jax.tree.map(_stacked, rest)
    else:
        rest = dict(rest)
        if "shared" in rest:
            rest["shared"] = jax.tree.map(_stacked, rest["shared"])
        if feed_forward.num_experts <= _FEW * feed_forward.top_k:
            for name in ("gate", "up", "down"):
                rest[f"{name}_all"] = transpose_experts(rest[name], into=name != "down")
    return {**layer, "attention": attention, "feed_forward": rest}
