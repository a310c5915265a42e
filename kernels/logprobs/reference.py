"""Statistics of logits that all exist at once: plain, exact, for few tokens and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from rljax_kernels.logprobs.statistics import MASKED_LOGIT, Options, Statistics, places_of


def run(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    ids: Int[Array, "N n"],
    temperature: Float[Array, ""],
    first: Int[Array, ""],
    options: Options,
) -> Statistics:
    """As `rljax_kernels.logprobs.statistics_of`."""
    z = logits(hidden, matrix, temperature, first, options)
    top = jax.lax.stop_gradient(z).max(-1, keepdims=True)
    exp = jnp.exp(z - top)
    total = exp.sum(-1)
    place = places_of(ids, first, z.shape[1])
    picked = jnp.take_along_axis(z, jnp.maximum(place, 0), axis=1)
    return Statistics(
        picked=jnp.where(place >= 0, picked, 0.0),
        lse=top[:, 0] + jnp.log(total),
        mean=(exp * z).sum(-1) / total,
    )


def logits(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    temperature: Float[Array, ""],
    first: Int[Array, ""],
    options: Options,
) -> Float[Array, "N V"]:
    """float32 logits over the temperature, those of ids without a token `MASKED_LOGIT`."""
    z = jax.lax.dot_general(
        hidden,
        matrix.astype(hidden.dtype),
        (((1,), (1 if options.tied else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    z = z / temperature
    if options.num_tokens is None:
        return z
    return jnp.where(first + jnp.arange(z.shape[1]) < options.num_tokens, z, MASKED_LOGIT)
