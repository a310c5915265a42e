"""Grouped matmul by batched products of XLA over blocks of rows, each of one group.

Rows go through all stages block by block, so that the matrices of a group are taken once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels.grouped_matmul.layout import RowLayout, group_of, row_layout

Dot = Callable[..., Array]
"""`dot(x, weights, bias=None)`: each row times its group's matrix, plus its group's bias."""

Stage = Callable[[Dot, Any, Any], Any]
"""`stage(dot, value, params)`: the next value of each row, from its value and its group's
parameters. Values are pytrees of arrays [rows, ...]; parameters meet rows through `dot` alone."""


def run(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As `rljax_kernels.grouped_matmul.grouped_matmul`."""
    laid = row_layout(x.shape[0], weights.shape[0], "blocks")
    place = laid.places(group_of(group_sizes, jnp.arange(x.shape[0])), group_sizes)
    placed = jnp.zeros((laid.rows, x.shape[1]), x.dtype).at[place].set(x, mode="drop")
    out = over_blocks((_multiply,), placed, weights, group_sizes, laid)
    return out.at[place].get(mode="fill", fill_value=0)


def _multiply(dot: Dot, x: Array, weights: Array) -> Array:
    return dot(x, weights)


def _dot(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """For one block and its group, or as many blocks as groups."""
    y = x @ weights
    return y if bias is None else y + bias[..., None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def over_blocks(
    stages: tuple[Stage, ...], x: Array, params: Any, sizes: Array, laid: RowLayout
) -> Array:
    """`rljax_kernels.grouped_matmul.grouped` of a layout that has blocks."""
    return _blocks_forward(stages, x, params, sizes, laid, kept=len(stages) - 1)[0]


def _over_groups(laid: RowLayout, sizes: Array, turn: Callable, init: Any, *like: Any) -> Any:
    """Carries `init` through `turn(carry, group, start, stop)` of the groups that need it.

    Those are the groups with blocks behind the first ones, from `start` on and below `stop`. A loop
    takes each group's matrices once, where one batched product would first copy them for every
    block that there could be.
    """
    # A 0 that inside shard_map counts as differing over the axes over which these do, as the carry
    # of a loop has to.
    leaves = [jnp.isnan(x.reshape(-1)[0]) for x in jax.tree.leaves(like)]
    nothing = sum(x.astype(jnp.int32) * 0 for x in leaves) + sizes[0] * 0
    init = jax.tree.map(lambda x: x + nothing.astype(x.dtype), init)
    blocks = laid.blocks_behind(sizes)
    stops, needy = jnp.cumsum(blocks), jnp.argsort(blocks == 0, stable=True)

    def body(i: Array, carry: Any) -> Any:
        group = needy[i]
        return turn(carry, group, stops[group] - blocks[group], stops[group])

    return jax.lax.fori_loop(0, (blocks > 0).sum(), body, init)


def _parts(x: Array, laid: RowLayout) -> tuple[Array, Array]:
    """Rows as blocks: the first of each group, and those behind."""
    head = laid.groups * laid.first
    return (
        x[:head].reshape(laid.groups, -1, *x.shape[1:]),
        x[head:].reshape(-1, laid.block, *x.shape[1:]),
    )


def _whole(parts: list[Array]) -> Array:
    """The inverse of `_parts`, of those there are."""
    rows = [x.reshape(-1, *x.shape[2:]) for x in parts]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows)


def _run(stages: tuple[Stage, ...], value: Any, params: Any) -> list[Any]:
    """The values after each stage."""
    values = []
    for stage in stages:
        value = stage(_dot, value, params)
        values.append(value)
    return values


def _put(all_: Any, i: Array, one: Any) -> Any:
    """Each array with its i-th entry replaced."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.tree.map(lambda a, o: put(a, o, index=i), all_, one)


def _blocks_forward(
    stages: tuple[Stage, ...], x: Array, params: Any, sizes: Array, laid: RowLayout, kept: int = 0
) -> tuple[Array, tuple]:
    """The last values, and with them what backward needs: those from number `kept` on."""
    head, behind = _parts(x, laid)
    first: list[Any] = []
    later: list[Any] = []
    if laid.first:
        first = _run(stages, head, params)[kept:]
    if behind.shape[0]:

        def run(i: Array | int, own: Any) -> list[Any]:
            return _run(stages, behind[i], own)[kept:]

        def turn(values: Any, group: Array, start: Array, stop: Array) -> Any:
            own = _of(params, group)
            return jax.lax.fori_loop(start, stop, lambda i, v: _put(v, i, run(i, own)), values)

        shapes = jax.eval_shape(lambda: run(0, _of(params, 0)))
        zeros = jax.tree.map(lambda s: jnp.zeros((len(behind), *s.shape), s.dtype), shapes)
        later = _over_groups(laid, sizes, turn, zeros, x, params)
    out = _whole([values[-1] for values in (first, later) if values])
    return out, (x, first[:-1], later[:-1], params, sizes)


def _of(params: Any, group: Array | int) -> Any:
    return jax.tree.map(lambda p: p[group], params)


def _pull(stages: tuple[Stage, ...], values: list[Any], params: Any, g: Array) -> tuple[Array, Any]:
    """Gradients of the first value and of the parameters."""
    total = None
    for stage, value in zip(reversed(stages), reversed(values), strict=True):
        g, own = jax.vjp(functools.partial(stage, _dot), value, params)[1](g)
        total = own if total is None else jax.tree.map(jnp.add, total, own)
    return g, total


def _blocks_backward(
    stages: tuple[Stage, ...], laid: RowLayout, saved: tuple, g: Array
) -> tuple[Array, Any, np.ndarray]:
    x, first, later, params, sizes = saved
    (head, behind), (g_head, g_behind) = _parts(x, laid), _parts(g, laid)
    dx: list[Array] = []
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    if laid.first:
        own, total = _pull(stages, [head, *first], params, g_head)
        dx.append(own)
    if behind.shape[0]:

        def turn(carry: Any, group: Array, start: Array, stop: Array) -> Any:
            own = _of(params, group)

            def block(i: Array, carry: Any) -> Any:
                dx, total = carry
                values = [behind[i], *(jax.tree.map(lambda v: v[i], value) for value in later)]
                g, part = _pull(stages, values, own, g_behind[i])
                return _put(dx, i, g), jax.tree.map(lambda t, p: t + p, total, part)

            dx, total = carry
            dx, mine = jax.lax.fori_loop(start, stop, block, (dx, _of(total, group)))
            return dx, _put(total, group, mine)

        # Sums of many blocks are kept in float32.
        total = jax.tree.map(lambda t: t.astype(jnp.float32), total)
        init = jnp.zeros_like(behind), total
        own, total = _over_groups(laid, sizes, turn, init, x, params, g)
        dx.append(own)
    total = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
    return _whole(dx), total, np.zeros(sizes.shape, jax.dtypes.float0)


over_blocks.defvjp(_blocks_forward, _blocks_backward)
