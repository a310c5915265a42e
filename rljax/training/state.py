"""The trainer's state and its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from rljax import mesh as meshes
from rljax import models
from rljax.config import OptimizerSettings
from rljax.models import ModelConfig, Params


@struct.dataclass
class TrainState:
    """Everything that an update changes; 12 bytes a parameter with AdamW.

    Attributes:
      step: int32, optimizer updates tried (skipped ones included).
      params: float32 master weights.
      opt_state: The optimizer's.
      skipped: int32, updates skipped so far for want of a finite gradient or of any weight.
      skipped_in_row: int32, the last of them without one between.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


def warmed_up(rate: float, steps: int) -> optax.Schedule:
    """A rate that rises linearly over `steps` updates, the first of which is not idle."""
    if steps <= 1:
        return optax.constant_schedule(rate)
    return optax.linear_schedule(rate / steps, rate, steps - 1)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip, with linear warm-up (Loshchilov and Hutter, 2019)."""
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.adamw(
            warmed_up(settings.learning_rate, settings.warmup_steps),
            b1=settings.adam_b1,
            b2=settings.adam_b2,
            weight_decay=settings.weight_decay,
        ),
    )


def create(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A fresh state around float32 weights; moments are laid out like their weights."""

    def build(params: Params) -> TrainState:
        zero = jnp.int32(0)
        return TrainState(zero, params, optimizer.init(params), zero, zero)

    shapes = jax.eval_shape(build, params)
    out = state_shardings(shapes, jax.tree.map(lambda x: x.sharding, params), mesh)
    return jax.jit(build, out_shardings=out)(params)


def abstract(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state's shapes and shardings, to restore a checkpoint into."""

    def build(params: Params) -> TrainState:
        zero = jnp.int32(0)
        return TrainState(zero, params, optimizer.init(params), zero, zero)

    shapes = jax.eval_shape(build, models.abstract(config))
    shardings = state_shardings(shapes, models.shardings(config, mesh), mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def state_shardings(state: TrainState, params: Params, mesh: Mesh) -> TrainState:
    """Shardings of a whole state: parameter-shaped parts like the parameters, the rest whole."""
    whole = meshes.replicated(mesh)
    structure = jax.tree.structure(params)

    def is_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    return jax.tree.map(
        lambda part: params if is_params(part) else jax.tree.map(lambda _: whole, part),
        state,
        is_leaf=is_params,
    )
