"""Rows sorted by group through functions with one set of matrices a group: dropless mixtures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels import cpu

Backend = Literal["ragged", "blocks", "native"]

_LARGEST_FIRST, _BLOCK = 512, 128  # larger ones are no faster, and hold more padding


def choose_backend(wanted: Backend | Literal["auto"] = "auto", dtype: Any = jnp.float32) -> Backend:
    """The one rule by which rows are multiplied; `auto` takes what is fastest for the devices.

    `auto` is `ragged` (XLA's ragged_dot) on TPU and GPU. On CPU, where ragged_dot is slow, it is
    `native` (`rljax_kernels.cpu`, in C++) for float32 on one device, where these kernels can be
    built, and `blocks` (batched products of XLA) otherwise. Programs may be compiled for devices
    of another kind than those at hand: under `jax.set_mesh` the mesh's devices count. `native` has
    first derivatives only, in reverse mode.

    Args:
      wanted: A backend, or `auto`.
      dtype: That of rows and matrices.

    Raises:
      ValueError: The backend is unknown, or not for these devices or this dtype.
      rljax_kernels.cpu.UnavailableError: `native` is asked for and its kernels cannot be built.
    """
    on_cpu, is_float32 = _platform() == "cpu", jnp.dtype(dtype) == jnp.float32
    if wanted == "auto":
        if not on_cpu:
            return "ragged"
        alone = jax.sharding.get_abstract_mesh().size <= 1
        return "native" if is_float32 and alone and not cpu.unavailable_reason() else "blocks"
    if wanted not in ("ragged", "blocks", "native"):
        raise ValueError(
            f"grouped_matmul backend {wanted!r} is unknown; use 'auto', 'ragged', 'blocks' or "
            "'native'"
        )
    if wanted == "native":
        if not on_cpu:
            raise ValueError(
                f"backend 'native' is for cpu devices, got {_platform()}; use 'ragged'"
            )
        if not is_float32:
            raise ValueError(
                f"backend 'native' computes in float32, got {jnp.dtype(dtype).name}; use 'blocks'"
            )
        if reason := cpu.unavailable_reason():
            raise cpu.UnavailableError(reason)
    return wanted


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


Dot = Callable[..., Array]
"""`dot(x, weights, bias=None)`: each row times its group's matrix, plus its group's bias."""

Stage = Callable[[Dot, Any, Any], Any]
"""`stage(dot, value, params)`: the next value of each row, from its value and its group's
parameters. Values are pytrees of arrays [rows, ...]; parameters meet rows through `dot` alone."""


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    backend: Backend | Literal["auto"] = "auto",
) -> Float[Array, "M F"]:
    """Multiplies rows [sum of sizes before e, + group_sizes[e]) by `weights[e]`.

    Args:
      x: Rows sorted by group.
      weights: One matrix a group.
      group_sizes: Rows of each group, int32; their sum may be below M.
      backend: As for `choose_backend`.

    Returns:
      The products, in x's dtype; rows past the last group are 0. An empty group's weights get a
      gradient of exactly 0.

    Raises:
      ValueError: Shapes do not agree, or as `choose_backend`.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            "grouped_matmul needs x [M, D] and weights [E, D, F], got "
            f"{x.shape} and {weights.shape}"
        )
    if group_sizes.shape != weights.shape[:1]:
        raise ValueError(
            f"group_sizes {group_sizes.shape} must hold one size for each of the "
            f"{weights.shape[0]} matrices"
        )
    group_sizes = group_sizes.astype(jnp.int32)
    laid = row_layout(x.shape[0], weights.shape[0], choose_backend(backend, x.dtype))
    if not laid.block:
        return grouped((_multiply,), x, weights, group_sizes, laid)
    place = laid.places(_group(group_sizes, jnp.arange(x.shape[0])), group_sizes)
    placed = jnp.zeros((laid.rows, x.shape[1]), x.dtype).at[place].set(x, mode="drop")
    out = grouped((_multiply,), placed, weights, group_sizes, laid)
    return out.at[place].get(mode="fill", fill_value=0)


def _group(sizes: Array, index: Array) -> Array:
    """The group of each of some sorted rows or blocks."""
    return (jnp.cumsum(sizes) <= index[..., None]).sum(-1, dtype=jnp.int32)


def _multiply(dot: Dot, x: Array, weights: Array) -> Array:
    return dot(x, weights)


def reference(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """The same by a loop over all groups, each on all rows: plain, slow, for tests."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])
    out = jnp.zeros((x.shape[0], weights.shape[2]), x.dtype)
    for e in range(weights.shape[0]):
        mine = (row >= ends[e] - group_sizes[e]) & (row < ends[e])
        out = out + jnp.where(mine[:, None], x @ weights[e], 0)
    return out


class RowLayout(NamedTuple):
    """Where rows lie for `grouped`.

    Attributes:
      groups: Their number, E.
      rows: Places in all.
      first: Rows of the first block of each group, which is there whether it is used or not. All
        of these go through one batched product, which costs less than a loop. 0: there are none.
      block: Rows of each block behind them, all of one group; only those used cost anything.
        0: there are no blocks; rows lie one behind the other, as `ragged` and `native` have them.
      native: Whether they are multiplied as by the backend of that name.
    """

    groups: int
    rows: int
    first: int
    block: int
    native: bool = False

    def places(self, group: Int[Array, " M"], group_sizes: Int[Array, " E"]) -> Int[Array, " M"]:
        """The place of each sorted row, given its group; rows of no group get none: `rows`."""
        place = jnp.arange(group.shape[0], dtype=jnp.int32)
        if self.block:
            mine = jnp.minimum(group, self.groups - 1)
            rank = place - (jnp.cumsum(group_sizes) - group_sizes)[mine]
            blocks = self.blocks_behind(group_sizes)
            behind = self.groups * self.first + (jnp.cumsum(blocks) - blocks)[mine] * self.block
            inside = rank < self.first
            place = jnp.where(inside, mine * self.first + rank, behind + rank - self.first)
        return jnp.where(group < self.groups, place, self.rows)

    def blocks_behind(self, group_sizes: Int[Array, " E"]) -> Int[Array, " E"]:
        """How many blocks each group needs besides its first one."""
        return -(-jnp.maximum(group_sizes - self.first, 0) // self.block)


def row_layout(
    rows: int,
    groups: int,
    backend: Backend,
    *,
    expected: int | None = None,
    largest: int | None = None,
) -> RowLayout:
    """The layout that any split of rows into groups fits in, chosen for an even one.

    Args:
      rows: At most so many rows have a group.
      groups: Number of groups.
      backend: What multiplies them, as `choose_backend` gives it.
      expected: How many rows are expected to have one; None: all.
      largest: No group has more; None: `rows`.
    """
    if backend != "blocks":
        return RowLayout(groups, rows, 0, 0, native=backend == "native")
    expected, largest = rows if expected is None else expected, min(largest or rows, rows)
    mean = expected / groups
    # Groups that chance makes larger than their mean mostly fit, too.
    fits = max(1, min(-(-math.ceil(mean + 3 * mean**0.5) // 8) * 8, largest, _LARGEST_FIRST))
    first = fits if mean >= 0.5 else 0  # else most groups are empty
    block = min(fits, _BLOCK)
    # At most so many blocks are needed behind: all rows in one group, or few in each of many.
    behind = min(-(-max(rows - first, 0) // block) if first else rows // block + groups, rows)
    behind = min(behind, groups * -(-(largest - first) // block))
    return RowLayout(groups, groups * first + behind * block, first, block)


def grouped(
    stages: Sequence[Stage],
    x: Float[Array, "M D"],
    params: Any,
    group_sizes: Int[Array, " E"],
    laid: RowLayout,
) -> Float[Array, "M F"]:
    """Takes each row through the stages, one after the other, with its group's parameters.

    Args:
      stages: Functions known by identity: the same ones in every call, or each call compiles.
      x: Rows laid out by `laid.places`; places that hold no row have any finite value.
      params: Pytree of arrays [E, ...].
      group_sizes: Rows of each group, int32.
      laid: The layout.

    Returns:
      The last stage's values, laid out alike; the gradients of places that hold no row are to be
      0. An empty group's parameters get a gradient of exactly 0.

    Raises:
      ValueError: x has not the layout's rows.
    """
    if x.shape[0] != laid.rows:
        raise ValueError(f"{x.shape[0]} rows are laid out; this layout has {laid.rows} places")
    if laid.block:
        return _over_blocks(tuple(stages), x, params, group_sizes, laid)
    group = _group(group_sizes, jnp.arange(laid.rows))

    multiply = cpu.grouped_matmul if laid.native else jax.lax.ragged_dot

    def dot(x: Array, weights: Array, bias: Array | None = None) -> Array:
        y = multiply(x, weights, group_sizes)
        return y if bias is None else y + bias.at[group].get(mode="fill", fill_value=0)

    for stage in stages:
        x = stage(dot, x, params)
    return x


def _dot(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """For one block and its group, or as many blocks as groups."""
    y = x @ weights
    return y if bias is None else y + bias[..., None, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _over_blocks(
    stages: tuple[Stage, ...], x: Array, params: Any, sizes: Array, laid: RowLayout
) -> Array:
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


_over_blocks.defvjp(_blocks_forward, _blocks_backward)
