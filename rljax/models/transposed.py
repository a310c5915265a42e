"""Weights as the left operands of their products, which few rows on a CPU go through faster."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float


@struct.dataclass
class Transposed:
    """A weight [in..., out...] held as the matrix [out, in].

    XLA on CPU packs the right operand of a product anew each time, which for a few rows costs more
    than the product. With the weight on the left that is the rows, and the weight is read in order.

    Attributes:
      matrix: [..., out, in], in front the dimensions of stacked layers.
      shape: The shape of one layer's weight, [in..., out...] or [experts, in, out].
    """

    matrix: Float[Array, "... out in"]
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    def astype(self, dtype: Any) -> Transposed:
        """The same weight in another dtype."""
        return dataclasses.replace(self, matrix=self.matrix.astype(dtype))

    def product(self, x: Float[Array, "in N"], **options: Any) -> Float[Array, "out N"]:
        """`matrix @ x`; options are those of `jnp.matmul`.

        The barrier keeps XLA from exchanging the operands to spare a transposition of the result.
        """
        return jax.lax.optimization_barrier(jnp.matmul(self.matrix, x, **options))


def transpose_matrix(w: Array, contracted: int = 1, *, layers: bool = False) -> Transposed:
    """A weight [in..., out...], of which so many dimensions are contracted.

    Args:
      w: The weight; with `layers` stacked along a dimension in front.
      contracted: Dimensions of `in`.
      layers: Whether layers are stacked.
    """
    lead, shape = w.shape[:layers], w.shape[layers:]
    return Transposed(_turn(w.reshape(*lead, math.prod(shape[:contracted]), -1)), shape)


def transpose_experts(w: Float[Array, "layers E in out"], into: bool) -> Transposed:
    """All experts' matrices of stacked layers as one.

    Args:
      w: The weights.
      into: Whether tokens go into it, [E · out, in]; else it adds up what experts say,
        [out, E · in].
    """
    layers, e, inner, outer = w.shape
    shape = (e, inner, outer)
    if into:
        return Transposed(_turn(w).reshape(layers, e * outer, inner), shape)
    return Transposed(_turn(w.reshape(layers, e * inner, outer)), shape)


@jax.jit
def _turn(x: Array) -> Array:
    return x.swapaxes(-2, -1)
