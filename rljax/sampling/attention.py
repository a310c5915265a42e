"""Attention of decode and prefill steps over the KV cache: over pages, and over gathered pages.

All of them are `rljax.models.forward.Attend`: they take in new keys and values and attend over
those of each row. They differ in where the keys and values lie.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels.paged_attention import OPERATION, PageTables
from rljax_kernels.paged_attention.blocked import prompt_attention
from rljax_kernels.paged_attention.pages import from_bits, to_bits
from rljax_kernels.registry import platform_here

from rljax.mesh import map_shards
from rljax.mesh.activations import split
from rljax.models.forward import Attend
from rljax.sampling.pool import Gathered, put_rows, put_tokens, values_of

_HIDDEN_SCORE = -1e30  # of a key that a query may not see; -inf would give NaN where all are hidden

Part = tuple[Array, Array, Array]
"""Keys [B, K, d, S], values [B, K, S, dv] and allowed bool [R, t, S]: what R queries read together.
Where B is less than R, each R / B rows in turn read the same keys."""


def attend_parts(
    q: Float[Array, "R t H d"],
    parts: list[Part],
    scale: float,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R t H dv"]:
    """Grouped-query attention over keys and values in parts, the softmax in float32.

    Args:
      q: Queries.
      parts: What they read; the softmax goes over all parts together.
      scale: Multiplies the scores.
      sinks: Logits that take part in the softmax and have no value; None: there are none.
    """
    rows, t, heads, _ = q.shape

    def fold(x: Array, blocks: int, kv: int) -> Array:
        """[R, K, t, g, n] to [B, K, R / B · t · g, n]: one matmul for each block and KV head."""
        x = x.reshape(blocks, rows // blocks, kv, -1, x.shape[-1])
        return x.swapaxes(1, 2).reshape(blocks, kv, -1, x.shape[-1])

    def unfold(x: Array) -> Array:
        blocks, kv = x.shape[:2]
        x = x.reshape(blocks, kv, rows // blocks, -1, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(rows, kv, t, -1, x.shape[-1])

    kv = parts[0][0].shape[1]
    q = q.reshape(rows, t, kv, heads // kv, -1).swapaxes(1, 2)
    scores = []
    for keys, _, allowed in parts:
        folded = fold(q, keys.shape[0], kv)
        s = unfold(jnp.matmul(folded, keys, preferred_element_type=jnp.float32))
        scores.append(jnp.where(allowed[:, None, :, None], s * scale, _HIDDEN_SCORE))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv, 1, -1, 1)
        scores.append(jnp.broadcast_to(sink, (*scores[0].shape[:-1], 1)))
    probs = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out, start = jnp.float32(0), 0
    for _, values, allowed in parts:
        p = probs[..., start : start + allowed.shape[-1]].astype(values.dtype)
        start += allowed.shape[-1]
        out = out + unfold(jnp.matmul(fold(p, values.shape[0], kv), values))
    return out.swapaxes(1, 2).reshape(rows, t, heads, -1).astype(q.dtype)


def _allowed(place: Array, positions: Array, window: int | None) -> Array:
    """Which places [R, S] or [S] the queries at positions [R, t] see: bool [R, t, S]."""
    back = positions[:, :, None] - (place[:, None] if place.ndim > 1 else place)
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def prefill_attention(
    table: Int[Array, "R P"], positions: Int[Array, "R t"], live: Bool[Array, "R t"]
) -> Attend:
    """Writes new keys and values into their pages, then attends over the pages of each row.

    Both go by the tokens that there are, so that a page table may be as wide as it likes. Rows may
    be parts of one sequence that follow each other: all of them are written before any is read.

    Args:
      table: The pages of each row, in order; entries past a row's length may be anything valid.
      positions: Positions of the new tokens, which follow each other.
      live: Which of them exist, the first ones of a row; others are neither written nor read, and
        their output is 0.
    """

    def attend(
        q: Array, k: Array, v: Array, layer: Array | int, pool: Any, **how: Any
    ) -> tuple[Array, Any]:
        new = {"k": to_bits(k), "v": to_bits(v)}
        if platform_here() == "tpu":
            pool = put_rows(pool, layer, new, table, positions[:, 0], live.sum(1))
        else:
            num_pages, page_size = pool["k"].shape[1], pool["k"].shape[4]
            page = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
            page = jnp.where(live, page, num_pages)  # out of bounds: dropped
            pool = put_tokens(pool, layer, new, page, positions % page_size)
        out = prompt_attention(q, pool, layer, table, positions, live, v.shape[-1], **how)
        return out, pool

    return attend


def decode_attention(
    tables: PageTables, positions: Int[Array, " R"], live: Bool[Array, " R"], backend: str
) -> Attend:
    """Attention of one new token a row over its pages, by `rljax_kernels.paged_attention`.

    Heads are computed where the mesh axis `tensor` has them.

    Args:
      tables: The pages of each row.
      positions: Positions of the new tokens.
      live: Which of them exist; others are not written, and their output is 0.
      backend: The name of an implementation that computes what the model asks for here.
    """
    run = OPERATION.named(backend).run

    def attend(
        q: Array,
        k: Array,
        v: Array,
        layer: Array | int,
        pool: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        def local(
            q: Array, k: Array, v: Array, pool: Any, tables: PageTables, rows: Any, sinks: Any
        ) -> tuple[Array, Any]:
            positions, live, traced = rows
            at = layer if traced is None else traced
            return run(
                q, k, v, pool, at, tables, positions, live, scale=scale, window=window, sinks=sinks
            )

        rows = (positions, live, None if isinstance(layer, int) else layer)
        heads, keys = (P(None, axis) for axis in head_axes(q.shape[2], k.shape[2]))
        laid = {name: P(None, *keys) for name in pool}
        of_heads = None if sinks is None else P(*heads[1:])
        specs = (heads, keys, keys, laid, P(), P(), of_heads)
        shards = map_shards(local, specs, (heads, laid))
        out, pool = shards(q[:, 0], k[:, 0], v[:, 0], pool, tables, rows, sinks)
        return out[:, None], pool

    return attend


def head_axes(heads: int, kv_heads: int) -> tuple[str | None, str | None]:
    """The mesh axis that splits the heads of queries, and that of keys; None: they are whole.

    The heads of queries lie where their keys are, which all devices have of latent attention.
    """
    if not split("tensor"):
        return None, None
    devices = jax.sharding.get_abstract_mesh().shape["tensor"]
    keys = "tensor" if kv_heads % devices == 0 else None
    return ("tensor" if keys or (kv_heads == 1 and heads % devices == 0) else None), keys


def gathered_attention(
    positions: Int[Array, "R 1"],
    live: Bool[Array, "R 1"],
    base: Int[Array, " R"],
    shared: Gathered,
) -> Attend:
    """Attention of one new token a row over the row's own keys and those its block shares.

    Args:
      positions: Positions of the new tokens.
      live: Which of them exist; others are not written.
      base: How many tokens each row reads from what its block shares; its own follow them.
      shared: Keys and values of blocks of rows; empty where nothing is shared.
    """

    def attend(
        q: Array,
        k: Array,
        v: Array,
        layer: Array | int,
        gathered: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        rows = jnp.arange(k.shape[0])
        size = gathered["k"][layer].shape[3]
        place = jnp.where(live[:, 0], positions[:, 0] - base, size)  # out of bounds: dropped
        own = {name: x[layer] for name, x in gathered.items()}
        own["k"] = own["k"].at[rows, :, :, place].set(to_bits(k[:, 0]), mode="drop")
        if "v" in own:
            own["v"] = own["v"].at[rows, :, place].set(to_bits(v[:, 0]), mode="drop")
        allowed = _allowed(base[:, None] + jnp.arange(size), positions, window)
        parts = [(from_bits(own["k"]), values_of(own, v.shape[-1]), allowed)]
        if shared:
            block = {name: x[layer] for name, x in shared.items()}
            place = jnp.arange(block["k"].shape[3])
            seen = _allowed(place, positions, window) & (place < base[:, None])[:, None]
            parts.append((from_bits(block["k"]), values_of(block, v.shape[-1]), seen))
        gathered = {n: [*x[:layer], own[n], *x[layer + 1 :]] for n, x in gathered.items()}
        return attend_parts(q, parts, scale, sinks), gathered

    return attend
