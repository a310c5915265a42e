"""What of the logits of tokens is kept, and how the gradients of logits follow from it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

MASKED_LOGIT = -1e30
"""The logit of an id without a token; finite, so that a slice of nothing else gives no NaN."""


@struct.dataclass
class Statistics:
    """What logits [N, V] come to, or those of a slice of the vocabulary; all float32.

    Attributes:
      picked: The logits of the ids asked for, 0 for those that are not in the slice.
      lse: The logarithm of the sum of exp(logit).
      mean: The mean of the logits under their softmax.
    """

    picked: Float[Array, "N n"]
    lse: Float[Array, " N"]
    mean: Float[Array, " N"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What of a call is known when it is compiled.

    Attributes:
      tied: Whether the matrix is an embedding [V, D], and not [D, V].
      num_tokens: Ids from this one on, over all slices, have no token; None: all have one.
      chunk: Tokens whose logits may exist at a time, for implementations that form them.
    """

    tied: bool
    num_tokens: int | None
    chunk: int

    def vocabulary(self, matrix: Array) -> int:
        """V, of this slice."""
        return matrix.shape[0 if self.tied else 1]


def merged(found: Statistics, axis: str) -> Statistics:
    """The statistics of all slices of a vocabulary that is split over a mesh axis."""
    top = jax.lax.pmax(jax.lax.stop_gradient(found.lse), axis)
    lse = top + jnp.log(jax.lax.psum(jnp.exp(found.lse - top), axis))
    # A slice without any token has a share of 0.
    mean = jax.lax.psum(jnp.exp(found.lse - lse) * found.mean, axis)
    return Statistics(jax.lax.psum(found.picked, axis), lse, mean)


def slopes(found: Statistics, g: Statistics) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """A and b of each token: p (a + b z) is the gradient of its logit z of probability p.

    To it comes, of an id that is picked, the gradient of `picked`.

    Args:
      found: The statistics.
      g: Their gradients.
    """
    return g.lse + g.mean * (1 - found.mean), g.mean


def places_of(
    ids: Int[Array, "N n"], first: Int[Array, ""], size: int, num_tokens: int | None = None
) -> Int[Array, "N n"]:
    """Where ids stand in the slice of the vocabulary from `first` on; -1 for those that do not.

    With `num_tokens` neither do ids without a token: their logits have no gradient.
    """
    here = ids - first
    inside = (ids >= 0) & (here >= 0) & (here < size)
    if num_tokens is not None:
        inside &= ids < num_tokens
    return jnp.where(inside, here, -1)
