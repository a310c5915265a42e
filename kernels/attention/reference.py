"""Attention with all scores at once: plain, exact, for short rows and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from rljax_kernels.attention.tokens import Tokens, sees

MASKED_SCORE = -1e30
"""The score of a key that a query must not see: finite, so that a query without any keys gives no
NaN."""


def run(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H dv"]:
    """As `rljax_kernels.attention.attention`; the scores of all queries exist at once."""
    return attend_masked(q, k, v, sees(queries, keys, window), scale, sinks)


def attend_masked(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    allowed: Bool[Array, "B T S"],
    scale: float,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H dv"]:
    """Attention over what a mask allows; a query with nothing gets a mean of all values."""
    b, t, h, d = q.shape
    kv = k.shape[2]
    # A key head's queries become the rows of one plain matrix: XLA's CPU matmuls are twice as
    # fast so, forwards and backwards.
    rows = q.reshape(b, t, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, d)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("bkrd,bksd->bkrs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv, h // kv, t, -1)
    scores = jnp.where(allowed[:, None, None], scores * scale, MASKED_SCORE)
    if sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(kv, h // kv, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    probs = probs.astype(v.dtype).reshape(b, kv, rows.shape[2], -1)
    out = jnp.einsum("bkrs,bksd->bkrd", probs, v).reshape(b, kv, h // kv, t, -1)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)
