"""Attention of rows of packed sequences in training, scoring and prefill: one rule, several ways.

`attention` computes it by the implementation that `OPERATION.choose` picks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float
from rljax_kernels import triton_tools
from rljax_kernels.attention import blocked, cudnn, pallas, reference, ring, splash, triton
from rljax_kernels.attention.reference import MASKED_SCORE
from rljax_kernels.attention.tokens import Tokens, sees, whole_rows
from rljax_kernels.registry import PLATFORMS, Implementation, Operation, platform_here

__all__ = [
    "MASKED_SCORE",
    "OPERATION",
    "RINGS",
    "UNTYPED",
    "Asked",
    "Tokens",
    "asked_of",
    "attention",
    "sees",
    "whole_rows",
]


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
      packed: Whether a row may hold several sequences, or padding elsewhere than at its end.
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
    packed: bool = True


_FEW_SCORES, _FEW_ON_CPU = 2**24, 2**18


def _defer_short(asked: Asked, platform: str) -> str | None:
    """Few scores are faster all at once: there are no loops, and compilation is quicker."""
    scores = asked.rows * asked.heads * asked.queries * asked.keys
    if scores > (_FEW_ON_CPU if platform == "cpu" else _FEW_SCORES):
        return None
    return f"{scores:,} scores are few enough to compute them all at once"


def _defer_small_blocks(asked: Asked, platform: str) -> str | None:
    """Rows shorter than this leave much of a block empty."""
    return None if asked.queries >= 256 else _defer_short(asked, platform)


OPERATION = Operation(
    "attention",
    (
        Implementation("cudnn", ("gpu",), cudnn.run, cudnn.refuses, source="jax.nn, cuDNN"),
        Implementation(
            "triton",
            ("gpu",),
            triton.run,
            triton.refuses,
            triton_tools.missing,
            source="Triton, kernels/attention/triton_kernels.py",
        ),
        Implementation(
            "pallas",
            ("tpu",),
            pallas.run,
            pallas.refuses,
            defers=_defer_small_blocks,
            source="Pallas, kernels/attention/pallas_kernels.py",
        ),
        Implementation(
            "splash",
            ("tpu",),
            splash.run,
            splash.refuses,
            defers=lambda asked, platform: "pallas computes it inside shard_map's checks, too",
            source="JAX's splash attention, jax.experimental.pallas.ops.tpu.splash_attention",
        ),
        Implementation(
            "blocked",
            PLATFORMS,
            blocked.run,
            defers=_defer_short,
            source="plain JAX, after FlashAttention-2 (Dao, 2023, arXiv:2307.08691)",
        ),
        Implementation("reference", PLATFORMS, reference.run, source="plain JAX"),
    ),
    reference="reference",
)
"""The ways to compute attention, in the order in which they are preferred."""

RINGS = {
    "triton": ring.Parts(triton.forward, triton.backward),
    "pallas": ring.Parts(pallas.forward, pallas.backward),
    "blocked": ring.Parts(blocked.forward, blocked.backward),
}
"""The implementations that compute rows split over devices (`ring`), in the order in which they are
preferred."""


UNTYPED = ("splash",)
"""The implementations that do not say over which mesh axes their results differ: `jax.shard_map`
around them needs `check_vma=False`."""


def asked_of(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    *,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    packed: bool = True,
) -> Asked:
    """What a call with these arguments asks for."""
    return Asked(
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
        packed=packed,
    )


def choose(backend: str, asked: Asked, axis: str | None = None) -> Implementation:
    """The implementation that computes what is asked, of rows split over a mesh axis or whole.

    Raises:
      ValueError: The backend is unknown, or does not compute this here.
    """
    if axis is None or backend != "auto":
        found = OPERATION.choose(backend, asked)
        if axis is not None and found.name not in RINGS:
            raise ValueError(
                f"attention by {backend!r}: it needs all keys of a row on one device; use 'auto' "
                f"or {' or '.join(map(repr, RINGS))}"
            )
        return found
    able = [OPERATION.named(name) for name in RINGS]
    return next(i for i in able if i.objection(asked, platform_here()) is None)


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
    axis: str | None = None,
    packed: bool = True,
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
      axis: Inside `shard_map`: the mesh axis over which rows are split. Each device has the
        queries, keys and values of its part, all varying over the same mesh axes; keys go round.
      packed: Whether a row may hold several sequences, or padding elsewhere than at its end; False
        promises that none does, which cuDNN needs to know.

    Returns:
      The output, in q's dtype. Padding (segment 0) gets something finite that must not be used.

    Raises:
      ValueError: The backend is unknown, or does not compute this here.
    """
    keys = queries if keys is None else keys
    asked = asked_of(q, k, v, queries, window=window, sinks=sinks, packed=packed)
    chosen = choose(backend, asked, axis)
    options = {"scale": scale, "window": window, "sinks": sinks}
    if axis is None:
        return chosen.run(q, k, v, queries, keys, **options)
    return ring.run(q, k, v, queries, keys, axis=axis, parts=RINGS[chosen.name], **options)
