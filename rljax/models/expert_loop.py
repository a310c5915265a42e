"""Experts one after the other, in blocks of the rows that they were given: nothing is laid out.

A layout for all experts at once has a place for every row that there could be: where devices share
the experts, as many as the tokens of all of them times k, however few come. Here one block of rows
exists at a time, so memory is that of the tokens, and work that of the rows that there are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.grouped_matmul import Stage

from rljax.mesh import vary_alike

_LARGEST, _SMALLEST = 1024, 8  # rows of a block


def block_size(rows: int, experts: int) -> int:
    """Rows of a block: half of what an expert is expected to be given, as a power of two.

    Args:
      rows: Expected of all experts together.
      experts: Their number.
    """
    half = max(rows // (2 * experts), 1)
    return min(max(1 << (half.bit_length() - 1), _SMALLEST), _LARGEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def loop_experts(
    stages: Sequence[Stage],
    params: dict[str, Array],
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    block: int,
) -> Float[Array, "N D"]:
    """Σ over the chosen experts of weight · expert, added up in float32.

    The backward pass computes each block again; an expert's gradients add up in float32.

    Args:
      stages: Take the rows of one expert through it, as for `rljax_kernels.grouped_matmul`.
      params: Pytree of arrays [E, ...], in the compute dtype.
      x: Hidden states, in the compute dtype.
      chosen: Experts of each token, none of them twice; those not below E add nothing.
      weights: Their weights, float32.
      block: Rows that are computed at a time.

    Returns:
      float32.
    """
    return _forward(stages, params, x, chosen, weights, block)[0]


class _Rows(NamedTuple):
    """A block of rows of one expert; places without a row are out of range, each its own.

    Attributes:
      token: The tokens that they are of.
      pair: Places in [N · k] of token and expert.
    """

    token: Int[Array, " block"]
    pair: Int[Array, " block"]


class _Order(NamedTuple):
    """The pairs of token and expert, sorted by expert.

    Attributes:
      pairs: Places in [N · k], and a block more.
      starts: Where each expert's begin.
      sizes: How many there are.
    """

    pairs: Int[Array, " M"]
    starts: Int[Array, " E"]
    sizes: Int[Array, " E"]

    def blocks(self, expert: Array, block: int) -> Int[Array, ""]:
        """How many blocks an expert needs."""
        return -(-self.sizes[expert] // block)

    def rows(self, expert: Array, i: Array, block: int, tokens: int, k: int) -> _Rows:
        """The i-th block of an expert."""
        pair = jax.lax.dynamic_slice_in_dim(self.pairs, self.starts[expert] + i * block, block)
        place = jnp.arange(block, dtype=jnp.int32)
        inside = place < self.sizes[expert] - i * block
        # Out of range, and none twice: what is scattered there is dropped.
        return _Rows(
            jnp.where(inside, pair // k, tokens + place),
            jnp.where(inside, pair, tokens * k + place),
        )


def _sort(chosen: Int[Array, "N k"], experts: int, block: int) -> _Order:
    flat = chosen.reshape(-1)
    pairs = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    return _Order(jnp.pad(pairs, (0, block)), jnp.cumsum(sizes) - sizes, sizes)


def _one_expert(
    stages: Sequence[Stage], params: dict[str, Array], x: Array, weights: Array
) -> Float[Array, "block D"]:
    value: Any = x
    for stage in stages:
        value = stage(_dot, value, params)
    return value.astype(jnp.float32) * weights[:, None]


def _dot(x: Array, weights: Array, bias: Array | None = None) -> Array:
    y = x @ weights
    return y if bias is None else y + bias


def _at(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="fill", fill_value=0)


def _add(total: Array, index: Array, rows: Array) -> Array:
    """Adds rows of different tokens: in a fixed order, so that sums are the same in every run."""
    return total.at[index].add(rows, mode="drop", unique_indices=True)


def _of(params: Any, expert: Array) -> Any:
    return jax.tree.map(lambda p: p[expert], params)


def _zeros(shape: tuple[int, ...], like: Any) -> Array:
    """float32 zeros that inside `shard_map` count as differing where the others do."""
    return vary_alike((jnp.zeros(shape, jnp.float32), like))[0]


def _forward(
    stages: Sequence[Stage],
    params: dict[str, Array],
    x: Array,
    chosen: Array,
    weights: Array,
    block: int,
) -> tuple[Array, tuple]:
    (n, k), experts = chosen.shape, params["gate"].shape[0]
    order, flat = _sort(chosen, experts, block), weights.reshape(-1)

    def turn(expert: Array, out: Array) -> Array:
        own = _of(params, expert)

        def one(i: Array, out: Array) -> Array:
            rows = order.rows(expert, i, block, n, k)
            part = _one_expert(stages, own, _at(x, rows.token), _at(flat, rows.pair))
            return _add(out, rows.token, part)

        return jax.lax.fori_loop(0, order.blocks(expert, block), one, out)

    out = jax.lax.fori_loop(0, experts, turn, _zeros(x.shape, (params, x, flat)))
    return out, (params, x, chosen, weights)


def _backward(
    stages: Sequence[Stage], block: int, saved: tuple, g: Float[Array, "N D"]
) -> tuple[Any, Array, np.ndarray, Array]:
    params, x, chosen, weights = saved
    (n, k), experts = chosen.shape, params["gate"].shape[0]
    order, flat = _sort(chosen, experts, block), weights.reshape(-1)
    like = (params, x, flat, g)

    def turn(expert: Array, carry: Any) -> Any:
        own = _of(params, expert)

        def one(i: Array, carry: Any) -> Any:
            dx, dw, mine = carry
            rows = order.rows(expert, i, block, n, k)
            run = functools.partial(_one_expert, stages)
            pull = jax.vjp(run, own, _at(x, rows.token), _at(flat, rows.pair))[1]
            dp, dx_part, dw_part = pull(_at(g, rows.token))
            dx = _add(dx, rows.token, dx_part.astype(jnp.float32))
            dw = dw.at[rows.pair].set(dw_part, mode="drop", unique_indices=True)
            return dx, dw, jax.tree.map(lambda t, p: t + p.astype(jnp.float32), mine, dp)

        dx, dw, total = carry
        zero = jax.tree.map(lambda p: _zeros(p.shape, like), own)
        dx, dw, mine = jax.lax.fori_loop(0, order.blocks(expert, block), one, (dx, dw, zero))
        total = jax.tree.map(lambda t, m: t.at[expert].set(m.astype(t.dtype)), total, mine)
        return dx, dw, total

    total = vary_alike((jax.tree.map(jnp.zeros_like, params), like))[0]
    init = (_zeros(x.shape, like), _zeros(flat.shape, like), total)
    dx, dw, total = jax.lax.fori_loop(0, experts, turn, init)
    none = np.zeros(chosen.shape, jax.dtypes.float0)
    return total, dx.astype(x.dtype), none, dw.reshape(n, k).astype(weights.dtype)


loop_experts.defvjp(_forward, _backward)
