"""The KV cache: pages in a pool, and the pages of a chunk's rows gathered out of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int
from rljax_kernels.paged_attention.pages import Pool, from_bits, to_bits

from rljax.errors import InputError
from rljax.mesh import BATCH_AXES
from rljax.models.config import LatentAttention, ModelConfig

_IN_ORDER = Layout((0, 1, 2, 3, 4))

Gathered = dict[str, list[Array]]
"""Keys [R, kv_heads, head_dim, S] and values [R, kv_heads, S, head_dim] of R rows, an array for
each layer; in the pool's dtype."""


def make_pool(config: ModelConfig, num_pages: int, page_size: int) -> Pool:
    """An empty KV pool: keys and values in the compute dtype, see `Pool`.

    bfloat16 lies in it as bits, since XLA on CPU scatters bfloat16 by converting the whole operand.
    Keys lie with the tokens last, which a step's scores read in order. Of latent attention there is
    only `k`, one head that holds the latent and then the rotary key.

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
        name: to_bits(jnp.zeros((config.num_layers, num_pages, *page[name]), config.dtype))
        for name in names
    }


def pool_sharding(config: ModelConfig, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Pages split over `BATCH_AXES`, and heads over `tensor` where they divide."""
    heads = jax.eval_shape(lambda: make_pool(config, 1, 1))["k"].shape[2]
    split = "tensor" if heads % mesh.shape["tensor"] == 0 else None
    return NamedSharding(mesh, P(None, BATCH_AXES, split))


def values_of(layer: dict[str, Array], dim: int) -> Array:
    """Values [R, kv_heads, S, dim] of one layer of what was gathered."""
    if "v" in layer:
        return from_bits(layer["v"])
    return from_bits(layer["k"])[:, :, :dim].swapaxes(2, 3)


def copy_pages(pool: Pool, source: Int[Array, " S"], target: Int[Array, " S"]) -> Pool:
    """Copies pages; a target out of bounds is dropped."""
    return {n: x.at[:, target].set(x[:, source], mode="drop") for n, x in pool.items()}


def take_pages(pool: Pool, layer: Array | int, table: Int[Array, "R P"]) -> dict[str, Array]:
    """The pages of each row, joined: k [R, kv_heads, head_dim, S], v [R, kv_heads, S, head_dim]."""
    rows, pages = table.shape

    def join(name: str) -> Array:
        # k: [R, P, K, d, page_size], v: [R, P, K, page_size, d]
        x = pool[name].at[layer, table].get(mode="clip")
        if name == "k":
            return x.transpose(0, 2, 3, 1, 4).reshape(rows, *x.shape[2:4], pages * x.shape[4])
        return x.transpose(0, 2, 1, 3, 4).reshape(rows, x.shape[2], -1, x.shape[4])

    return {name: join(name) for name in pool}


def put_tokens(
    pool: Pool, layer: Array | int, new: dict[str, Array], page: Array, offset: Array
) -> Pool:
    """Writes tokens [R, t, kv_heads, head_dim] at their page and offset [R, t] in place."""
    out = dict(pool)
    for name, x in pool.items():
        at = x.at[layer, page, :, :, offset] if name == "k" else x.at[layer, page, :, offset]
        out[name] = at.set(new[name], mode="drop")
    return out


def put_rows(
    pool: Pool, layer: Array | int, new: dict[str, Array], table: Array, start: Array, count: Array
) -> Pool:
    """Writes the first `count` [R] of tokens [R, t, kv_heads, head_dim], which follow each other.

    As `put_tokens` does, but page by page: the scatter of single tokens has another layout on TPU
    than all that reads the pool, which is then copied as a whole.

    Args:
      pool: The KV pool.
      layer: Of the tokens.
      new: Their keys and values, as they lie in the pool.
      table: int32 [R, P], the pages of each row.
      start: int32 [R], the position of the first token.
      count: int32 [R], tokens that there are.
    """
    page_size, tokens = pool["k"].shape[4], new["k"].shape[1]
    most = -(-tokens // page_size) + 1  # pages that a row's tokens touch
    first = start // page_size
    # The token of each place of these pages.
    at = jnp.arange(most * page_size) - (start - first * page_size)[:, None]
    fresh = ((at >= 0) & (at < count[:, None])).reshape(-1, most, page_size)
    at = jnp.clip(at, 0, tokens - 1).reshape(-1, most, page_size)

    def write(i: Array, pool: Pool) -> Pool:
        row, turn = i // most, i % most
        page = table[row, jnp.minimum(first[row] + turn, table.shape[1] - 1)]
        out = dict(pool)
        for name, x in pool.items():
            mine = new[name][row][at[row, turn]]  # [page_size, K, d]
            mine = mine.transpose((1, 2, 0) if name == "k" else (1, 0, 2))[None, None]
            kept = fresh[row, turn] if name == "k" else fresh[row, turn][:, None]
            place = (layer, page, 0, 0, 0)
            old = jax.lax.dynamic_slice(x, place, mine.shape)
            mine = with_layout_constraint(jnp.where(kept, mine, old), _IN_ORDER)
            changed = jax.lax.dynamic_update_slice(x, mine, place)
            out[name] = with_layout_constraint(changed, _IN_ORDER)
        return out

    return jax.lax.fori_loop(0, table.shape[0] * most, write, pool)


def zero_unseen(layer: dict[str, Array], seen: Bool[Array, "R S"]) -> dict[str, Array]:
    """Zeros the values that no query may see: pages may hold anything, and 0 · NaN is NaN.

    Keys do no harm, unless values are part of them: scores of what is not seen are replaced.
    """
    if "v" in layer:
        return {**layer, "v": jnp.where(seen[:, None, :, None], layer["v"], 0)}
    return {"k": jnp.where(seen[:, None, None, :], layer["k"], 0)}


def gather_pages(pool: Pool, table: Int[Array, "R P"], filled: Int[Array, " R"]) -> Gathered:
    """Copies the pages of each row out of the pool, layer by layer; values past `filled` are 0."""
    layers, page_size = pool["k"].shape[0], pool["k"].shape[4]
    seen = jnp.arange(table.shape[1] * page_size) < filled[:, None]
    each = [zero_unseen(take_pages(pool, layer, table), seen) for layer in range(layers)]
    return {name: [layer[name] for layer in each] for name in pool}


def scatter_tokens(
    pool: Pool, gathered: Gathered, table: Int[Array, "R P"], place: Int[Array, "R C"], live: Array
) -> Pool:
    """Writes the tokens at the places [R, C] of each row that are live back into their pages."""
    num_pages, page_size = pool["k"].shape[1], pool["k"].shape[4]
    page = jnp.take_along_axis(table, place // page_size, axis=1, mode="clip")
    page = jnp.where(live, page, num_pages)
    rows = jnp.arange(table.shape[0])[:, None]
    for layer in range(pool["k"].shape[0]):
        new = {}
        for name in pool:
            x = gathered[name][layer]
            at = x.at[rows, :, :, place] if name == "k" else x.at[rows, :, place]
            new[name] = at.get(mode="clip")  # [R, C, K, d]
        pool = put_tokens(pool, layer, new, page, place % page_size)
    return pool
