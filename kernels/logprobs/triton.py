"""Statistics of logits by our own Triton kernels, for GPUs: logits never leave the chip forwards.

Forwards, programs take a block of tokens through a part of the vocabulary each, and their results
are put together. Backwards, the gradients of the logits of one slice of the vocabulary at a time
are formed anew, rounded to the hidden states' dtype, and multiplied by XLA's matrix products:
memory is that of the slice, all products but one run at the speed of plain ones, and nothing is
added up in an order that differs from run to run.

The kernels see one device's arrays: call them in `shard_map` where those are spread.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels import triton_tools
from rljax_kernels.logprobs import statistics
from rljax_kernels.logprobs.statistics import MASKED_LOGIT, Options, Statistics, places_of
from rljax_kernels.varying import vary_as

_MODULE = "rljax_kernels.logprobs.triton_kernels"
STATISTICS = triton_tools.Kernel(_MODULE, "statistics")
SLOPES = triton_tools.Kernel(_MODULE, "slopes")

PROGRAMS = 512
"""How many programs keep a GPU busy: parts of the vocabulary are as many as give that."""
SLICE_BYTES, LEAST_SLICE = 1 << 27, 2048
"""Of the gradients of logits that exist at a time: their bytes, and the fewest of a token."""


class Blocks(NamedTuple):
    """Tokens, ids and hidden sizes of a tile, warps of a program, and stages of pipelining."""

    tokens: int
    ids: int
    hidden: int
    warps: int
    stages: int


def refuses(asked: Any) -> str | None:
    """Why the kernels do not compute what is asked; None: they do."""
    if asked.dtype not in ("bfloat16", "float16", "float32"):
        return f"it takes bfloat16, float16 and float32, not {asked.dtype}"
    return None if asked.picked == 1 else f"it picks one id of each token, not {asked.picked}"


def defers(asked: Any, platform: str) -> str | None:
    """Why others are faster; None: they are not."""
    return "XLA's products of float32 are faster" if asked.dtype == "float32" else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def run(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    ids: Int[Array, "N 1"],
    temperature: Float[Array, ""],
    first: Int[Array, ""],
    options: Options,
) -> Statistics:
    """As `rljax_kernels.logprobs.statistics_of`."""
    return _forward(hidden, matrix, ids, temperature, first, options)[0]


def _forward(
    hidden: Array, matrix: Array, ids: Array, temperature: Array, first: Array, options: Options
) -> tuple[Statistics, tuple]:
    (tokens, _), size, cut = hidden.shape, options.vocabulary(matrix), _cut(hidden.dtype)
    blocks = -(-tokens // cut.tokens)
    wanted = -(-PROGRAMS // blocks)  # parts
    part = -(-size // (cut.ids * wanted)) * cut.ids
    parts = -(-size // part)
    place = places_of(ids, first, size)[:, 0]
    launch = triton_tools.Launch(
        STATISTICS,
        (blocks, parts),
        (jax.ShapeDtypeStruct((parts, tokens), jnp.float32),) * 4,
        _constants(hidden, matrix, options, cut, part),
        warps=cut.warps,
        stages=cut.stages,
    )
    weights = matrix.astype(hidden.dtype)
    given = hidden, weights, place, temperature.reshape(1), first.reshape(1)
    picked, top, total, weighted = triton_tools.call(launch, *given, tokens)
    highest = top.max(0)
    share = jnp.exp(top - highest)
    total, weighted = (total * share).sum(0), (weighted * share).sum(0)
    seen = total > 0
    found = Statistics(
        picked=picked.sum(0)[:, None],
        lse=highest + jnp.log(jnp.where(seen, total, 1.0)),
        mean=jnp.where(seen, weighted / jnp.where(seen, total, 1.0), MASKED_LOGIT),
    )
    inputs = hidden, matrix, ids, temperature, first
    found = jax.tree.map(functools.partial(vary_as, inputs), found)
    return found, (*inputs, found)


def _backward(options: Options, saved: tuple, g: Statistics) -> tuple:
    hidden, matrix, ids, temperature, first, found = saved
    size = options.vocabulary(matrix)
    axis = 0 if options.tied else 1
    weights = matrix.astype(hidden.dtype)
    place = places_of(ids, first, size, options.num_tokens)[:, 0]
    a, b = statistics.slopes(found, g)
    given = (place, found.lse, a, b, g.picked[:, 0], temperature.reshape(1), first.reshape(1))
    width = _slice_width(hidden, size)

    def add(begin: Array | int, width: int, dh: Array, dw: Array) -> tuple[Array, Array]:
        """The gradients with those of a slice of the vocabulary."""
        begin = jnp.asarray(begin, jnp.int32)
        slope = _slopes(hidden, weights, given, begin, width, options)
        columns = jax.lax.dynamic_slice_in_dim(weights, begin, width, axis)
        dh += _dot(slope, columns, 1, axis)
        part = _dot(slope, hidden, 0, 0) if options.tied else _dot(hidden, slope, 0, 0)
        part = part.astype(dw.dtype)
        return dh, jax.lax.dynamic_update_slice_in_dim(dw, part, begin, axis)

    zeros = vary_as((hidden, matrix, given), jnp.zeros(hidden.shape, jnp.float32))
    empty = vary_as((hidden, matrix, given), jnp.zeros(matrix.shape, matrix.dtype))
    slices = size // width
    dh, dw = jax.lax.fori_loop(
        0, slices, lambda i, carry: add(i * width, width, *carry), (zeros, empty)
    )
    if size % width:
        dh, dw = add(slices * width, size % width, dh, dw)
    none = [np.zeros(x.shape, jax.dtypes.float0) for x in (ids, first)]
    return dh.astype(hidden.dtype), dw, none[0], jnp.zeros_like(temperature), none[1]


run.defvjp(_forward, _backward)


def _slopes(
    hidden: Array, weights: Array, given: tuple, begin: Array, width: int, options: Options
) -> Float[Array, "N S"]:
    """Gradients of the products of hidden states and `width` columns of the matrix."""
    (tokens, _), cut = hidden.shape, _cut(hidden.dtype)
    launch = triton_tools.Launch(
        SLOPES,
        (-(-tokens // cut.tokens), -(-width // cut.ids)),
        (jax.ShapeDtypeStruct((tokens, width), hidden.dtype),),
        _constants(hidden, weights, options, cut, width),
        warps=cut.warps,
        stages=cut.stages,
    )
    arguments = hidden, weights, *given, begin.reshape(1)
    return vary_as(arguments, triton_tools.call(launch, *arguments, tokens)[0])


def _constants(hidden: Array, matrix: Array, options: Options, cut: Blocks, part: int) -> dict:
    d, v = hidden.shape[1], options.vocabulary(matrix)
    return {
        "D": d,
        "V": v,
        "STRIDE_D": 1 if options.tied else v,
        "STRIDE_V": d if options.tied else 1,
        "NUM_TOKENS": options.num_tokens or 0,
        "PART": part,
        "BLOCK_T": cut.tokens,
        "BLOCK_V": cut.ids,
        "BLOCK_D": cut.hidden,
        "PRECISION": "ieee" if hidden.dtype == jnp.float32 else "tf32",
    }


def _cut(dtype: Any) -> Blocks:
    """Tiles that fit registers and shared memory; not tuned on a GPU."""
    if dtype == jnp.float32:
        return Blocks(64, 64, 16, 8, 2)
    if triton_tools.capability() in (80, 90, 100, 103):
        return Blocks(128, 128, 64, 8, 3)
    return Blocks(64, 128, 32, 4, 3)


def _slice_width(hidden: Array, size: int) -> int:
    """Ids of a slice of the vocabulary whose gradients exist at a time."""
    width = SLICE_BYTES // (hidden.shape[0] * hidden.dtype.itemsize) // 128 * 128
    return min(max(width, LEAST_SLICE), size)


def _dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    return jax.lax.dot_general(
        x,
        y,
        (((of_x,), (of_y,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def examples() -> list[triton_tools.Example]:
    """Uses whose kernels the report compiles."""
    found = []
    for name, dtype, tied, num_tokens in (
        ("logprobs 4096 x 151936", jnp.bfloat16, False, None),
        ("logprobs 4096 x 151936, tied", jnp.bfloat16, True, 151_669),
        ("logprobs 4096 x 151936", jnp.float32, False, None),
    ):
        tokens, d, v = 8192, 4096, 151_936
        options = Options(tied, num_tokens, 1024)

        def loss(hidden, matrix, ids, temperature, first, *, options=options):
            found = run(hidden, matrix, ids, temperature, first, options)
            return jnp.sum(found.picked[:, 0] - found.lse)

        arguments = (
            jax.ShapeDtypeStruct((tokens, d), dtype),
            jax.ShapeDtypeStruct((v, d) if tied else (d, v), dtype),
            jax.ShapeDtypeStruct((tokens, 1), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        found.append(triton_tools.Example(name, gradient, arguments))
    return found
