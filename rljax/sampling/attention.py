"""Attention of decode and prefill steps over the KV cache: over pages, and over gathered pages.

All of them are `rljax.models.forward.Attend`: they take in new keys and values and attend over
those of each row. They differ in where the keys and values lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import cpu
from rljax_kernels.attention.blocks import vary_as

from rljax.models.forward import Attend
from rljax.sampling.pool import (
    Gathered,
    from_bits,
    put_tokens,
    take_pages,
    to_bits,
    values_of,
    zero_unseen,
)

_HIDDEN_SCORE = -1e30  # of a key that a query may not see; -inf would give NaN where all are hidden

_BLOCK = 512  # tokens of a row whose keys and values are read at once where there are more

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


def _attention(read: Callable[..., tuple[list[Part], Any]]) -> Attend:
    """Attention by a function that takes in new keys and values, and gives the parts to read.

    Args:
      read: (k, v, layer, cache, window) to (parts, cache).
    """

    def attend(
        q: Array,
        k: Array,
        v: Array,
        layer: Array | int,
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        parts, cache = read(k, v, layer, cache, window)
        return attend_parts(q, parts, scale, sinks), cache

    return attend


def paged_attention(
    table: Int[Array, "R P"], positions: Int[Array, "R t"], live: Bool[Array, "R t"]
) -> Attend:
    """Writes the new keys and values into their pages, then attends over all pages of each row.

    Pages of many tokens are read in blocks, with an online softmax: memory then grows with the new
    tokens, not with all that they see, and blocks that none of them sees are not read.

    Args:
      table: The pages of each row, in order; entries past a row's length may be anything valid.
      positions: Positions of the new tokens.
      live: Which of them exist; others are neither written nor read.
    """

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
        num_pages, page_size = pool["k"].shape[1], pool["k"].shape[4]
        page = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
        page = jnp.where(live, page, num_pages)  # out of bounds: dropped
        new = {"k": to_bits(k), "v": to_bits(v)}
        pool = put_tokens(pool, layer, new, page, positions % page_size)
        last = jnp.max(jnp.where(live, positions, -1), axis=1)
        first = jnp.min(jnp.where(live, positions, last[:, None] + 1))

        def read(table: Array, start: Array | int) -> Part:
            place = start + jnp.arange(table.shape[1] * page_size)
            rows = zero_unseen(take_pages(pool, layer, table), place <= last[:, None])
            allowed = _allowed(place, positions, window)
            return from_bits(rows["k"]), values_of(rows, v.shape[-1]), allowed

        if table.shape[1] * page_size <= 2 * _BLOCK:
            return attend_parts(q, [read(table, 0)], scale, sinks), pool
        pages = max(_BLOCK // page_size, 1)
        padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))

        def block(i: Array) -> Part:
            these = jax.lax.dynamic_slice_in_dim(padded, i * pages, pages, axis=1)
            return read(these, i * pages * page_size)

        seen = 0 if window is None else jnp.maximum(first - window + 1, 0)
        most = jnp.maximum(jnp.max(last), 0)
        bounds = seen // (pages * page_size), most // (pages * page_size) + 1
        start = vary_as(jnp.zeros((*q.shape[:3], v.shape[-1])), q, pool, table)
        return _attend_blocks(q, start, block, bounds, scale, sinks), pool

    return attend


def _attend_blocks(
    q: Float[Array, "R t H d"],
    out: Float[Array, "R t H dv"],
    block: Callable[[Array], Part],
    bounds: tuple[Array | int, Array],
    scale: float,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "R t H dv"]:
    """`attend_parts` over the blocks from the first bound on and below the second.

    The softmax is computed online (Milakov and Gimelshein, 2018, arXiv:1805.02867).

    Args:
      q: Queries.
      out: float32 zeros, which vary over the mesh axes over which the result does.
      block: Keys and values of a block, and which of them each query sees.
      bounds: Numbers of blocks.
      scale: Multiplies the scores.
      sinks: As for `attend_parts`.
    """
    rows, t, heads, width = out.shape
    kv = jax.eval_shape(block, jnp.int32(0))[0].shape[1]

    def fold(x: Array) -> Array:
        """[R, t, H, n] to [R, K, t · g, n]: one matmul for each row and KV head."""
        return (
            x.reshape(rows, t, kv, heads // kv, -1).swapaxes(1, 2).reshape(rows, kv, -1, x.shape[3])
        )

    flat, out = fold(q), fold(out)

    def add(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        keys, values, allowed = block(i)
        scores = jnp.matmul(flat, keys, preferred_element_type=jnp.float32) * scale
        scores = scores.reshape(rows, kv, t, -1, keys.shape[-1])
        scores = jnp.where(allowed[:, None, :, None], scores, _HIDDEN_SCORE)
        scores = scores.reshape(*flat.shape[:3], -1)
        above = jnp.maximum(top, scores.max(-1))
        exp, fade = jnp.exp(scores - above[..., None]), jnp.exp(top - above)
        new = jnp.matmul(exp.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return above, total * fade + exp.sum(-1), out * fade[..., None] + new

    top, total = jnp.full_like(out[..., 0], _HIDDEN_SCORE), jnp.zeros_like(out[..., 0])
    if sinks is not None:  # each is a key whose value is 0
        sink = sinks.astype(jnp.float32)[:, None]
        top, total = top * 0 + fold(jnp.broadcast_to(sink, (rows, t, heads, 1)))[..., 0], total + 1
    _, total, out = jax.lax.fori_loop(*bounds, add, (top, total, out))
    out = (out / total[..., None]).reshape(rows, kv, t, -1, width)
    return out.swapaxes(1, 2).reshape(rows, t, heads, width).astype(q.dtype)


def native_attention(
    table: Int[Array, "R P"], positions: Int[Array, " R"], live: Bool[Array, " R"]
) -> Attend:
    """`paged_attention` of one new token a row by `rljax_kernels.cpu`: float32, pages in place.

    Args:
      table: The pages of each row, in order.
      positions: Positions of the new tokens.
      live: Which of them exist.
    """

    def attend(
        q: Array, k: Array, v: Array, layer: Array | int, pool: Any, **how: Any
    ) -> tuple[Array, Any]:
        tokens = cpu.PagedTokens(pool["k"], pool["v"], table, positions, live)
        out, keys, values = cpu.decode_attention(
            q[:, 0], k[:, 0], v[:, 0], tokens, int(layer), **how
        )
        return out[:, None], {"k": keys, "v": values}

    return attend


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

    def read(
        k: Array, v: Array, layer: Array | int, gathered: Any, window: int | None
    ) -> tuple[list[Part], Any]:
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
        return parts, gathered

    return _attention(read)
