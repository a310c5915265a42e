"""The KV cache: pages in a pool, and the copy of live pages that a chunk of steps works on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import cpu

from rljax.errors import InputError
from rljax.mesh import BATCH_AXES
from rljax.models.config import LatentAttention, ModelConfig
from rljax.models.forward import Attend

Pool = dict[str, Array]
"""`k` [layers, pages, kv_heads, head_dim, page_size] and `v` [layers, pages, kv_heads, page_size,
head_dim] in the compute dtype; bfloat16 as its bits in uint16, since XLA on CPU scatters bfloat16
by converting the whole operand. Keys lie with the tokens last, which a step's scores read in order.

Of latent attention there is only `k`, one head that holds the latent and then the rotary key:
values are the leading part of keys."""

Kept = dict[str, list[Array]]
"""Keys [R, kv_heads, head_dim, S] and values [R, kv_heads, S, head_dim] of R rows, an array for
each layer; in the pool's dtype."""

_MASKED = -1e30


def make_pool(config: ModelConfig, num_pages: int, page_size: int) -> Pool:
    """An empty KV pool.

    Raises:
      ValueError: Layers differ in their KV heads, which one pool cannot hold.
    """
    shapes = {
        (("k",), 1, a.kv_rank + a.rope_dim)
        if isinstance(a, LatentAttention)
        else (("k", "v"), a.num_kv_heads, a.head_dim)
        for a in (block.attention for block in config.layers)
    }
    if len(shapes) > 1:
        raise InputError(
            f"layers differ in (arrays, kv_heads, head_dim) ({sorted(shapes)}); one pool "
            "holds equal layers only"
        )
    names, heads, dim = shapes.pop()
    page = {"k": (heads, dim, page_size), "v": (heads, page_size, dim)}
    return {
        name: _to_bits(jnp.zeros((config.num_layers, num_pages, *page[name]), config.dtype))
        for name in names
    }


def pool_sharding(config: ModelConfig, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Pages split over `BATCH_AXES`, and heads over `tensor` where they divide."""
    heads = jax.eval_shape(lambda: make_pool(config, 1, 1))["k"].shape[2]
    split = "tensor" if heads % mesh.shape["tensor"] == 0 else None
    return NamedSharding(mesh, P(None, BATCH_AXES, split))


def _to_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _values(kept: dict[str, Array], dim: int) -> Array:
    """Values [R, kv_heads, S, dim] of what is kept of one layer."""
    if "v" in kept:
        return _from_bits(kept["v"])
    return _from_bits(kept["k"])[:, :, :dim].swapaxes(2, 3)


def copy_pages(pool: Pool, source: Int[Array, " S"], target: Int[Array, " S"]) -> Pool:
    """Copies pages; a target out of bounds is dropped."""
    return {n: x.at[:, target].set(x[:, source], mode="drop") for n, x in pool.items()}


def _take(pool: Pool, layer: Array | int, table: Int[Array, "R P"]) -> dict[str, Array]:
    """The pages of each row, joined: k [R, kv_heads, head_dim, S], v [R, kv_heads, S, head_dim]."""
    rows, pages = table.shape

    def join(name: str) -> Array:
        # k: [R, P, K, d, page_size], v: [R, P, K, page_size, d]
        x = pool[name].at[layer, table].get(mode="clip")
        if name == "k":
            return x.transpose(0, 2, 3, 1, 4).reshape(rows, *x.shape[2:4], pages * x.shape[4])
        return x.transpose(0, 2, 1, 3, 4).reshape(rows, x.shape[2], -1, x.shape[4])

    return {name: join(name) for name in pool}


def _put(pool: Pool, layer: Array | int, new: dict[str, Array], page: Array, offset: Array) -> Pool:
    """Writes tokens [R, t, kv_heads, head_dim] at their page and offset [R, t] in place."""
    out = dict(pool)
    for name, x in pool.items():
        at = x.at[layer, page, :, :, offset] if name == "k" else x.at[layer, page, :, offset]
        out[name] = at.set(new[name], mode="drop")
    return out


def _clean(kept: dict[str, Array], seen: Bool[Array, "R S"]) -> dict[str, Array]:
    """Zeros the values that no query may see: pages may hold anything, and 0 · NaN is NaN.

    Keys do no harm, unless values are part of them: scores of what is not seen are replaced.
    """
    if "v" in kept:
        return {**kept, "v": jnp.where(seen[:, None, :, None], kept["v"], 0)}
    return {"k": jnp.where(seen[:, None, None, :], kept["k"], 0)}


def attend_kept(
    q: Float[Array, "R t H d"],
    parts: list[tuple[Array, Array, Array]],
    scale: float,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R t H dv"]:
    """Grouped-query attention over keys and values in parts, the softmax in float32.

    Args:
      q: Queries.
      parts: Keys [B, K, d, S], values [B, K, S, dv] and allowed bool [R, t, S] of each part. Where
        B is less than R, each R / B rows in turn read the same keys.
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
        scores.append(jnp.where(allowed[:, None, :, None], s * scale, _MASKED))
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


def paged_attention(
    table: Int[Array, "R P"], positions: Int[Array, "R t"], live: Bool[Array, "R t"]
) -> Attend:
    """Writes the new keys and values into their pages, then attends over all pages of each row.

    Args:
      table: The pages of each row, in order; entries past a row's length may be anything valid.
      positions: Positions of the new tokens.
      live: Which of them exist; others are neither written nor read by anyone.
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
        new = {"k": _to_bits(k), "v": _to_bits(v)}
        pool = _put(pool, layer, new, page, positions % page_size)
        place = jnp.arange(table.shape[1] * page_size)
        last = jnp.max(jnp.where(live, positions, -1), axis=1)
        kept = _clean(_take(pool, layer, table), place <= last[:, None])
        part = (_from_bits(kept["k"]), _values(kept, v.shape[-1]))
        out = attend_kept(q, [(*part, _allowed(place, positions, window))], scale, sinks)
        return out, pool

    return attend


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


def gather_rows(pool: Pool, table: Int[Array, "R P"], filled: Int[Array, " R"]) -> Kept:
    """Copies the pages of each row out of the pool, layer by layer; values past `filled` are 0."""
    layers, page_size = pool["k"].shape[0], pool["k"].shape[4]
    seen = jnp.arange(table.shape[1] * page_size) < filled[:, None]
    each = [_clean(_take(pool, layer, table), seen) for layer in range(layers)]
    return {name: [kept[name] for kept in each] for name in pool}


def scatter_rows(
    pool: Pool, kept: Kept, table: Int[Array, "R P"], place: Int[Array, "R C"], live: Array
) -> Pool:
    """Writes the tokens at the places [R, C] of each row that are live back into their pages."""
    num_pages, page_size = pool["k"].shape[1], pool["k"].shape[4]
    page = jnp.take_along_axis(table, place // page_size, axis=1, mode="clip")
    page = jnp.where(live, page, num_pages)
    rows = jnp.arange(table.shape[0])[:, None]
    for layer in range(pool["k"].shape[0]):
        new = {}
        for name in pool:
            x = kept[name][layer]
            at = x.at[rows, :, :, place] if name == "k" else x.at[rows, :, place]
            new[name] = at.get(mode="clip")  # [R, C, K, d]
        pool = _put(pool, layer, new, page, place % page_size)
    return pool


def row_attention(
    positions: Int[Array, "R 1"], live: Bool[Array, "R 1"], base: Int[Array, " R"], shared: Kept
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
        kept: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        rows = jnp.arange(q.shape[0])
        size = kept["k"][layer].shape[3]
        place = jnp.where(live[:, 0], positions[:, 0] - base, size)  # out of bounds: dropped
        mine = {name: x[layer] for name, x in kept.items()}
        mine["k"] = mine["k"].at[rows, :, :, place].set(_to_bits(k[:, 0]), mode="drop")
        if "v" in mine:
            mine["v"] = mine["v"].at[rows, :, place].set(_to_bits(v[:, 0]), mode="drop")
        own = _allowed(base[:, None] + jnp.arange(size), positions, window)
        parts = [(_from_bits(mine["k"]), _values(mine, v.shape[-1]), own)]
        if shared:
            theirs = {name: x[layer] for name, x in shared.items()}
            place = jnp.arange(theirs["k"].shape[3])
            seen = _allowed(place, positions, window) & (place < base[:, None])[:, None]
            parts.append((_from_bits(theirs["k"]), _values(theirs, v.shape[-1]), seen))
        kept = {n: [*x[:layer], mine[n], *x[layer + 1 :]] for n, x in kept.items()}
        return attend_kept(q, parts, scale, sinks), kept

    return attend
