"""Pallas kernels of attention on TPU: forward, and the gradients of queries and of keys and values.

The softmax is taken online over blocks of keys (Dao et al. 2022, FlashAttention; 2023,
FlashAttention-2). Each kernel walks a list of pairs of blocks (`block_pairs`), so that blocks that
no query sees cost nothing. Scores are [queries, keys] in `forward` and `gradient_of_queries`,
[keys, queries] in `gradient_of_keys`, where what belongs to a query then lies along the lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from rljax_kernels.attention.block_pairs import FIRST, LAST, MASKED, SEEN, Pairs
from rljax_kernels.pallas_tools import LANES, VMEM_BYTES, dot, interpreted, result

_LOWEST = -1e30
SEGMENT, INDEX, POSITION, PREFIX = range(4)
"""What the four numbers of a token are; `PREFIX` is 0 for keys."""


class Call(NamedTuple):
    """What is fixed when a kernel is compiled.

    Attributes:
      scale: Multiplies the scores.
      window: How many positions back a query sees; None: all.
      prefix: Whether sequences have prefixes.
      block: Tokens of a block of queries, and of keys.
    """

    scale: float
    window: int | None
    prefix: bool
    block: tuple[int, int]


def _seen(call: Call, query: list[Any], key: list[Any]) -> jax.Array:
    """`rljax_kernels.attention.tokens.sees` of a block."""
    seen = query[SEGMENT] == key[SEGMENT]
    if call.prefix:
        seen |= query[PREFIX] == key[SEGMENT]
    seen &= query[INDEX] >= key[INDEX]
    if call.window is not None:
        seen &= query[POSITION] - key[POSITION] < call.window
    return seen


def _columns(ref: Any) -> list[Any]:
    return [ref[0, :, i : i + 1] for i in range(4)]


def _rows(ref: Any) -> list[Any]:
    return [ref[0, i : i + 1, :] for i in range(4)]


def _column(row: Any) -> jax.Array:
    """[1, n] as [n, LANES], each number along the lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _when_seen(flags: Any, body: Any) -> None:
    """Runs `body(masked)` of a pair, with a mask only where it needs one."""
    seen = (flags & SEEN) != 0
    pl.when(seen & ((flags & MASKED) != 0))(lambda: body(True))
    pl.when(seen & ((flags & MASKED) == 0))(lambda: body(False))


def _forward_kernel(call: Call, *refs: Any) -> None:
    _, rows, q, k, v, at, key_at, out, lse, top, total, sums = refs
    flags = rows[pl.program_id(1)]

    @pl.when((flags & FIRST) != 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, _LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def body(masked: bool) -> None:
        scores = dot(q[0, 0], k[0, 0], (1, 1)) * call.scale
        seen = _seen(call, _columns(at), _rows(key_at)) if masked else None
        if masked:
            scores = jnp.where(seen, scores, _LOWEST)
        before = top[:, :1]
        highest = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp(scores - highest)
        if masked:  # a query that has seen no key yet gives all of them exp(0)
            weights = jnp.where(seen, weights, 0.0)
        shrink = jnp.exp(before - highest)
        now = shrink * total[:, :1] + weights.sum(1, keepdims=True)
        top[...] = jnp.broadcast_to(highest, top.shape)
        total[...] = jnp.broadcast_to(now, total.shape)
        sums[...] = sums[...] * shrink + dot(weights.astype(v.dtype), v[0, 0], (1, 0))

    _when_seen(flags, body)

    @pl.when((flags & LAST) != 0)
    def _() -> None:
        whole = jnp.where(total[...] > 0, total[...], 1.0)
        out[0, 0] = (sums[...] / whole[:, :1]).astype(out.dtype)
        lse[0, 0] = (top[...] + jnp.log(whole)).T[:1]


def _queries_kernel(call: Call, *refs: Any) -> None:
    _, rows, q, k, v, g, lse, inner, at, key_at, dq, lses, inners, sums = refs
    flags = rows[pl.program_id(1)]

    @pl.when((flags & FIRST) != 0)
    def _() -> None:
        lses[...], inners[...] = _column(lse[0, 0]), _column(inner[0, 0])
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def body(masked: bool) -> None:
        scores = dot(q[0, 0], k[0, 0], (1, 1)) * call.scale
        weights = jnp.exp(scores - lses[:, :1])
        if masked:
            seen = _seen(call, _columns(at), _rows(key_at))
            weights = jnp.where(seen, weights, 0.0)
        slope = weights * (dot(g[0, 0], v[0, 0], (1, 1)) - inners[:, :1])
        sums[...] += dot(slope.astype(k.dtype), k[0, 0], (1, 0))

    _when_seen(flags, body)

    @pl.when((flags & LAST) != 0)
    def _() -> None:
        dq[0, 0] = (sums[...] * call.scale).astype(dq.dtype)


def _keys_kernel(call: Call, *refs: Any) -> None:
    _, rows, q, k, v, g, lse, inner, at, key_at, dk, dv, key_sums, value_sums = refs
    flags, head, last_head = rows[pl.program_id(1)], pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(((flags & FIRST) != 0) & (head == 0))
    def _() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, jnp.float32)
        value_sums[...] = jnp.zeros(value_sums.shape, jnp.float32)

    def body(masked: bool) -> None:
        scores = dot(k[0, 0], q[0, 0], (1, 1)) * call.scale
        weights = jnp.exp(scores - lse[0, 0])
        if masked:
            weights = jnp.where(_seen(call, _rows(at), _columns(key_at)), weights, 0.0)
        value_sums[...] += dot(weights.astype(g.dtype), g[0, 0], (1, 0))
        slope = weights * (dot(v[0, 0], g[0, 0], (1, 1)) - inner[0, 0])
        key_sums[...] += dot(slope.astype(q.dtype), q[0, 0], (1, 0))

    _when_seen(flags, body)

    @pl.when(((flags & LAST) != 0) & (head == last_head))
    def _() -> None:
        dk[0, 0] = (key_sums[...] * call.scale).astype(dk.dtype)
        dv[0, 0] = value_sums[...].astype(dv.dtype)


class _Places:
    """Index maps: which block of an array a step of the grid works on.

    A step is (head, pair) or (head of keys, pair, query head of its group).
    """

    def __init__(self, group: int, by_keys: bool):
        self.group, self.by_keys = group, by_keys

    def query_head(self, step: tuple) -> Any:
        return step[0] * self.group + step[2] if self.by_keys else step[0]

    def key_head(self, step: tuple) -> Any:
        return step[0] if self.by_keys else jax.lax.div(step[0], self.group)

    def spec(self, shape: tuple, of_keys: bool, tokens: int, head: bool = True) -> pl.BlockSpec:
        """Blocks of an array, of which dimension `tokens` counts tokens."""
        steps = 3 if self.by_keys else 2

        def place(*args: Any) -> tuple:
            step, blocks, rows = args[:steps], args[steps], args[steps + 1]
            pair = blocks[step[1]]
            token = pair & 0xFFFF if of_keys else jax.lax.shift_right_logical(pair, 16)
            index: list[Any] = [0] * len(shape)
            index[0] = jax.lax.shift_right_logical(rows[step[1]], 4)
            index[tokens] = token
            if head:
                index[1] = self.key_head(step) if of_keys else self.query_head(step)
            return tuple(index)

        return pl.BlockSpec(shape, place)


def _specs(call: Call, q: Any, k: Any, v: Any, by_keys: bool) -> dict[str, Any]:
    places = _Places(q.shape[1] // k.shape[1], by_keys)
    (bq, bk), d, dv = call.block, q.shape[3], v.shape[3]
    column, row = (lambda n: (1, n, 4)), (lambda n: (1, 4, n))
    at, key_at = (row, column) if by_keys else (column, row)
    return {
        "q": places.spec((1, 1, bq, d), False, 2),
        "k": places.spec((1, 1, bk, d), True, 2),
        "v": places.spec((1, 1, bk, dv), True, 2),
        "o": places.spec((1, 1, bq, dv), False, 2),
        "lse": places.spec((1, 1, 1, bq), False, 3),
        "at": places.spec(at(bq), False, 2 if by_keys else 1, head=False),
        "key_at": places.spec(key_at(bk), True, 1 if by_keys else 2, head=False),
    }


def _run(kernel: Any, call: Call, grid: tuple, specs: Any, out: Any, scratch: list, name: str):
    ins, outs = specs

    def body(*refs: Any) -> None:
        kernel(call, *refs)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=ins,
            out_specs=outs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) + ("arbitrary",) * (len(grid) - 1),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpreted(),
        name=name,
    )


def forward(
    call: Call, q: Any, k: Any, v: Any, at: Any, key_at: Any, pairs: Pairs, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The output [B, H, T, dv] and the logarithm of the softmax's sum, float32 [B, H, 1, T].

    A query that sees no key gets 0, and -1e30.

    Args:
      call: What is fixed.
      q: [B, H, T, d], T a multiple of the block.
      k: [B, K, S, d], likewise.
      v: [B, K, S, dv].
      at: int32 [B, T, 4], of the queries.
      key_at: int32 [B, S, 4], of the keys.
      pairs: By blocks of queries.
      dtype: The output's.
    """
    s = _specs(call, q, k, v, by_keys=False)
    bq, dv = call.block[0], v.shape[3]
    ins, outs = ([s[x] for x in names] for names in (("q", "k", "v", "at", "key_at"), ("o", "lse")))
    out = [
        result((*q.shape[:3], dv), dtype, q),
        result((*q.shape[:2], 1, q.shape[2]), jnp.float32, q),
    ]
    scratch = [(bq, LANES), (bq, LANES), (bq, dv)]
    grid = (q.shape[1], pairs.count)
    run = _run(_forward_kernel, call, grid, (ins, outs), out, scratch, "attention_forward")
    return tuple(run(pairs.blocks, pairs.rows, q, k, v, at, key_at.swapaxes(1, 2)))


def gradient_of_queries(
    call: Call, arrays: tuple, at: Any, key_at: Any, pairs: Pairs, dtype: Any
) -> jax.Array:
    """As q.

    Args:
      call: What is fixed.
      arrays: q, k, v, the output's gradient, the logarithm of the softmax's sum, and each query's
        product of output and gradient, [B, H, 1, T].
      at: As for `forward`.
      key_at: Likewise.
      pairs: By blocks of queries.
      dtype: The gradient's.
    """
    q, k, v = arrays[:3]
    s = _specs(call, q, k, v, by_keys=False)
    bq = call.block[0]
    ins = [s[x] for x in ("q", "k", "v", "o", "lse", "lse", "at", "key_at")]
    scratch = [(bq, LANES), (bq, LANES), (bq, q.shape[3])]
    grid = (q.shape[1], pairs.count)
    out = result(q.shape, dtype, q)
    run = _run(_queries_kernel, call, grid, (ins, s["q"]), out, scratch, "attention_queries")
    return run(pairs.blocks, pairs.rows, *arrays, at, key_at.swapaxes(1, 2))


def gradient_of_keys(
    call: Call, arrays: tuple, at: Any, key_at: Any, pairs: Pairs, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """As k and v; arguments as for `gradient_of_queries`, but for pairs, which go by keys."""
    q, k, v = arrays[:3]
    s = _specs(call, q, k, v, by_keys=True)
    bk = call.block[1]
    ins = [s[x] for x in ("q", "k", "v", "o", "lse", "lse", "at", "key_at")]
    scratch = [(bk, k.shape[3]), (bk, v.shape[3])]
    grid = (k.shape[1], pairs.count, q.shape[1] // k.shape[1])
    out = [result(x.shape, dtype, x) for x in (k, v)]
    run = _run(_keys_kernel, call, grid, (ins, [s["k"], s["v"]]), out, scratch, "attention_keys")
    return tuple(run(pairs.blocks, pairs.rows, *arrays, at.swapaxes(1, 2), key_at))
