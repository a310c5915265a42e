"""Paged attention on TPU by our own Pallas kernel, over the pages themselves.

JAX's ragged paged attention takes keys and values interleaved, [pages, page_size, 2 K, d], of one
layer, and its paged attention [K, pages, page_size, d]; neither has sinks, values of another width
or pages that several rows share. Here keys lie with their tokens last, in one pool for all layers.

A step of the kernel attends over a few pages of all heads of one row, or of a block of rows over
pages that they share, so that those are read once. Only pages that some query sees are visited, by
a list made before. The results of both parts, and the sinks, are merged by their logsumexp.
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
    own_range,
    shared_range,
)
from rljax_kernels.paged_attention.pallas_write import write_tokens
from rljax_kernels.pallas_tools import (
    LANES,
    VMEM_BYTES,
    dot,
    interpreted,
    result,
    spread,
    vary_alike,
)

_LOWEST = -1e30
_STEP_BYTES = 2**20  # of keys and values that a step reads: enough to hide what a step costs
_MOST_PAGES = 8  # of a step: each is an operand of its own
_FIRST, _LAST, _SEEN = 1, 2, 4


class _Call(NamedTuple):
    """What is fixed when the kernel is compiled: heads and pages of a step, and more."""

    scale: float
    heads: int
    pages: int
    page_size: int
    value_dim: int
    latent: bool


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (`rljax_kernels.paged_attention.Asked`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    if asked.page_size % LANES:
        return f"it needs pages of a multiple of {LANES} tokens, not {asked.page_size}"
    if asked.value_dim % LANES and not asked.latent:
        # A copy of the pool in this layout holds them padded.
        return f"it needs values of a multiple of {LANES} numbers, not {asked.value_dim}"
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
    """As `rljax_kernels.paged_attention.paged_attention`."""
    pool = write_tokens(pool, layer, {"k": k, "v": v}, tables, positions, live)
    rows, d, kv, value_dim = q.shape[0], q.shape[2], k.shape[1], v.shape[2]
    attend = functools.partial(_attend, pool=pool, layer=layer, scale=scale, value_dim=value_dim)
    ranges = own_range(tables, positions, live, window)
    parts = [attend(q.reshape(rows, 1, kv, -1, d), tables.own, ranges)]
    if tables.shared.shape[1]:
        blocks = tables.shared.shape[0]
        ranges = shared_range(tables, positions, live, window)
        parts.append(attend(q.reshape(blocks, rows // blocks, kv, -1, d), tables.shared, ranges))
    total = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
    if sinks is not None:
        total = jnp.logaddexp(total, sinks.astype(jnp.float32))
    out = sum(jnp.exp(lse - total)[..., None] * out for out, lse in parts)
    return jnp.where(live[:, None, None], out, 0).astype(q.dtype), pool


def _attend(
    q: Array,
    table: Array,
    ranges: tuple[Array, Array],
    *,
    pool: Pool,
    layer: Array | int,
    scale: float,
    value_dim: int,
) -> tuple[Array, Array]:
    """Attention of blocks of rows [B, n, K, g, d] over the pages of each block.

    Returns float32 outputs [R, H, dv] and the logarithms of the softmax's sums [R, H].
    """
    blocks, n, kv, group, d = q.shape
    start, stop = (x.reshape(blocks, n) for x in ranges)
    call = _plan(pool, kv, table.shape[1], scale, value_dim)
    most = blocks * -(-table.shape[1] // call.pages)
    steps, low, high, count = _list_steps(start, stop, call.pages * call.page_size, most)
    folded = q.transpose(0, 2, 1, 3, 4).reshape(blocks, kv, n * group, d)
    seen = jnp.repeat(jnp.stack([start, stop], axis=-1), group, axis=1)
    at = jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))
    pages = table.reshape(-1).astype(jnp.int32)
    alike = vary_alike([steps, low, high, pages, at, count, folded, seen, *pool.values()])
    scalars, (count, folded, seen), pool_arrays = alike[:5], alike[5:8], alike[8:]
    arrays = [folded, seen] + [x for x in pool_arrays for _ in range(call.pages)]
    out, lse = _kernel_call(call, table.shape[1], count, arrays)(*scalars, *arrays)

    def unfold(x: Array) -> Array:
        x = x.reshape(blocks, kv, n, group, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(blocks * n, kv * group, -1)

    return unfold(out), unfold(lse[..., :1])[..., 0]


def _plan(pool: Pool, kv: int, most: int, scale: float, value_dim: int) -> _Call:
    """Half of the heads for each of a chip's two cores, and pages for `_STEP_BYTES`."""
    heads = kv // 2 if kv % 2 == 0 else kv
    each = sum(x[0, 0].size * x.dtype.itemsize for x in pool.values()) * heads // kv
    pages = max(1, min(_STEP_BYTES // each, _MOST_PAGES, most))
    return _Call(scale, heads, pages, pool["k"].shape[4], value_dim, "v" not in pool)


def _list_steps(
    start: Int[Array, "B n"], stop: Int[Array, "B n"], tokens: int, most: int
) -> tuple[Array, Array, Array, Array]:
    """The steps of `tokens` places each: block · 2^16 + number · 2^3 + flags.

    With them the first place that a block sees and the one past its last, and how many steps there
    are; a block that sees nothing has one, too.
    """
    sees = stop > start
    high = jnp.where(sees, stop, 0).max(1)
    low = jnp.minimum(jnp.where(sees, start, 2**30).min(1), high)
    first = low // tokens
    takes = jnp.where(high > low, (high - 1) // tokens - first + 1, 1)
    block, turn, count = spread(takes, most)
    flags = jnp.where(turn == 0, _FIRST, 0) + jnp.where(turn == takes[block] - 1, _LAST, 0)
    flags += jnp.where(high > low, _SEEN, 0)[block]
    return (block << 16) + ((first[block] + turn) << 3) + flags, low, high, count


def _kernel_call(call: _Call, table: int, count: Array, arrays: list[Array]) -> Any:
    """The kernel, over (half of the heads, step).

    Args:
      call: What is fixed.
      table: Pages of a block's table.
      count: Steps.
      arrays: Queries, the range that each sees, and the pool's arrays, once for a page of a step.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks, kv, queries, d = arrays[0].shape
    heads = call.heads

    def of_block(shape: tuple, by_head: bool) -> Any:
        def place(head: Any, step: Any, steps: Any, *_: Any) -> tuple:
            block = jax.lax.shift_right_logical(steps[step], 16)
            return block, head if by_head else 0, *(0,) * (len(shape) - 2)

        return pl.BlockSpec(shape, place)

    def of_page(number: int, shape: tuple) -> Any:
        def place(head: Any, step: Any, *scalars: Any) -> tuple:
            steps, _, _, pages, layer = scalars
            block, chunk = jax.lax.shift_right_logical(steps[step], 16), _chunk(steps[step])
            page = jnp.minimum(chunk * call.pages + number, table - 1)
            return layer[0], pages[block * table + page], head, 0, 0

        return pl.BlockSpec((1, 1, heads, *shape), place)

    pages = [of_page(i % call.pages, x.shape[3:]) for i, x in enumerate(arrays[2:])]
    ins = [of_block((1, heads, queries, d), True), of_block((1, queries, 2), False), *pages]
    widths = (call.value_dim, LANES)
    return pl.pallas_call(
        functools.partial(_kernel, call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv // heads, count),
            in_specs=ins,
            out_specs=[of_block((1, heads, queries, w), True) for w in widths],
            scratch_shapes=[
                pltpu.VMEM((heads, queries, w), jnp.float32) for w in (LANES, LANES, widths[0])
            ],
        ),
        out_shape=[result((blocks, kv, queries, w), jnp.float32, arrays[0]) for w in widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpreted(),
        name="paged_attention",
    )


def _chunk(step: Any) -> Any:
    return jax.lax.shift_right_logical(step & 0xFFFF, 3)


def _kernel(call: _Call, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    steps, lows, highs, _, _, q, seen_by, *refs = refs
    *pages, out, lse, top, total, sums = refs
    step = steps[pl.program_id(1)]
    block = jax.lax.shift_right_logical(step, 16)
    first, low, high = _chunk(step) * call.pages * call.page_size, lows[block], highs[block]

    @pl.when((step & _FIRST) != 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, _LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when((step & _SEEN) != 0)
    def _() -> None:
        start, stop = seen_by[0, :, :1], seen_by[0, :, 1:]
        width = call.pages * call.page_size
        place = first + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        seen = (place >= start) & (place < stop)
        for head in range(call.heads):
            queries = q[0, head]
            keys = [_page(x, head, queries.dtype) for x in pages[: call.pages]]
            scores = jnp.concatenate([dot(queries, x, (1, 0)) for x in keys], axis=1) * call.scale
            scores = jnp.where(seen, scores, _LOWEST)
            before = top[head, :, :1]
            highest = jnp.maximum(before, scores.max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
            shrink = jnp.exp(before - highest)
            now = shrink * total[head, :, :1] + weights.sum(1, keepdims=True)
            top[head] = jnp.broadcast_to(highest, top.shape[1:])
            total[head] = jnp.broadcast_to(now, total.shape[1:])
            values = sums[head] * shrink
            for i in range(call.pages):
                at = first + i * call.page_size
                part = weights[:, i * call.page_size : (i + 1) * call.page_size]
                read = keys[i] if call.latent else _page(pages[call.pages + i], head, queries.dtype)
                read, axis = _values(call, read, at, low, high)
                values += dot(part.astype(read.dtype), read, (1, axis))
            sums[head] = values

    @pl.when((step & _LAST) != 0)
    def _() -> None:
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        out[0] = sums[...] / whole[:, :, :1]
        lse[0] = top[...] + jnp.log(whole)


def _page(ref: Any, head: int, dtype: Any) -> Array:
    """A head's keys or values of a page; bfloat16 lies in the pool as its bits."""
    x = ref[0, 0, head]
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _values(call: _Call, x: Array, at: Any, low: Any, high: Any) -> tuple[Array, int]:
    """Values of a page whose first place is `at`, 0 where no query sees them, and their token axis.

    Pages may hold anything there, and 0 · NaN is NaN.
    """
    shape, axis = ((1, call.page_size), 1) if call.latent else ((call.page_size, 1), 0)
    place = at + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    x = x[: call.value_dim] if call.latent else x
    return jnp.where((place >= low) & (place < high), x, jnp.zeros_like(x)), axis
