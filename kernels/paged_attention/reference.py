"""Paged attention with the pages copied out of the pool: plain, exact, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels.paged_attention.pages import (
    PageTables,
    Pool,
    from_bits,
    own_range,
    shared_range,
    write_tokens,
)

MASKED_SCORE = -1e30
"""The score of a key that is not seen: finite, so that a row without any keys gives no NaN."""


def run(
    q: Float[Array, "R H d"],
    k: Float[Array, "R K d"],
    v: Float[Array, "R K dv"],
    pool: Pool,
    layer: Int[Array, ""] | int,
    tables: PageTables,
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "R H dv"], Pool]:
    """As `rljax_kernels.paged_attention.paged_attention`."""
    pool = write_tokens(pool, layer, {"k": k, "v": v}, tables, positions, live)
    (rows, heads, _), kv = q.shape, k.shape[1]
    start, stop = own_range(tables, positions, live, window)
    parts = [(tables.own, start, stop)]
    if tables.shared.shape[1]:
        parts.append((tables.shared, *shared_range(tables, positions, live, window)))
    scores, values = [], []
    for table, start, stop in parts:
        keys, vals = _gather(pool, layer, table, v.shape[2])
        s = jnp.matmul(_fold(q, len(keys), kv), keys, preferred_element_type=jnp.float32)
        places = jnp.arange(keys.shape[3])
        seen = (places >= start[:, None]) & (places < stop[:, None])
        scores.append(jnp.where(seen[:, None], _unfold(s, rows) * scale, MASKED_SCORE))
        # Pages may hold anything, and 0 · NaN is NaN.
        read = seen.reshape(len(keys), -1, seen.shape[1]).any(1)
        values.append(jnp.where(read[:, None, :, None], vals, 0))
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[:, None]
        scores.append(jnp.broadcast_to(sink, (rows, heads, 1)))
    probs = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out, first = jnp.float32(0), 0
    for vals in values:
        p = probs[..., first : first + vals.shape[2]].astype(vals.dtype)
        first += vals.shape[2]
        part = jnp.matmul(_fold(p, len(vals), kv), vals, preferred_element_type=jnp.float32)
        out = out + _unfold(part, rows)
    return jnp.where(live[:, None, None], out, 0).astype(q.dtype), pool


def _fold(x: Float[Array, "R H m"], blocks: int, kv: int) -> Float[Array, "B K r m"]:
    """What each block of rows and key head multiply as one matrix: r = R / B · H / K."""
    x = x.reshape(blocks, x.shape[0] // blocks, kv, x.shape[1] // kv, -1)
    return x.swapaxes(1, 2).reshape(blocks, kv, -1, x.shape[-1])


def _unfold(x: Float[Array, "B K r m"], rows: int) -> Float[Array, "R H m"]:
    """The inverse of `_fold`."""
    blocks, kv, _, size = x.shape
    return x.reshape(blocks, kv, rows // blocks, -1, size).swapaxes(1, 2).reshape(rows, -1, size)


def _gather(
    pool: Pool, layer: Array | int, table: Int[Array, "B P"], value_dim: int
) -> tuple[Array, Array]:
    """Keys [B, K, d, S] and values [B, K, S, dv] of pages."""
    keys = from_bits(pool["k"].at[layer, table].get(mode="clip"))  # [B, P, K, d, page_size]
    keys = keys.transpose(0, 2, 3, 1, 4).reshape(table.shape[0], *keys.shape[2:4], -1)
    if "v" not in pool:
        return keys, keys[:, :, :value_dim].swapaxes(2, 3)
    values = from_bits(pool["v"].at[layer, table].get(mode="clip"))  # [B, P, K, page_size, dv]
    values = values.transpose(0, 2, 1, 3, 4)
    return keys, values.reshape(*values.shape[:2], -1, value_dim)
