"""A critic: a model with a value head, started from the policy's weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rljax import mesh as meshes
from rljax import processes
from rljax.models.config import ModelConfig
from rljax.models.logprobs import Inputs, states_before
from rljax.models.parameters import Params, abstract


def init_critic(params: Params, config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """A critic with the policy's layers and a value head of zeros.

    Args:
      params: The policy's parameters; copied, so that either may be donated.
      config: The model, which the critic shares.
      mesh: Where the parameters lie; the critic's lie alike.

    Returns:
      `{"model": params, "value": [hidden]}`.
    """
    leaves, structure = jax.tree.flatten(params)
    out = None
    if mesh is not None:
        out = tuple(x.sharding for x in leaves), meshes.replicated(mesh)
    build = _builder(config.hidden_size, out)
    copies, value = processes.run_serially(build)(tuple(leaves))
    return {"model": jax.tree.unflatten(structure, copies), "value": value}


@functools.lru_cache(maxsize=16)
def _builder(hidden_size: int, out: Any) -> Callable[[Any], tuple[Any, Array]]:
    """The program of `init_critic`, kept so that equal models do not compile again."""

    def build(leaves: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        return tuple(jnp.copy(x) for x in leaves), jnp.zeros(hidden_size, jnp.float32)

    return jax.jit(build, out_shardings=out)


def abstract_critic(config: ModelConfig) -> Params:
    """Shapes and dtypes of a critic's parameters."""
    value = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
    return {"model": abstract(config), "value": value}


def token_values(
    critic: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    prefix: Int[Array, "B T"] | None = None,
    routing: Int[Array, "B T layers k"] | None = None,
) -> Float[Array, "B T"]:
    """The critic's value before each token.

    Args:
      critic: As `init_critic` makes it.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions; by default each segment counts from 0.
      segments: Packed sequences by number, 0 for padding.
      prefix: The segment that a position sees besides its own; 0 for none.
      routing: Experts to replay, -1 where unset.

    Returns:
      float32 [B, T]; entry t is the value of the state in which the token at t was chosen, 0 for
      the first of a sequence.
    """
    inputs = Inputs(tokens, positions, segments, prefix, routing)
    before, follows, _ = states_before(critic["model"], config, inputs)
    values = jnp.einsum("btd,d->bt", before.astype(jnp.float32), critic["value"])
    return jnp.where(follows, values, 0.0)
