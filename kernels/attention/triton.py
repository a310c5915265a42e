"""Flash attention by our own Triton kernels, for training and scoring on GPUs.

Memory is linear in the tokens: the forward pass keeps its output and one logarithm a query, the
backward pass works out the scores anew (Dao 2023, FlashAttention-2). What the libraries lack and
rows of packed responses need is here: segments, shared prefixes, windows, sinks, values of another
width, queries and keys that stand at different places. Blocks that no query sees cost nothing.

The kernels see one device's arrays: call them in `shard_map` where rows or heads are spread.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from rljax_kernels import triton_tools
from rljax_kernels.attention import blocked
from rljax_kernels.attention.tokens import Tokens, whole_rows

FORWARD = triton_tools.Kernel("rljax_kernels.attention.triton_kernels", "forward")
QUERIES_GRADIENT = triton_tools.Kernel(
    "rljax_kernels.attention.triton_gradient_kernels", "queries_gradient"
)
KEYS_GRADIENT = triton_tools.Kernel(
    "rljax_kernels.attention.triton_gradient_kernels", "keys_gradient"
)

DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 256
FAR = 1 << 30

Rule = tuple[float, int | None]
"""What is static in a call: the scale of the scores, and the window."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel is cut.

    Attributes:
      queries: In a block; a power of two, at least 16.
      keys: In a block; likewise.
      warps: Of a program.
      stages: Of software pipelining.
    """

    queries: int
    keys: int
    warps: int
    stages: int


_HALF = {
    FORWARD: {
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        192: (128, 64, 8, 2),
        256: (128, 32, 8, 2),
    },
    QUERIES_GRADIENT: {
        64: (128, 64, 8, 2),
        128: (128, 64, 8, 2),
        192: (128, 32, 8, 2),
        256: (64, 32, 4, 2),
    },
    KEYS_GRADIENT: {
        64: (64, 128, 8, 2),
        128: (64, 128, 8, 2),
        192: (32, 128, 8, 2),
        256: (32, 64, 8, 2),
    },
}
"""For 16-bit numbers on GPUs with 160 KiB of shared memory and more (A100, H100, B200), by the
largest width that they are for; found by compiling for compute capability 9.0 with next to no
spills. They have not been tuned on a GPU."""

_HALF_SMALL = {
    FORWARD: {128: (64, 64, 4, 2), 256: (64, 32, 4, 1)},
    QUERIES_GRADIENT: {128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
    KEYS_GRADIENT: {128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
}
"""For 16-bit numbers on the others (99 KiB)."""

_FULL = {
    FORWARD: {128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    QUERIES_GRADIENT: {64: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    KEYS_GRADIENT: {128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
}
"""For float32, which is multiplied without tensor cores, so that no bit is lost."""


def blocks(kernel: triton_tools.Kernel, dtype: Any, width: int, capability: int) -> Blocks:
    """How to cut a kernel so that a GPU's registers and shared memory hold it.

    Args:
      kernel: Which of the three.
      dtype: Of queries, keys and values.
      width: The larger of the keys' and the values' widths.
      capability: The GPU's compute capability, ten times.
    """
    if jnp.dtype(dtype) == jnp.float32:
        sizes = _FULL
    else:
        sizes = _HALF if capability in (80, 90, 100, 103) else _HALF_SMALL
    return next(Blocks(*cut) for widest, cut in sizes[kernel].items() if width <= widest)


def refuses(asked: Any) -> str | None:
    """Why the kernels do not compute what is asked; None: they do."""
    if asked.dtype not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, not {asked.dtype}"
    if max(asked.head_dim, asked.value_dim) > WIDEST:
        return f"heads are at most {WIDEST} wide, not {max(asked.head_dim, asked.value_dim)}"
    return None


def run(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H dv"]:
    """As `rljax_kernels.attention.attention`; padding gets zeros."""
    return _attend((scale, window), q, k, v, queries, keys, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: Rule, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> Array:
    return _attend_forward(how, q, k, v, queries, keys, sinks)[0]


def _attend_forward(
    how: Rule, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> tuple[Array, tuple]:
    out, lse = _forward(how, q, k, v, queries, keys, sinks, q.dtype)
    out, lse = checkpoint_name(out, blocked.OUT), checkpoint_name(lse, blocked.LSE)
    return out, (q, k, v, queries, keys, sinks, out, lse)


def _attend_backward(how: Rule, saved: tuple, g: Array) -> tuple:
    q, k, v, queries, keys, sinks, out, lse = saved
    delta = blocked.inner(g, out)
    dtypes = (q.dtype, k.dtype, v.dtype)
    grads = _backward(how, q, k, v, queries, keys, g, lse, delta.swapaxes(1, 2), dtypes)
    return *grads, None, None, blocked.sinks_gradient(sinks, lse.swapaxes(1, 2), delta)


_attend.defvjp(_attend_forward, _attend_backward)


def forward(
    how: blocked.How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """As `blocked.forward`: output and logsumexp in float32, without derivatives, for rings."""
    rule = (how.scale, how.window)
    out, lse = _forward(rule, q, k, v, queries, keys, None, jnp.dtype(jnp.float32))
    return out, lse.swapaxes(1, 2)


def backward(
    how: blocked.How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    g: Float[Array, "B T H dv"],
    lse: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T H d"], Float[Array, "B S K d"], Float[Array, "B S K dv"]]:
    """As `blocked.backward`: the gradients of queries, keys and values in float32, for rings."""
    lse, delta = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    dtypes = (jnp.dtype(jnp.float32),) * 3
    return _backward((how.scale, how.window), q, k, v, queries, keys, g, lse, delta, dtypes)


def _forward(
    how: Rule,
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    sinks: Array | None,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """The output [B, T, H, dv] in a dtype, and the logsumexp [B, H, T], that of sinks included."""
    cut = blocks(FORWARD, q.dtype, max(q.shape[3], v.shape[3]), triton_tools.capability())
    (rows, length, heads, _), span = q.shape, k.shape[1]
    launch = triton_tools.Launch(
        FORWARD,
        (-(-length // cut.queries), heads, rows),
        (
            jax.ShapeDtypeStruct((rows, length, heads, v.shape[3]), dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        {**_constants(how, q, k, v, queries, cut), "SINKS": sinks is not None},
        warps=cut.warps,
        stages=cut.stages,
    )
    given = jnp.zeros(heads) if sinks is None else sinks
    sides = _sides(queries, keys, cut)
    out, lse = triton_tools.call(launch, q, k, v, *sides, given.astype(jnp.float32), length, span)
    return out, lse


def _backward(
    how: Rule,
    q: Array,
    k: Array,
    v: Array,
    queries: Tokens,
    keys: Tokens,
    g: Array,
    lse: Array,
    delta: Array,
    dtypes: Sequence[jnp.dtype],
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values in these dtypes; lse and delta are [B, H, T]."""
    (rows, length, heads, width), (span, kv_heads) = q.shape, k.shape[1:3]
    width = max(width, v.shape[3])
    shapes = [jax.ShapeDtypeStruct(x.shape, t) for x, t in zip((q, k, v), dtypes, strict=True)]
    found: list[Array] = []
    for kernel, outputs in ((QUERIES_GRADIENT, shapes[:1]), (KEYS_GRADIENT, shapes[1:])):
        cut = blocks(kernel, q.dtype, width, triton_tools.capability())
        by_queries = (-(-length // cut.queries), heads, rows)
        by_keys = (-(-span // cut.keys), kv_heads, rows)
        launch = triton_tools.Launch(
            kernel,
            by_queries if kernel is QUERIES_GRADIENT else by_keys,
            tuple(outputs),
            _constants(how, q, k, v, queries, cut),
            warps=cut.warps,
            stages=cut.stages,
        )
        given = (q, k, v, g.astype(v.dtype), lse, delta, *_sides(queries, keys, cut))
        found += triton_tools.call(launch, *given, length, span)
    dq, dk, dv = found
    return dq, dk, dv


def _constants(how: Rule, q: Array, k: Array, v: Array, queries: Tokens, cut: Blocks) -> dict:
    """What all three kernels are compiled for."""
    (scale, window), width = how, q.shape[3]
    if scale < 0:
        raise ValueError(f"attention by 'triton': scale must not be negative, got {scale}")
    main = max(1 << (width.bit_length() - 1), 16)
    return {
        "HEADS": q.shape[2],
        "KV_HEADS": k.shape[2],
        "D": width,
        "DV": v.shape[3],
        "MAIN": main,
        "REST": _power_of_two(width - main) if width > main else 0,
        "DV_PADDED": _power_of_two(v.shape[3]),
        "SCALE": scale * math.log2(math.e),
        "WINDOW": window or 0,
        "PREFIX": queries.prefix is not None,
        "BLOCK_Q": cut.queries,
        "BLOCK_K": cut.keys,
        "CHUNK": 128,
        "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
    }


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _sides(queries: Tokens, keys: Tokens, cut: Blocks) -> tuple[Array, Array, Array, Array]:
    """Fields and extents of queries and keys, in the order in which the kernels take them."""
    return (
        fields(queries),
        fields(keys),
        extents(queries, cut.queries),
        extents(keys, cut.keys),
    )


def fields(tokens: Tokens) -> Int[Array, "B 4 T"]:
    """Index, position, segment and prefix of tokens in one array."""
    prefix = jnp.zeros_like(tokens.segments) if tokens.prefix is None else tokens.prefix
    found = (tokens.index, tokens.positions, tokens.segments, prefix)
    return jnp.stack([f.astype(jnp.int32) for f in found], axis=1)


def extents(tokens: Tokens, block: int) -> Int[Array, "B 10 N"]:
    """Smallest and largest index, position, segment and prefix of each block of tokens.

    In the kernels' order: least and greatest index, position and segment of what is not padding (a
    block of padding alone has its least beyond its greatest), the least segment with padding as 0;
    least and greatest prefix of those that have one, the least with none as 0.
    """
    at = fields(tokens)
    at = jnp.pad(at, ((0, 0), (0, 0), (0, -at.shape[2] % block)))
    index, position, segment, prefix = at.reshape(*at.shape[:2], -1, block).swapaxes(0, 1)
    real = segment > 0
    prefix = jnp.where(real, prefix, 0)

    def least(values: Array, counted: Array) -> Array:
        return jnp.min(jnp.where(counted, values, FAR), axis=-1)

    def greatest(values: Array, counted: Array) -> Array:
        return jnp.max(jnp.where(counted, values, -1), axis=-1)

    found = [
        bound(values, real) for values in (index, position, segment) for bound in (least, greatest)
    ]
    found += [jnp.min(segment, axis=-1)]
    found += [least(prefix, prefix > 0), greatest(prefix, prefix > 0), jnp.min(prefix, axis=-1)]
    return jnp.stack(found, axis=1)


def examples() -> list[triton_tools.Example]:
    """Uses whose kernels the report compiles."""
    found = []
    for name, dtype, d, dv, prefix, window in (
        ("attention 64", jnp.bfloat16, 64, 64, False, None),
        ("attention 128", jnp.bfloat16, 128, 128, False, None),
        ("attention 128, prefix", jnp.bfloat16, 128, 128, True, None),
        ("attention 128, window", jnp.bfloat16, 128, 128, False, 1024),
        ("attention 192/128", jnp.bfloat16, 192, 128, False, None),
        ("attention 256", jnp.bfloat16, 256, 256, False, None),
        ("attention 64", jnp.float32, 64, 64, False, None),
        ("attention 128", jnp.float32, 128, 128, False, None),
        ("attention 192/128", jnp.float32, 192, 128, False, None),
        ("attention 256", jnp.float32, 256, 256, False, None),
    ):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        place = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

        def loss(q, k, v, positions, segments, ahead, *, prefix=prefix, window=window):
            tokens = whole_rows(positions, segments, ahead if prefix else None)
            scale = q.shape[3] ** -0.5
            out = run(q, k, v, tokens, tokens, scale=scale, window=window)
            return jnp.sum(out.astype(jnp.float32))

        arrays = (shape((1, 4096, 16, d)), shape((1, 4096, 4, d)), shape((1, 4096, 4, dv)))
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
        found.append(triton_tools.Example(name, gradient, (*arrays, place, place, place)))
    return found
