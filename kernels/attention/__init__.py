"""Attention of rows of packed sequences in training, scoring and prefill: one rule, several ways.

`attention` computes it by the implementation that `OPERATION.choose` picks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float
from rljax_kernels.attention import pallas, reference, splash
from rljax_kernels.attention.tokens import Tokens, sees, whole_rows
from rljax_kernels.registry import PLATFORMS, Implementation, Operation

__all__ = ["OPERATION", "Asked", "Tokens", "attention", "sees", "whole_rows"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of `attention` asks for, all of it static.

    Attributes:
      dtype: Of queries, keys and values.
      rows: B.
      queries: T, the queries of a row on this device.
      keys: S, its keys.
      heads: H, of the queries.
      kv_heads: K.
      head_dim: d, of queries and keys.
      value_dim: dv.
      window: How many positions back a query sees; None: all.
      sinks: Whether heads have sinks.
      prefix: Whether sequences share prefixes.
    """

    dtype: str
    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    sinks: bool = False
    prefix: bool = False


OPERATION = Operation(
    "attention",
    (
        Implementation("pallas", ("tpu",), pallas.run, pallas.refuses, source="our own kernels"),
        Implementation(
            "splash",
            ("tpu",),
            splash.run,
            splash.refuses,
            source="JAX's splash attention, jax.experimental.pallas.ops.tpu.splash_attention",
        ),
        Implementation("reference", PLATFORMS, reference.run, source="plain JAX"),
    ),
    reference="reference",
)
"""The ways to compute attention, in the order in which they are preferred."""


def attention(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens | None = None,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    backend: str = "auto",
) -> Float[Array, "B T H dv"]:
    """Grouped-query attention over what `sees` says, the softmax in float32.

    Args:
      q: Queries; all finite, as keys and values have to be.
      k: Keys, each for H / K heads of the queries.
      v: Values; their width may differ from the keys'.
      queries: Where the queries stand.
      keys: Where the keys stand; None: where the queries do.
      scale: Multiplies the scores.
      window: How many positions back a query sees, its own included; None: all.
      sinks: Logits that take part in the softmax and have no value; None: there are none.
      backend: The name of an implementation, or `auto`.

    Returns:
      The output, in q's dtype. Padding (segment 0) gets something finite that must not be used.

    Raises:
      ValueError: The backend is unknown, or does not compute this here.
    """
    asked = Asked(
        dtype=jnp.dtype(q.dtype).name,
        rows=q.shape[0],
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        window=window,
        sinks=sinks is not None,
        prefix=queries.prefix is not None,
    )
    run = OPERATION.choose(backend, asked).run
    keys = queries if keys is None else keys
    return run(q, k, v, queries, keys, scale=scale, window=window, sinks=sinks)
