"""Statistics of logits, formed for a chunk of tokens at a time, in plain JAX.

The backward pass is written by hand: it forms the logits of each chunk once more, and from the
statistics that the forward pass kept their gradients in one pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.logprobs import reference
from rljax_kernels.logprobs.statistics import Options, Statistics, places_of, slopes
from rljax_kernels.varying import vary_as


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def run(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    ids: Int[Array, "N n"],
    temperature: Float[Array, ""],
    first: Int[Array, ""],
    options: Options,
) -> Statistics:
    """As `rljax_kernels.logprobs.statistics_of`."""
    return _forward(hidden, matrix, ids, temperature, first, options)[0]


def _forward(
    hidden: Array, matrix: Array, ids: Array, temperature: Array, first: Array, options: Options
) -> tuple[Statistics, tuple]:
    def part(args: tuple[Array, Array]) -> Statistics:
        return reference.run(args[0], matrix, args[1], temperature, first, options)

    pieces = _cut((hidden, ids), options.chunk)
    found = _join(jax.lax.map(part, pieces), len(ids)) if pieces else part((hidden, ids))
    return found, (hidden, matrix, ids, temperature, first, found)


def _backward(options: Options, saved: tuple, g: Statistics) -> tuple:
    hidden, matrix, ids, temperature, first, found = saved
    size = options.vocabulary(matrix)
    weights = matrix.astype(hidden.dtype)
    place = places_of(ids, first, size, options.num_tokens)
    places = vary_as(matrix, jnp.arange(size))

    def part(hidden: Array, place: Array, lse: Array, a: Array, b: Array, picked: Array) -> tuple:
        """The gradients of a chunk's hidden states, and what it adds to the matrix's."""
        z = reference.logits(hidden, weights, temperature, first, options)
        slope = jnp.exp(z - lse[:, None]) * (a[:, None] + b[:, None] * z)
        if place.shape[1] == 1:
            slope = slope + jnp.where(place == places, picked, 0.0)
        else:
            rows = jnp.arange(len(place))[:, None]
            slope = slope.at[rows, jnp.where(place < 0, size, place)].add(picked, mode="drop")
        slope = (slope / temperature).astype(hidden.dtype)
        dh = _dot(slope, weights, 1, 0 if options.tied else 1)
        return dh.astype(hidden.dtype), _dot(hidden, slope, 0, 0)

    arrays = (hidden, place, found.lse, *slopes(found, g), g.picked)
    pieces = _cut(arrays, options.chunk)
    if pieces:

        def add(total: Array, piece: tuple) -> tuple[Array, Array]:
            dh, dw = part(*piece)
            return total + dw, dh

        zeros = vary_as((arrays, matrix), jnp.zeros((hidden.shape[1], size), jnp.float32))
        dw, dh = jax.lax.scan(add, zeros, pieces)
        dh = _join(dh, len(hidden))
    else:
        dh, dw = part(*arrays)
    dw = dw.T if options.tied else dw  # XLA on CPU is slower at the product that needs no turning
    none = [np.zeros(x.shape, jax.dtypes.float0) for x in (ids, first)]
    return dh, dw.astype(matrix.dtype), none[0], jnp.zeros_like(temperature), none[1]


run.defvjp(_forward, _backward)


def _dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    return jax.lax.dot_general(
        x,
        y,
        (((of_x,), (of_y,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _cut(arrays: Any, chunk: int) -> Any:
    """Arrays [N, ...] as equal chunks [parts, n, ...], padded with zeros; None where one is all."""
    tokens = len(jax.tree.leaves(arrays)[0])
    parts = -(-tokens // max(chunk, 1))
    if parts <= 1:
        return None
    width = -(-tokens // parts)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, parts * width - tokens), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(parts, width, *x.shape[1:])

    return jax.tree.map(cut, arrays)


def _join(pieces: Any, tokens: int) -> Any:
    """The inverse of `_cut`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], pieces)
