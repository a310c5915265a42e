"""Paged attention by our own Triton kernels, for decode steps on GPUs.

A row's tokens are cut into parts that are attended to at the same time, and put together after; the
pages that a block of rows shares are read once for all of its rows and the query heads of a key
head. The cost is that of the tokens there are, not of the width of the page tables.

The kernels see one device's arrays: call them in `shard_map` where rows or heads are spread.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import triton_tools
from rljax_kernels.paged_attention.pages import (
    PageTables,
    Pool,
    own_range,
    shared_range,
    write_tokens,
)
from rljax_kernels.varying import vary_as

_MODULE = "rljax_kernels.paged_attention.triton_kernels"
ATTEND = triton_tools.Kernel(_MODULE, "attend")
MERGE = triton_tools.Kernel(_MODULE, "merge")

WIDEST, WIDEST_LATENT = 256, 640
PROGRAMS = 1024
"""How many programs keep a GPU busy: parts are as many as give that."""
LEAST, MOST = 256, 2048
"""Tokens of a part."""
LOG2_E = math.log2(math.e)


def refuses(asked: Any) -> str | None:
    """Why the kernels do not compute what is asked; None: they do."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it takes bfloat16 and float32, not {asked.dtype}"
    if asked.page_size & (asked.page_size - 1):
        return f"pages hold a power of two of tokens, not {asked.page_size}"
    widest = WIDEST_LATENT if asked.latent else WIDEST
    if max(asked.head_dim, asked.value_dim) > widest:
        return f"heads are at most {widest} wide, not {max(asked.head_dim, asked.value_dim)}"
    if asked.latent and asked.value_dim & (asked.value_dim - 1):
        return f"latents are a power of two wide, not {asked.value_dim}"
    return None


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
    """As `rljax_kernels.paged_attention.paged_attention`; the new tokens are written by XLA."""
    pool = write_tokens(pool, layer, {"k": k, "v": v}, tables, positions, live)
    rows, value_dim = q.shape[0], v.shape[2]
    at = jnp.asarray(layer, jnp.int32).reshape(1)
    given = (q, pool, at, scale, value_dim, window)
    own = _parts(*given, tables.own, own_range(tables, positions, live, window), 1)
    shared = None
    if tables.shared.shape[1]:
        sharing = rows // tables.shared.shape[0]
        places = shared_range(tables, positions, live, window)
        shared = _parts(*given, tables.shared, places, sharing)
    out = _merged(own, shared, sinks, q.dtype)
    return vary_as((q, pool, tables, positions, live), out), pool


def _parts(
    q: Array,
    pool: Pool,
    layer: Array,
    scale: float,
    value_dim: int,
    window: int | None,
    table: Int[Array, "B P"],
    places: tuple[Array, Array],
    sharing: int,
) -> list[Array]:
    """Sums [parts, R, H, dv], greatest scores and weights [parts, R, H] of some pages."""
    (rows, heads, dim), (_, pages, kv, _, page) = q.shape, pool["k"].shape
    latent, columns = "v" not in pool, table.shape[1]
    queries = sharing * heads // kv
    tile, span, warps, stages = _cut(q.dtype, dim, queries, latent)
    blocks, tiles = rows // sharing, -(-queries // tile)
    reach = columns * page
    if window is not None:
        reach = min(reach, window + span)
    part = _part_length(reach, blocks * tiles * kv)
    parts = -(-reach // part)
    piece = min(page, span)
    main = value_dim if latent else max(16, 1 << (dim.bit_length() - 1))
    launch = triton_tools.Launch(
        ATTEND,
        (blocks * tiles, kv, parts),
        (
            jax.ShapeDtypeStruct((parts, rows, heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows, heads), jnp.float32),
            jax.ShapeDtypeStruct((parts, rows, heads), jnp.float32),
        ),
        {
            "ROWS": rows,
            "SHARING": sharing,
            "HEADS": heads,
            "KV_HEADS": kv,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "MAIN": main,
            "REST": _padded(dim - main) if dim > main else 0,
            "VALUES_PADDED": _padded(value_dim),
            "LATENT": latent,
            "PAGE": page,
            "PAGES": pages,
            "COLUMNS": columns,
            "PART": part,
            "TILE": tile,
            "PIECE": piece,
            "PIECES": span // piece,
            "APART": latent and tile == 64,
            "SCALE": scale * LOG2_E,
            "BFLOAT16": pool["k"].dtype == jnp.uint16,
            "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
        },
        warps=warps,
        stages=stages,
    )
    keys = pool["k"]
    return triton_tools.call(launch, q, keys, pool.get("v", keys), layer, table, *places)


def _merged(
    own: list[Array], shared: list[Array] | None, sinks: Array | None, dtype: Any
) -> Float[Array, "R H dv"]:
    parts, rows, heads, value_dim = own[0].shape
    shared_parts = 0 if shared is None else shared[0].shape[0]
    given = jnp.zeros(heads) if sinks is None else sinks
    launch = triton_tools.Launch(
        MERGE,
        (rows * heads,),
        (jax.ShapeDtypeStruct((rows, heads, value_dim), dtype),),
        {
            "HEADS": heads,
            "ROWS_HEADS": rows * heads,
            "PARTS": parts,
            "PADDED": _power_of_two(parts),
            "SHARED_PARTS": shared_parts,
            "SHARED_PADDED": _power_of_two(max(shared_parts, 1)),
            "VALUE_DIM": value_dim,
            "VALUES_PADDED": _padded(value_dim),
            "SINKS": sinks is not None,
        },
        warps=1 if value_dim <= 128 else 4,
        stages=1,
    )
    units = given.astype(jnp.float32) * LOG2_E
    return triton_tools.call(launch, *own, *(own if shared is None else shared), units)[0]


def _cut(dtype: Any, dim: int, queries: int, latent: bool) -> tuple[int, int, int, int]:
    """Queries and tokens of a tile, warps and stages, that fit registers and shared memory."""
    tile = min(max(16, _power_of_two(queries)), 64)
    if dtype == jnp.float32:
        return min(tile, 16), 16 if dim > 128 else 32, 4, 1
    if latent:  # 64 queries take products whose operands need no registers, of Hopper on
        capability = triton_tools.capability()
        tile = min(tile, 64 if capability in (90, 100, 103) else 32 if capability == 80 else 16)
        return tile, 32, 8 if tile > 16 else 4, 2
    if dim > 128:
        return tile, 32, 4, 2
    return tile, 64, 4, 3 if tile < 64 else 2


def _part_length(places: int, programs: int) -> int:
    """Tokens of a part, where so many programs work on each."""
    length = _power_of_two(-(-places * programs // PROGRAMS))
    return min(max(length, LEAST), MOST)


def _power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()


def _padded(width: int) -> int:
    return max(16, _power_of_two(width))


def examples() -> list[triton_tools.Example]:
    """Uses whose kernels the report compiles."""
    found = []
    for name, dtype, heads, kv, dim, value_dim, page, sharing, window in (
        ("paged 64", jnp.bfloat16, 32, 8, 64, 64, 16, 0, None),
        ("paged 128", jnp.bfloat16, 32, 8, 128, 128, 16, 0, None),
        ("paged 128, page 64", jnp.bfloat16, 32, 8, 128, 128, 64, 0, None),
        ("paged 128, shared", jnp.bfloat16, 28, 4, 128, 128, 16, 16, None),
        ("paged 128, window", jnp.bfloat16, 64, 8, 64, 64, 16, 16, 128),
        ("paged 256", jnp.bfloat16, 16, 8, 256, 256, 16, 16, None),
        ("paged latent", jnp.bfloat16, 128, 1, 576, 512, 64, 16, None),
        ("paged 128", jnp.float32, 32, 8, 128, 128, 16, 16, None),
        ("paged latent", jnp.float32, 16, 1, 576, 512, 64, 16, None),
    ):
        rows, pages = 64, 4096
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        held = jnp.uint16 if dtype == jnp.bfloat16 else dtype
        pool = {"k": jax.ShapeDtypeStruct((4, pages, kv, dim, page), held)}
        if value_dim == dim:
            pool["v"] = jax.ShapeDtypeStruct((4, pages, kv, page, dim), held)
        blocks, columns = (rows // sharing, 1024 // page) if sharing else (1, 0)
        tables = PageTables(whole((rows, 4096 // page)), whole((rows,)), whole((blocks, columns)))
        news = shape((rows, kv, dim)), shape((rows, kv, value_dim))
        arguments = (shape((rows, heads, dim)), *news, pool, whole(()), tables, whole((rows,)))
        alive = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        function = functools.partial(run, scale=dim**-0.5, window=window)
        found.append(triton_tools.Example(name, function, (*arguments, alive)))
    return found
