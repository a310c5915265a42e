"""Flash attention by our own Triton kernels, for training and scoring on GPUs.

Memory is linear in the tokens: the forward pass keeps its output and one logarithm a query, the
backward pass works out the scores anew (Dao 2023, FlashAttention-2). What the libraries lack and
rows of packed responses need is here: segments, shared prefixes, windows, sinks, values of another
width, queries and keys that stand at different places. Blocks that no query sees cost nothing.

The kernels see one device's arrays: call them in `shard_map` where rows or heads are spread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from rljax_kernels import triton_tools
from rljax_kernels.attention import blocked
from rljax_kernels.attention import triton_blocks as cuts
from rljax_kernels.attention.tokens import Tokens, whole_rows
from rljax_kernels.attention.triton_blocks import FORWARD, KEYS_GRADIENT, QUERIES_GRADIENT

DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 256


class _How(NamedTuple):
    """What is static in a call: the scale of the scores, and the window."""

    scale: float
    window: int | None


class _Given(NamedTuple):
    """The arrays of a call, as `run` takes them."""

    q: Any
    k: Any
    v: Any
    queries: Any
    keys: Any

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v

    def cut(self, kernel: triton_tools.Kernel) -> cuts.Blocks:
        """The sizes of a kernel's blocks."""
        width = max(self.q.shape[3], self.v.shape[3])
        return cuts.block_sizes(kernel, self.q.dtype, width, triton_tools.capability())


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
    return _attend(_How(scale, window), _Given(q, k, v, queries, keys), sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, given: _Given, sinks: Array | None) -> Array:
    return _attend_forward(how, given, sinks)[0]


def _attend_forward(how: _How, given: _Given, sinks: Array | None) -> tuple[Array, tuple]:
    out, lse = _forward(how, given, sinks, given.q.dtype)
    out, lse = checkpoint_name(out, blocked.OUT), checkpoint_name(lse, blocked.LSE)
    return out, (given, sinks, out, lse)


def _attend_backward(how: _How, saved: tuple, g: Array) -> tuple:
    given, sinks, out, lse = saved
    delta = blocked.inner(g, out)
    dtypes = (given.q.dtype, given.k.dtype, given.v.dtype)
    grads = _backward(how, given, g, lse, delta.swapaxes(1, 2), dtypes)
    d_sinks = blocked.sinks_gradient(sinks, lse.swapaxes(1, 2), delta)
    return _Given(*grads, None, None), d_sinks


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
    rule = _How(how.scale, how.window)
    out, lse = _forward(rule, _Given(q, k, v, queries, keys), None, jnp.dtype(jnp.float32))
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
    rule, given = _How(how.scale, how.window), _Given(q, k, v, queries, keys)
    dtypes = (jnp.dtype(jnp.float32),) * 3
    return _backward(rule, given, g, lse.swapaxes(1, 2), delta.swapaxes(1, 2), dtypes)


def _forward(
    how: _How, given: _Given, sinks: Array | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """The output [B, T, H, dv] in a dtype, and the logsumexp [B, H, T], that of sinks included."""
    rows, length, heads, _ = given.q.shape
    cut = given.cut(FORWARD)
    launch = triton_tools.Launch(
        FORWARD,
        (-(-length // cut.queries), heads, rows),
        (
            jax.ShapeDtypeStruct((rows, length, heads, given.v.shape[3]), dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        {**_constants(how, given, cut), "SINKS": sinks is not None},
        warps=cut.warps,
        stages=cut.stages,
    )
    logits = jnp.zeros(heads) if sinks is None else sinks.astype(jnp.float32)
    arrays = (*given.arrays, *_sides(given, cut), logits)
    out, lse = triton_tools.call(launch, *arrays, length, given.k.shape[1])
    return out, lse


def _backward(
    how: _How, given: _Given, g: Array, lse: Array, delta: Array, dtypes: Sequence[jnp.dtype]
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values in these dtypes; lse and delta are [B, H, T]."""
    arrays = (*given.arrays, g.astype(given.v.dtype), lse, delta)
    dq = _queries_gradient(how, given, arrays, dtypes[0])
    return dq, *_keys_gradient(how, given, arrays, dtypes[1:])


def _queries_gradient(how: _How, given: _Given, arrays: Sequence[Array], dtype: jnp.dtype) -> Array:
    rows, length, heads, _ = given.q.shape
    cut = given.cut(QUERIES_GRADIENT)
    launch = triton_tools.Launch(
        QUERIES_GRADIENT,
        (-(-length // cut.queries), heads, rows),
        (jax.ShapeDtypeStruct(given.q.shape, dtype),),
        _constants(how, given, cut),
        warps=cut.warps,
        stages=cut.stages,
    )
    return triton_tools.call(launch, *arrays, *_sides(given, cut), length, given.k.shape[1])[0]


def _keys_gradient(
    how: _How, given: _Given, arrays: Sequence[Array], dtypes: Sequence[jnp.dtype]
) -> tuple[Array, Array]:
    (rows, length, heads, _), (span, kv_heads) = given.q.shape, given.k.shape[1:3]
    cut = given.cut(KEYS_GRADIENT)
    blocks = -(-span // cut.keys)
    parts = cuts.parts(blocks * kv_heads * rows, heads // kv_heads)
    like = zip((given.k, given.v), dtypes, strict=True)
    launch = triton_tools.Launch(
        KEYS_GRADIENT,
        (blocks, kv_heads * parts, rows),
        tuple(
            jax.ShapeDtypeStruct((parts, *x.shape), dtype if parts == 1 else jnp.float32)
            for x, dtype in like
        ),
        {**_constants(how, given, cut), "PARTS": parts},
        warps=cut.warps,
        stages=cut.stages,
    )
    dk, dv = triton_tools.call(launch, *arrays, *_sides(given, cut), length, span)
    if parts == 1:
        return dk[0], dv[0]
    return dk.sum(0).astype(dtypes[0]), dv.sum(0).astype(dtypes[1])


def _constants(how: _How, given: _Given, cut: cuts.Blocks) -> dict[str, Any]:
    """What all three kernels are compiled for."""
    (_, length, heads, width), (span, kv_heads) = given.q.shape, given.k.shape[1:3]
    value_width = given.v.shape[3]
    if how.scale < 0:
        raise ValueError(f"attention by 'triton': scale must not be negative, got {how.scale}")
    main = max(1 << (width.bit_length() - 1), 16)
    blocks = max(length // cut.queries, span // cut.keys) + 1
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": width,
        "DV": value_width,
        "MAIN": main,
        "REST": _power_of_two(width - main) if width > main else 0,
        "DV_PADDED": _power_of_two(value_width),
        "SCALE": how.scale * math.log2(math.e),
        "WINDOW": how.window or 0,
        "PREFIX": given.queries.prefix is not None,
        "BLOCK_Q": cut.queries,
        "BLOCK_K": cut.keys,
        "CHUNK": min(_power_of_two(blocks), 1024),
        "PRECISION": "ieee" if given.q.dtype == jnp.float32 else "tf32",
    }


def _power_of_two(number: int) -> int:
    """The next one, at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def _sides(given: _Given, cut: cuts.Blocks) -> tuple[Array, Array, Array, Array]:
    """Fields and extents of queries and keys, in the order in which the kernels take them."""
    return (
        cuts.fields(given.queries),
        cuts.fields(given.keys),
        cuts.extents(given.queries, cut.queries),
        cuts.extents(given.keys, cut.keys),
    )


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

        kv_heads = 4 if d == dv else 16  # latent attention spells out every head
        widths = ((16, d), (kv_heads, d), (kv_heads, dv))
        arrays = tuple(shape((1, 4096, *w)) for w in widths)
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
        found.append(triton_tools.Example(name, gradient, (*arrays, place, place, place)))
    return found
