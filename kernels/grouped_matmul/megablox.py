"""Grouped matmul on TPU by JAX's megablox kernels, with both gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.pallas_tools import interpreted, pad_to, refuse_checks

_ROWS, _SIDE = 512, 1024  # the most of a block: rows, and columns of either array in bfloat16


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (a record with `dtype`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    return None


def run(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As `rljax_kernels.grouped_matmul.grouped_matmul`.

    Its kernels do not say over which mesh axes their results differ: inside `jax.shard_map` they
    need `check_vma=False`.

    Raises:
      ValueError: They are called there with its checks.
    """
    refuse_checks(x, "grouped_matmul by 'megablox'", "pallas")
    return _multiply(x, weights, group_sizes.astype(jnp.int32))


@jax.custom_vjp
def _multiply(x: Array, weights: Array, sizes: Array) -> Array:
    return _rows(x, weights, sizes, transposed=False)


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, tuple]:
    return _multiply(x, weights, sizes), (x, weights, sizes)


def _backward(saved: tuple, g: Array) -> tuple:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, weights, sizes = saved
    dx = _rows(g, weights, sizes, transposed=True)
    m, *sides = _tiles(x, *weights.shape[1:])
    size = -(-x.shape[0] // m) * m
    # The library's transpose of what it is given undoes this one.
    dw = tgmm(
        pad_to(x, 0, size).swapaxes(0, 1),
        pad_to(g, 0, size),
        sizes,
        weights.dtype,
        (m, *sides),
        interpret=interpreted(),
    )
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0)


_multiply.defvjp(_forward, _backward)


def _rows(x: Array, weights: Array, sizes: Array, transposed: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    inner, outer = weights.shape[1:][::-1] if transposed else weights.shape[1:]
    tiles = _tiles(x, inner, outer)
    padded = pad_to(x, 0, -(-x.shape[0] // tiles[0]) * tiles[0])
    out = gmm(
        padded,
        weights,
        sizes,
        x.dtype,
        tiles,
        transpose_rhs=transposed,
        interpret=interpreted(),
    )[: x.shape[0]]
    # Blocks without any group's rows are never written.
    return jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None], out, 0)


def _tiles(x: Array, inner: int, outer: int) -> tuple[int, int, int]:
    """Rows, inner and outer columns of a block: such as fit in what these kernels may use."""
    side = _SIDE * 2 // x.dtype.itemsize

    def fit(size: int, most: int, multiple: int) -> int:
        blocks = -(-size // most)
        return -(-size // (multiple * blocks)) * multiple

    return fit(x.shape[0], _ROWS, 16), fit(inner, side, 128), fit(outer, side, 128)
