"""Grouped matmul on TPU: XLA's products of rows, our own kernel for the weights' gradient.

XLA compiles `ragged_dot` to a grouped kernel, forwards and for the gradient of rows. The gradient
of weights it compiles to a dense product over all groups, whose cost grows with their number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.pallas_tools import VMEM_BYTES, dot, interpreted, result, spread, vary_alike

_ROWS, _SIDE = 512, 1024  # the most of a block: rows, and columns of either array


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (a record with `dtype`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    return None


def run(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As `rljax_kernels.grouped_matmul.grouped_matmul`."""
    return _multiply(*vary_alike((x, weights, group_sizes.astype(jnp.int32))))


@jax.custom_vjp
def _multiply(x: Array, weights: Array, sizes: Array) -> Array:
    return _rows(x, weights, sizes)


def _rows(x: Array, weights: Array, sizes: Array) -> Array:
    # A kernel that skips blocks without rows leaves there what lay in memory.
    y = jax.lax.ragged_dot(x, weights, sizes)
    return jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None], y, 0)


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, tuple]:
    return _multiply(x, weights, sizes), (x, weights, sizes)


def _backward(saved: tuple, g: Array) -> tuple:
    x, weights, sizes = saved
    dx = _rows(g, weights.swapaxes(1, 2), sizes)
    dw = gradient_of_weights(x, g, sizes).astype(weights.dtype)
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0)


_multiply.defvjp(_forward, _backward)


def gradient_of_weights(
    x: Float[Array, "M D"], g: Float[Array, "M F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "E D F"]:
    """The product of each group's rows of x, transposed, with its rows of g; 0 for an empty group.

    Sums are float32; the result has x's dtype. Rows past the last group do not count, whatever they
    hold.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (m, d), f, e = x.shape, g.shape[1], group_sizes.shape[0]
    bm, bd, bf = _block(m, _ROWS, 16), _block(d, _SIDE, 128), _block(f, _SIDE, 128)
    steps, starts, count = _steps(group_sizes, -(-m // bm), bm)

    def of_rows(column: int) -> Any:
        return lambda *at: (at[3][at[2]] & 0xFFFF, at[column])

    def of_groups(*at: Any) -> tuple:
        return jax.lax.shift_right_logical(at[3][at[2]], 16), at[0], at[1]

    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(-(-d // bd), -(-f // bf), count),
            in_specs=[pl.BlockSpec((bm, bd), of_rows(0)), pl.BlockSpec((bm, bf), of_rows(1))],
            out_specs=pl.BlockSpec((None, bd, bf), of_groups),
            scratch_shapes=[pltpu.VMEM((bd, bf), jnp.float32)],
        ),
        out_shape=result((e, d, f), x.dtype, x),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * d * f,
            bytes_accessed=(m * d * -(-f // bf) + m * f * -(-d // bd) + e * d * f)
            * x.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpreted(),
        name="grouped_matmul_weights",
    )(steps, starts, x, g)


def _block(size: int, most: int, multiple: int) -> int:
    """Blocks of one size, of a multiple, that reach over the end as little as may be."""
    blocks = -(-size // most)
    return -(-size // (multiple * blocks)) * multiple


def _steps(sizes: Array, blocks: int, bm: int) -> tuple[Array, Array, Array]:
    """The steps of the kernel: group · 2^16 + block of rows; the groups' first rows; their count.

    A group takes a step for each block that holds rows of it, an empty one a single step.
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = jnp.minimum(starts // bm, blocks - 1)
    takes = jnp.where(sizes > 0, (ends - 1) // bm - first + 1, 1)
    group, turn, count = spread(takes, blocks + 2 * sizes.shape[0])
    block = jnp.clip(first[group] + turn, 0, blocks - 1)
    return (group << 16) + block, jnp.concatenate([starts, ends[-1:]]), count


def _kernel(steps: Any, starts: Any, x: Any, g: Any, out: Any, sums: Any) -> None:
    from jax.experimental import pallas as pl

    at, last = pl.program_id(2), pl.num_programs(2) - 1

    def group_of(step: Any) -> Any:
        return jax.lax.shift_right_logical(steps[step], 16)

    group, row = group_of(at), (steps[at] & 0xFFFF) * x.shape[0]
    start, stop = starts[group], starts[group + 1]

    @pl.when((at == 0) | (group_of(jnp.maximum(at - 1, 0)) != group))
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def add(masked: bool) -> None:
        values = x[...], g[...]
        if masked:  # other groups' rows, and what lies behind the array's end
            place = row + jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
            mine = (place >= start) & (place < stop)
            values = tuple(jnp.where(mine, v, jnp.zeros_like(v)) for v in values)
        sums[...] += dot(*values, (0, 0))

    whole = (row >= start) & (row + x.shape[0] <= stop)
    pl.when(whole)(lambda: add(False))
    pl.when(~whole & (stop > start))(lambda: add(True))

    @pl.when((at == last) | (group_of(jnp.minimum(at + 1, last)) != group))
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)
