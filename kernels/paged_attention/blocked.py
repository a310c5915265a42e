"""Attention over pages by blocks in plain JAX: for decode steps, and for prompts in prefill.

The softmax is computed online (Milakov and Gimelshein, 2018, arXiv:1805.02867) over blocks of
pages, in a loop that ends with the last page that a query sees and begins with the first. So time
follows the tokens that there are, whatever the width of the page table, and memory is that of the
queries times one block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
from rljax_kernels.registry import platform_here
from rljax_kernels.varying import vary_as

_MASKED_SCORE = -1e30  # of a key that is not seen; -inf would give NaN where none is
_MOST_SCORES = 2**26  # of a block, on GPU and TPU


class Sizes(NamedTuple):
    """How queries and pages are cut.

    Attributes:
      queries: Of a row that are worked on together.
      tokens: Of the pages of a block.
      together: Whether all rows are worked on at once; else one after the other.
    """

    queries: int
    tokens: int
    together: bool


def sizes_for(rows: int, queries: int, heads: int, platform: str | None = None) -> Sizes:
    """Sizes that are fast on a platform, for so many queries in each of so many rows.

    On CPU the scores of a block should stay in the cache. Elsewhere larger products are faster, as
    long as the scores of a block are few beside the model's activations.
    """
    if (platform or platform_here()) == "cpu":
        tokens = min(max(queries, 64), 256)
        return Sizes(min(queries, 128), tokens, together=queries == 1)
    tokens = 512
    most = max(_MOST_SCORES // (rows * heads * tokens), 1)
    return Sizes(min(queries, most), tokens, together=True)


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
    rows, blocks = q.shape[0], tables.shared.shape[0]
    attend = functools.partial(_attend, pool, layer, scale=scale, value_dim=v.shape[2])
    start, stop = own_range(tables, positions, live, window)
    parts = [attend(q[:, None], tables.own, start[:, None], stop[:, None])]
    if tables.shared.shape[1]:
        ranges = shared_range(tables, positions, live, window)
        start, stop = (x.reshape(blocks, -1) for x in ranges)
        parts.append(attend(q.reshape(blocks, -1, *q.shape[1:]), tables.shared, start, stop))
    parts = [(out.reshape(rows, *out.shape[2:]), lse.reshape(rows, -1)) for out, lse in parts]
    return merge(parts, sinks).astype(q.dtype), pool


def prompt_attention(
    q: Float[Array, "R T H d"],
    pool: Pool,
    layer: Int[Array, ""] | int,
    table: Int[Array, "R P"],
    positions: Int[Array, "R T"],
    live: Bool[Array, "R T"],
    value_dim: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    sizes: Sizes | None = None,
) -> Float[Array, "R T H dv"]:
    """Causal attention of many tokens a row over the row's pages, which hold theirs already.

    Args:
      q: Queries.
      pool: Keys and values of all layers. Places that no query sees may hold anything.
      layer: The layer that is read.
      table: The pages of each row, in order; entries past its last token may be anything valid.
      positions: Positions of the tokens in their sequences.
      live: Which tokens exist; the output of others is 0.
      value_dim: dv.
      scale: Multiplies the scores.
      window: How many positions back a query sees, its own included; None: all.
      sinks: Logits that take part in the softmax and have no value; None: there are none.
      sizes: How to cut; None: as `sizes_for` says.

    Returns:
      The output, in q's dtype.
    """
    stop = jnp.where(live, positions + 1, 0)
    start = jnp.zeros_like(stop) if window is None else jnp.clip(positions + 1 - window, 0, stop)
    part = _attend(
        pool, layer, q, table, start, stop, scale=scale, value_dim=value_dim, sizes=sizes
    )
    return merge([part], sinks).astype(q.dtype)


def merge(
    parts: list[tuple[Float[Array, "*n dv"], Float[Array, "*n"]]], sinks: Array | None
) -> Float[Array, "*n dv"]:
    """The attention over all parts together, of each part's output and logsumexp, both float32."""
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    total = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
    if sinks is not None:
        total = jnp.logaddexp(total, sinks.astype(jnp.float32))
    return sum(jnp.exp(lse - total)[..., None] * out for out, lse in parts)


def _attend(
    pool: Pool,
    layer: Array | int,
    q: Float[Array, "R T H d"],
    table: Int[Array, "R P"],
    start: Int[Array, "R T"],
    stop: Int[Array, "R T"],
    *,
    scale: float,
    value_dim: int,
    sizes: Sizes | None = None,
) -> tuple[Float[Array, "R T H dv"], Float[Array, "R T H"]]:
    """Output and logsumexp, in float32, of queries that see the places from `start` to `stop`.

    A query that sees nothing gets 0, and `_MASKED_SCORE` as its logsumexp.
    """
    rows, queries, heads, d = q.shape
    kv, page_size = pool["k"].shape[2], pool["k"].shape[4]
    sizes = sizes_for(rows, queries, heads) if sizes is None else sizes
    pages = max(sizes.tokens // page_size, 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    cuts = -(-queries // sizes.queries)
    pad = cuts * sizes.queries - queries

    def cut(x: Array) -> Array:
        """[R, T, ...] to [steps, rows of a step, queries of a step, ...]."""
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(rows, cuts, sizes.queries, *x.shape[2:])
        return x.swapaxes(0, 1) if sizes.together else x.reshape(-1, 1, *x.shape[2:])

    tables = table[None] if sizes.together else jnp.repeat(table, cuts, axis=0)[:, None]
    tables = jnp.broadcast_to(tables, (cuts, *table.shape)) if sizes.together else tables

    def step(given: tuple[Array, ...]) -> tuple[Array, Array]:
        return _attend_block(pool, layer, *given, pages=pages, scale=scale, value_dim=value_dim)

    q = q.reshape(rows, queries, kv, heads // kv, d)
    given = (cut(q), tables, cut(start), cut(stop))
    if len(given[0]) == 1:
        found = jax.tree.map(lambda x: x[None], step(tuple(x[0] for x in given)))
    else:
        found = jax.lax.map(step, given)

    def join(x: Array) -> Array:
        """[steps, rows, K, queries, g, ...] to [R, T, H, ...]."""
        x = jnp.moveaxis(x, 2, 3)  # [steps, rows, queries, K, g, ...]
        x = x.swapaxes(0, 1) if sizes.together else x.reshape(rows, cuts, *x.shape[2:])
        return x.reshape(rows, -1, heads, *x.shape[5:])[:, :queries]

    out, lse = found
    return join(out), join(lse)


def _attend_block(
    pool: Pool,
    layer: Array | int,
    q: Float[Array, "b t K g d"],
    table: Int[Array, "b P"],
    start: Int[Array, "b t"],
    stop: Int[Array, "b t"],
    *,
    pages: int,
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "b K t g dv"], Float[Array, "b K t g"]]:
    """`_attend` of a block of queries of some rows, `pages` pages at a time."""
    b, t, kv, group, d = q.shape
    folded = q.swapaxes(1, 2).reshape(b, kv, t * group, d)
    tokens = pages * pool["k"].shape[4]
    sees = stop > start
    first = jnp.min(jnp.where(sees, start, jnp.iinfo(jnp.int32).max)) // tokens
    last = -(-jnp.max(jnp.where(sees, stop, 0)) // tokens)

    def add(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        places = n * tokens + jnp.arange(tokens)
        seen = (places >= start[:, :, None]) & (places < stop[:, :, None])  # [b, t, tokens]
        some = jax.lax.dynamic_slice_in_dim(table, n * pages, pages, axis=1)
        keys, values = _read(pool, layer, some, seen.any(1), value_dim)
        s = jnp.matmul(folded, keys, preferred_element_type=jnp.float32) * scale
        shown = jnp.repeat(seen, group, axis=1)[:, None]
        s = jnp.where(shown, s, _MASKED_SCORE)
        above = jnp.maximum(top, s.max(-1))
        exp = jnp.where(shown, jnp.exp(s - above[..., None]), 0.0)
        fade = jnp.exp(top - above)
        new = jnp.matmul(exp.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return above, total * fade + exp.sum(-1), out * fade[..., None] + new

    shape = folded.shape[:3]
    carry: Any = (
        jnp.full(shape, _MASKED_SCORE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value_dim), jnp.float32),
    )
    carry = jax.tree.map(lambda x: vary_as((q, pool, table, start), x), carry)
    top, total, out = jax.lax.fori_loop(first, jnp.maximum(first, last), add, carry)
    whole = jnp.where(total > 0, total, 1.0)
    out, lse = out / whole[..., None], top + jnp.log(whole)
    return out.reshape(b, kv, t, group, value_dim), lse.reshape(b, kv, t, group)


def _read(
    pool: Pool,
    layer: Array | int,
    table: Int[Array, "b P"],
    seen: Bool[Array, "b S"],
    value_dim: int,
) -> tuple[Float[Array, "b K d S"], Float[Array, "b K S dv"]]:
    """Keys and values of pages, values as 0 where nothing is seen: 0 · NaN is NaN."""
    keys = pool["k"].at[layer, table].get(mode="clip")  # [b, P, K, d, page_size]
    keys = from_bits(keys.transpose(0, 2, 3, 1, 4).reshape(len(table), *keys.shape[2:4], -1))
    if "v" not in pool:
        values = jnp.where(seen[:, None, None], keys[:, :, :value_dim], 0)
        return keys, values.swapaxes(2, 3)
    values = pool["v"].at[layer, table].get(mode="clip").transpose(0, 2, 1, 3, 4)
    values = from_bits(values.reshape(*values.shape[:2], -1, value_dim))
    return keys, jnp.where(seen[:, None, :, None], values, 0)
