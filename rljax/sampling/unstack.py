"""Each layer's weights as arrays of their own, sharing memory with the stacked ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from rljax_kernels.cpu import Native

from rljax.models.config import ModelConfig, Stack
from rljax.models.parameters import Params


def unstack_config(config: ModelConfig) -> ModelConfig:
    """The same model with no two layers stacked, so that they run without a loop."""
    stacks = tuple(Stack(s.pattern * s.repeats, 1) for s in config.stacks)
    return dataclasses.replace(config, stacks=stacks, remat="none")


def unstack_params(params: Params, config: ModelConfig) -> Params:
    """The parameters of `unstack_config(config)`.

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


_PRODUCTS = {"q", "k", "v", "o", "q_down", "q_up", "kv_down", "gate", "up", "down"}


def with_kernels(params: Params, config: ModelConfig) -> Params:
    """The result of `unstack_params`, its dense products to be made by `rljax_kernels.cpu`.

    They are the memory of `params` itself. Experts' are left to the model's `expert_backend`.
    """

    def mark(part: Params) -> Params:
        if "router" in part:
            shared = {name: mark(part[name]) for name in {"shared"} & part.keys()}
            return {**part, **shared}
        return {name: Native(x) if name in _PRODUCTS else x for name, x in part.items()}

    stacks = [
        [{k: mark(x) if isinstance(x, dict) else x for k, x in block.items()} for block in stack]
        for stack in params["stacks"]
    ]
    tied = config.tie_embeddings
    output = Native(params["embed"], transposed=True) if tied else Native(params["output"])
    return {**params, "stacks": stacks, "output": output}
