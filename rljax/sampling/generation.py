"""Sampling once, without an engine to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.models.config import ModelConfig
from rljax.sampling.decode_rows import bucket
from rljax.sampling.engine import Engine
from rljax.sampling.params import SamplingParams
from rljax.sampling.responses import Response


def generate(
    params: models.Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int] | np.ndarray],
    num_generations: int,
    sampling: SamplingParams,
    seed: int = 0,
    mesh: Mesh | None = None,
    **engine: Any,
) -> list[list[Response]]:
    """Samples once, with an engine made for it; the groups come in the prompts' order.

    Args:
      params: The weights.
      config: The model.
      prompts: Token ids of each.
      num_generations: Samples a prompt.
      sampling: How to draw.
      seed: Part of every random key.
      mesh: Where to run; None: the default device.
      **engine: Further arguments of `Engine`; `slots` and `max_length` fit the call by default.
    """
    longest = max((len(p) for p in prompts), default=1)
    engine.setdefault("max_length", longest + sampling.max_tokens)
    shards = meshes.batch_shards(mesh)
    engine.setdefault("slots", shards * bucket(len(prompts) * num_generations, 1, 64))
    sampler = Engine(config, mesh, **engine)
    sampler.load(params, version=0)
    groups = sampler.generate(prompts, num_generations, sampling, seed)
    return sorted(groups, key=lambda g: g[0].prompt_index)
