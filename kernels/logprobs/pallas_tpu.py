"""Statistics of logits on TPU by our own Pallas kernels, the vocabulary in blocks.

Forwards a block of logits lives in a core's own memory and no longer. Backwards, for one slice of
the vocabulary after the other, a kernel forms the logits' gradients, of all tokens; the products
with the matrix and with the hidden states are XLA's. So logits are formed twice, and not three
times as by kernels that each keep one of the two sums.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.logprobs.statistics import (
    MASKED_LOGIT,
    Options,
    Statistics,
    places_of,
    slopes,
)
from rljax_kernels.pallas_tools import (
    LANES,
    VMEM_BYTES,
    dot,
    interpreted,
    result,
    round_up,
    vary_alike,
)

_BLOCK_BYTES = 2**22  # of a block of hidden states, and of the matrix
_MOST = 1024  # tokens, or ids, of a block
_SLICE = 2**26  # gradients of logits that exist at a time
_MOST_PICKED = 8
_LSE, _MEAN, _PICKED = 0, 1, 2  # columns of what the forward kernel gives


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (`rljax_kernels.logprobs.Asked`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    if asked.picked > _MOST_PICKED:
        return f"it picks up to {_MOST_PICKED} ids a token, not {asked.picked}"
    return None


def run(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    ids: Int[Array, "N n"],
    temperature: Float[Array, ""],
    first: Int[Array, ""],
    options: Options,
) -> Statistics:
    """As `rljax_kernels.logprobs.statistics_of`."""
    return _run(options, *vary_alike([hidden, matrix, ids, temperature, first]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    options: Options, hidden: Array, matrix: Array, ids: Array, temperature: Array, first: Array
) -> Statistics:
    return _forward(options, hidden, matrix, ids, temperature, first)[0]


def _forward(
    options: Options, hidden: Array, matrix: Array, ids: Array, temperature: Array, first: Array
) -> tuple[Statistics, tuple]:
    place = places_of(ids, first, options.vocabulary(matrix))
    scalars = _scalars(options, matrix, temperature, first, 0)
    weights = matrix.astype(hidden.dtype)
    found = _statistics(options.tied, *scalars, hidden, weights, place)
    picked = found[:, _PICKED : _PICKED + ids.shape[1]]
    found = Statistics(picked, found[:, _LSE], found[:, _MEAN])
    return found, (hidden, matrix, ids, temperature, first, found)


def _backward(options: Options, saved: tuple, g: Statistics) -> tuple:
    hidden, matrix, ids, temperature, first, found = saved
    weights, size = matrix.astype(hidden.dtype), options.vocabulary(matrix)
    place = places_of(ids, first, size, options.num_tokens)
    a, b = slopes(found, g)
    numbers = jnp.concatenate([jnp.stack([found.lse, a, b], axis=1), g.picked], axis=1)
    block = _blocks(hidden)[1]
    width = max(_SLICE // hidden.shape[0] // block, 1) * block
    axis = 0 if options.tied else 1

    def add(start: Array | int, width: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """What the slice of the vocabulary from `start` on adds to both gradients."""
        dh, dw = carry
        scalars = _scalars(options, matrix, temperature, first, start)
        slope = _slopes(options.tied, width, *scalars, hidden, weights, place, numbers)
        own = jax.lax.dynamic_slice_in_dim(weights, start, width, axis)
        dh = dh + _product(slope, own, (1, axis))
        part = _product(*((slope, hidden) if options.tied else (hidden, slope)), (0, 0))
        part = part.astype(dw.dtype)
        return dh, jax.lax.dynamic_update_slice_in_dim(dw, part, start, axis)

    carry = hidden.astype(jnp.float32) * 0, matrix * 0
    whole = size // width
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: add(i * width, width, c), carry)
    if size % width:
        carry = add(whole * width, size % width, carry)
    dh, dw = carry
    none = [np.zeros(x.shape, jax.dtypes.float0) for x in (ids, first)]
    return dh.astype(hidden.dtype), dw, none[0], jnp.zeros_like(temperature), none[1]


_run.defvjp(_forward, _backward)


def _product(x: Array, y: Array, over: tuple[int, int]) -> Array:
    """float32, of operands that are not rounded."""
    dims = (((over[0],), (over[1],)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dims, precision=highest, preferred_element_type=jnp.float32)


def _scalars(
    options: Options, matrix: Array, temperature: Array, first: Array, start: Array | int
) -> tuple[Array, Array]:
    """For a kernel: 1 / temperature; where its slice starts, and the place past the last token."""
    size = options.vocabulary(matrix)
    stop = first * 0 + size
    if options.num_tokens is not None:
        stop = jnp.clip(options.num_tokens - first, 0, size)
    places = jnp.stack([first * 0 + start, stop]).astype(jnp.int32)
    return (1 / temperature).reshape(1), places


def _blocks(hidden: Array) -> tuple[int, int]:
    """Tokens of a block, and ids."""
    fits = max(_BLOCK_BYTES // (hidden.shape[1] * hidden.dtype.itemsize) // LANES, 1) * LANES
    ids = min(fits, _MOST)
    return min(ids, round_up(hidden.shape[0], 16)), ids


def _statistics(
    tied: bool, inverse: Array, places: Array, hidden: Array, weights: Array, ids: Array
) -> Array:
    """float32 [N, LANES]: the columns `_LSE`, `_MEAN`, and from `_PICKED` on the picked logits."""
    from jax.experimental.pallas import tpu as pltpu

    tokens, size = hidden.shape[0], weights.shape[0 if tied else 1]
    bn = _blocks(hidden)[0]
    kernel = functools.partial(_statistics_kernel, tied)
    scratch = [pltpu.VMEM((bn, LANES), jnp.float32) for _ in range(4)]
    out = (tokens, LANES), jnp.float32, (bn, LANES)
    run = _call(kernel, tied, size, (hidden, ids), out, scratch, "logprobs_statistics")
    return run(places, inverse, hidden, weights, ids)


def _slopes(
    tied: bool,
    width: int,
    inverse: Array,
    places: Array,
    hidden: Array,
    weights: Array,
    ids: Array,
    numbers: Array,
) -> Array:
    """Gradients of logits over the temperature, [N, width] in hidden's dtype.

    `numbers` has for each token its lse, the a and b of `slopes`, and the picked logits' gradients.
    """
    bn, bv = _blocks(hidden)
    kernel = functools.partial(_slopes_kernel, tied)
    out = (hidden.shape[0], width), hidden.dtype, (bn, bv)
    arrays = (hidden, ids, numbers)
    run = _call(kernel, tied, width, arrays, out, [], "logprobs_slopes")
    return run(places, inverse, hidden, weights, ids, numbers)


def _call(
    kernel: Any, tied: bool, size: int, arrays: tuple, out: tuple, scratch: list, name: str
) -> Any:
    """A kernel over (block of tokens, block of ids) of `size` ids.

    Args:
      kernel: The kernel.
      tied: Whether the matrix is [V, D].
      size: Ids, from the one on that the scalars say.
      arrays: What it takes for each token, hidden states first.
      out: Shape, dtype and block of what it gives; a block of LANES goes over all ids.
      scratch: Its scratch memory.
      name: Its name.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    hidden = arrays[0]
    bn, bv = _blocks(hidden)
    d = hidden.shape[1]

    def at_ids(i: Any, j: Any, places: Any) -> tuple:
        block = jax.lax.div(places[0], bv) + j
        return (block, 0) if tied else (0, block)

    def of_tokens(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((bn, x.shape[1]), lambda i, j, *_: (i, 0))

    matrix = pl.BlockSpec((bv, d) if tied else (d, bv), at_ids)
    over_ids = len(scratch) > 0
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-hidden.shape[0] // bn), -(-size // bv)),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                of_tokens(hidden),
                matrix,
                *map(of_tokens, arrays[1:]),
            ],
            out_specs=pl.BlockSpec(out[2], lambda i, j, *_: (i, 0 if over_ids else j)),
            scratch_shapes=scratch,
        ),
        out_shape=result(*out[:2], hidden),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpreted(),
        name=name,
    )


def _logits(tied: bool, places: Any, inverse: Any, hidden: Any, matrix: Any) -> tuple[Array, Array]:
    """The logits of a step's block, and the places of its ids."""
    from jax.experimental import pallas as pl

    z = dot(hidden[...], matrix[...], (1, 1 if tied else 0), exact=True) * inverse[0]
    place = jax.lax.broadcasted_iota(jnp.int32, (1, z.shape[1]), 1)
    place += places[0] + pl.program_id(1) * z.shape[1]
    return jnp.where(place < places[1], z, MASKED_LOGIT), place


def _statistics_kernel(tied: bool, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    places, inverse, hidden, matrix, ids, out, top, total, moment, picked = refs
    at, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(at == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, MASKED_LOGIT, jnp.float32)
        for sums in (total, moment, picked):
            sums[...] = jnp.zeros(sums.shape, jnp.float32)

    z, place = _logits(tied, places, inverse, hidden, matrix)
    before = top[:, :1]
    highest = jnp.maximum(before, z.max(1, keepdims=True))
    shrink, weights = jnp.exp(before - highest), jnp.exp(z - highest)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    for i in range(ids.shape[1]):
        own = jnp.where(place == ids[:, i : i + 1], z, 0.0).sum(1, keepdims=True)
        picked[...] += jnp.where(column == _PICKED + i, own, 0.0)
    for sums, more in ((total, weights), (moment, weights * z)):
        sums[...] = sums[...] * shrink + more.sum(1, keepdims=True)
    top[...] = jnp.broadcast_to(highest, top.shape)

    @pl.when(at == last)
    def _() -> None:
        lse = top[...] + jnp.log(total[...])
        mean = jnp.where(column == _MEAN, moment[...] / total[...], picked[...])
        out[...] = jnp.where(column == _LSE, lse, mean)


def _slopes_kernel(tied: bool, *refs: Any) -> None:
    places, inverse, hidden, matrix, ids, numbers, out = refs
    z, place = _logits(tied, places, inverse, hidden, matrix)
    lse, a, b = (numbers[:, i : i + 1] for i in range(3))
    slope = jnp.exp(z - lse) * (a + b * z)
    for i in range(ids.shape[1]):
        slope += jnp.where(place == ids[:, i : i + 1], numbers[:, 3 + i : 4 + i], 0.0)
    out[...] = (slope * inverse[0]).astype(out.dtype)
