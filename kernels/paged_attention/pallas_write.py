"""Writing new tokens into their pages on TPU, in place.

XLA's scatter would have the pool in another layout than the kernel that reads it, and copy all of
it at every layer. Here only the tiles that hold the new tokens are read and written back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from rljax_kernels.paged_attention.pages import PageTables, Pool
from rljax_kernels.pallas_tools import LANES, interpreted, result, vary_alike

_SUBLANES = 16  # tokens of values that are read and written together: a whole tile of bfloat16


def write_tokens(
    pool: Pool,
    layer: Array | int,
    new: dict[str, Array],
    tables: PageTables,
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
) -> Pool:
    """As `pages.write_tokens`, for pages of a multiple of 128 tokens."""
    place = jnp.where(live, positions - tables.base, 0)
    size = pool["k"].shape[4]
    page = jnp.take_along_axis(tables.own, place[:, None] // size, axis=1, mode="clip")[:, 0]
    # Rows without a token must not touch any page: a page that is read and written back in the
    # meantime would lose its new token.
    order = jnp.argsort(~live, stable=True)
    scalars = [order, page[order], (place % size)[order], jnp.reshape(jnp.asarray(layer), (1,))]
    scalars = [x.astype(jnp.int32) for x in scalars]
    out = dict(pool)
    for name, x in pool.items():
        tokens = new[name].astype(jnp.bfloat16) if x.dtype == jnp.uint16 else new[name]
        *given, count, tokens, x = vary_alike([*scalars, live.sum(), tokens, x])
        out[name] = _write(x, tokens, given, count.astype(jnp.int32), by_lanes=name == "k")
    return out


def _write(x: Array, tokens: Array, scalars: list[Array], count: Array, by_lanes: bool) -> Array:
    """One array of the pool with `count` tokens [R, K, d] written.

    Args:
      x: Keys [layers, pages, K, d, page_size] or values [layers, pages, K, page_size, d].
      tokens: What is new; as columns of keys, or as rows of values.
      scalars: By step: the row, its page and the place in it; and the layer.
      count: Steps.
      by_lanes: Whether they are keys.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    heads, d = tokens.shape[1:]
    tile = LANES if by_lanes else _SUBLANES

    def at_tile(step: Any, rows: Any, pages: Any, places: Any, layers: Any) -> tuple:
        number = jax.lax.div(places[step], tile)
        end = (0, number) if by_lanes else (number, 0)
        return layers[0], pages[step], 0, *end

    def at_row(step: Any, rows: Any, *_: Any) -> tuple:
        return rows[step], 0, 0, 0

    def kernel(
        rows: Any, pages: Any, places: Any, layers: Any, new: Any, old: Any, out: Any
    ) -> None:
        axis = 2 if by_lanes else 1
        shape = (1, 1, tile) if by_lanes else (1, tile, 1)
        place = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        chosen = place == jax.lax.rem(places[pl.program_id(0)], tile)
        fresh = new[0]
        if old.dtype == jnp.uint16:
            fresh = jax.lax.bitcast_convert_type(fresh, jnp.uint16)
        out[0, 0] = jnp.where(chosen, fresh, old[0, 0])

    block = pl.BlockSpec((1, 1, heads, d, tile) if by_lanes else (1, 1, heads, tile, d), at_tile)
    tokens = tokens[..., None] if by_lanes else tokens[:, :, None]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(count,),
            in_specs=[pl.BlockSpec((1, *tokens.shape[1:]), at_row), block],
            out_specs=block,
        ),
        out_shape=result(x.shape, x.dtype, x),
        input_output_aliases={5: 0},
        interpret=interpreted(),
        name="write_tokens",
    )(*scalars, tokens, x)
