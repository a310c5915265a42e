"""Gathers of rows whose transposes are gathers too.

XLA's scatter-add is slow on CPU and unordered on GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.custom_vjp
def pick_rows(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], where `inverse` is the output row that reads each x row.

    An index out of range gives 0; an inverse out of range belongs to a row that is not read.
    """
    return rows_at(x, index)


def _pick_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, Array]:
    return rows_at(x, index), inverse


def _pick_backward(inverse: Array, g: Array) -> tuple[Array, None, None]:
    return rows_at(g, inverse), None, None


def rows_at(x: Array, index: Array) -> Array:
    """x[index], 0 for an index out of range; its transpose is a scatter."""
    return x.at[index].get(mode="fill", fill_value=0)


pick_rows.defvjp(_pick_forward, _pick_backward)


@jax.custom_vjp
def gather_rows(x: Array, index: Array, readers: Array) -> Array:
    """x[index], its last row for an index out of range.

    `readers` [N, k] are the output rows that read each x row; out of
    range where there are fewer.
    """
    return x.at[index].get(mode="clip")


def _gather_forward(x: Array, index: Array, readers: Array) -> tuple[Array, Array]:
    return gather_rows(x, index, readers), readers


def _gather_backward(readers: Array, g: Array) -> tuple[Array, None, None]:
    return rows_at(g, readers).astype(jnp.float32).sum(1).astype(g.dtype), None, None


gather_rows.defvjp(_gather_forward, _gather_backward)
