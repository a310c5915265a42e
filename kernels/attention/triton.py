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
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from rljax_kernels import triton_tools
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
LOG2_E = math.log2(math.e)


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


def blocks(kernel: triton_tools.Kernel, dtype: Any, width: int) -> Blocks:
    """Sizes that keep a Hopper GPU's registers and shared memory just filled.

    Args:
      kernel: Which of the three.
      dtype: Of queries, keys and values; float32 is multiplied without tensor cores.
      width: The larger of the keys' and the values' widths.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return Blocks(32, 32, 4, 1)
    if kernel is FORWARD:
        return Blocks(128, 64, 8 if width > 64 else 4, 3 if width <= 128 else 2)
    return Blocks(64, 64, 4 if width <= 64 else 8, 2)


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
    if scale < 0:  # the kernels multiply maxima by it
        q, scale = -q, -scale
    return _attention(scale, window, q, k, v, queries, keys, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, window, q, k, v, queries, keys, sinks):
    return forward(q, k, v, queries, keys, scale=scale, window=window, sinks=sinks)[0]


def _attention_forward(scale, window, q, k, v, queries, keys, sinks):
    out, lse = forward(q, k, v, queries, keys, scale=scale, window=window, sinks=sinks)
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, queries, keys, sinks, out, lse)


def _attention_backward(scale, window, kept, d_out):
    q, k, v, queries, keys, sinks, out, lse = kept
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    dq, dk, dv = backward(q, k, v, d_out, lse, delta, queries, keys, scale=scale, window=window)
    d_sinks = None
    if sinks is not None:
        shares = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
        d_sinks = -jnp.sum(shares * delta, axis=(0, 2)).astype(sinks.dtype)
    return dq, dk, dv, None, None, d_sinks


_attention.defvjp(_attention_forward, _attention_backward)


def forward(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B H T"]]:
    """The output and the logarithm of the softmax's denominator, sink included, float32.

    A query that sees none of these keys gets zeros and -1e30 (or its sink's logit), so that parts
    of a row's keys can be put together. It has no derivatives: see `backward`.
    """
    cut = blocks(FORWARD, q.dtype, max(q.shape[3], v.shape[3]))
    given = jnp.zeros(q.shape[2]) if sinks is None else sinks
    constants = {**_constants(q, k, v, queries, scale, window, cut), "SINKS": sinks is not None}
    b, t, h, _ = q.shape
    launch = triton_tools.Launch(
        FORWARD,
        (-(-t // cut.queries), h, b),
        (
            jax.ShapeDtypeStruct((b, t, h, v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct((b, h, t), jnp.float32),
        ),
        constants,
        warps=cut.warps,
        stages=cut.stages,
    )
    sides = _sides(queries, keys, cut)
    out, lse = triton_tools.call(launch, q, k, v, *sides, given.astype(jnp.float32), t, k.shape[1])
    return out, lse


def backward(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    d_out: Float[Array, "B T H dv"],
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "B T H d"], Float[Array, "B S K d"], Float[Array, "B S K dv"]]:
    """The gradients of queries, keys and values.

    Args:
      q: As in `forward`, as are all that are not named here.
      k: Keys.
      v: Values.
      d_out: The output's gradient.
      lse: The logarithm of the whole softmax's denominator, these keys being all or part of it.
      delta: The sum over the value's width of the whole output times its gradient, float32.
      queries: Where the queries stand.
      keys: Where the keys stand.
      scale: Multiplies the scores.
      window: How many positions back a query sees.
    """
    width = max(q.shape[3], v.shape[3])
    (b, t, h, _), (s, kv) = q.shape, k.shape[1:3]
    d_out = d_out.astype(v.dtype)
    found = []
    for kernel, outputs in ((QUERIES_GRADIENT, (q,)), (KEYS_GRADIENT, (k, v))):
        cut = blocks(kernel, q.dtype, width)
        grid = (-(-t // cut.queries), h, b)
        launch = triton_tools.Launch(
            kernel,
            grid if kernel is QUERIES_GRADIENT else (-(-s // cut.keys), kv, b),
            tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
            _constants(q, k, v, queries, scale, window, cut),
            warps=cut.warps,
            stages=cut.stages,
        )
        sides = _sides(queries, keys, cut)
        found += triton_tools.call(launch, q, k, v, d_out, lse, delta, *sides, t, s)
    dq, dk, dv = found
    return dq, dk, dv


def _constants(q, k, v, queries: Tokens, scale: float, window: int | None, cut: Blocks) -> dict:
    """What all three kernels are compiled for."""
    d, dv = q.shape[3], v.shape[3]
    main = max(1 << (d.bit_length() - 1), 16)
    rest = d - main
    return {
        "HEADS": q.shape[2],
        "KV_HEADS": k.shape[2],
        "D": d,
        "DV": dv,
        "MAIN": main,
        "REST": _power_of_two(rest) if rest > 0 else 0,
        "DV_PADDED": _power_of_two(dv),
        "SCALE": scale * LOG2_E,
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
        ("attention 128", jnp.float32, 128, 128, False, None),
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
