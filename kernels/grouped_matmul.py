"""Matmul of sorted rows with one matrix a group: dropless mixtures of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Backend = Literal["ragged", "blocks"]


def default_backend() -> Backend:
    """`ragged` (XLA's ragged_dot) on TPU and GPU; `blocks` on CPU, where ragged_dot is slow.

    Programs may be compiled for devices of another kind than those at hand: under `jax.set_mesh`
    the mesh's devices count.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "blocks" if platform == "cpu" else "ragged"


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    backend: Backend | None = None,
    aligned: int | None = None,
) -> Float[Array, "M F"]:
    """Multiplies rows [sum of sizes before e, + group_sizes[e]) by `weights[e]`.

    Args:
      x: Rows sorted by group.
      weights: One matrix a group.
      group_sizes: Rows of each group, int32; their sum may be below M.
      backend: `ragged`, `blocks`, or None for `default_backend()`.
      aligned: A number that divides M and every group size, if the caller has laid the rows out
        so; `blocks` then needs no rearranging. Left to be found out otherwise.

    Returns:
      The products, in x's dtype; rows past the last group are 0. An empty group's weights get a
      gradient of exactly 0.

    Raises:
      ValueError: Shapes do not agree, or the backend is unknown.
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
    backend = backend or default_backend()
    group_sizes = group_sizes.astype(jnp.int32)
    if backend == "ragged":
        return jax.lax.ragged_dot(x, weights, group_sizes)
    if backend != "blocks":
        raise ValueError(f"grouped_matmul backend {backend!r} is unknown; use 'ragged' or 'blocks'")
    if aligned is not None:
        return _aligned_blocks(x, weights, group_sizes, aligned)
    block = block_size(x.shape[0], weights.shape[0])
    sizes, target = align(group_sizes, x.shape[0], block)
    rows = aligned_rows(x.shape[0], weights.shape[0], block)
    spread = jnp.zeros((rows, x.shape[1]), x.dtype).at[target].set(x, mode="drop")
    out = _aligned_blocks(spread, weights, sizes, block)
    return out.at[target].get(mode="fill", fill_value=0)


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


def block_size(rows: int, groups: int) -> int:
    """Rows of a block: 256 where groups are large, less where padding would outweigh them."""
    return int(min(256, max(8, 2 ** int(np.log2(max(rows // max(groups, 1), 1)) + 0.5))))


def aligned_rows(rows: int, groups: int, block: int) -> int:
    """Rows that hold any split of `rows` into groups, each padded to whole blocks."""
    return (-(-rows // block) + groups) * block


def align(
    group_sizes: Int[Array, " E"], rows: int, block: int
) -> tuple[Int[Array, " E"], Int[Array, " M"]]:
    """Pads every group to whole blocks.

    Returns:
      The padded sizes, and for each sorted row the place it moves to (rows past the last group
      move out of bounds).
    """
    sizes = -(-group_sizes // block) * block
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    safe = jnp.minimum(group, group_sizes.shape[0] - 1)
    shift = (jnp.cumsum(sizes) - sizes) - (ends - group_sizes)
    bound = aligned_rows(rows, group_sizes.shape[0], block)
    return sizes, jnp.where(group < group_sizes.shape[0], row + shift[safe], bound)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _aligned_blocks(x: Array, weights: Array, sizes: Array, block: int) -> Array:
    return _blocks_forward(x, weights, sizes, block)[0]


def _over_blocks(
    init: Array,
    sizes: Array,
    block: int,
    step: Callable[[Array, Array, Array], Array],
    *like: Array,
) -> Array:
    """Carries `init` through (carry, block, its group) of the blocks that have a group.

    A loop with as many turns as there are such blocks: it reads each group's matrix where it lies,
    where one batched product would first copy a matrix for every block there could be.
    """
    # A 0 that inside shard_map counts as differing over the axes over which these do, as the carry
    # of a loop has to.
    nothing = sum(jnp.isnan(x.reshape(-1)[0]).astype(jnp.int32) * 0 for x in like) + sizes[0] * 0
    init = init + nothing.astype(init.dtype)
    ends = jnp.cumsum(sizes) // block

    def turn(i: Array, carry: Array) -> Array:
        return step(carry, i, jnp.searchsorted(ends, i, side="right"))

    return jax.lax.fori_loop(0, ends[-1], turn, init)


def _blocks_forward(x: Array, weights: Array, sizes: Array, block: int) -> tuple[Array, tuple]:
    if x.shape[0] % block:
        raise ValueError(f"{x.shape[0]} rows are not whole blocks of {block}")
    tiles = x.reshape(-1, block, x.shape[1])

    def step(out: Array, i: Array, group: Array) -> Array:
        return out.at[i].set(tiles[i] @ weights[group])

    out = jnp.zeros((*tiles.shape[:2], weights.shape[2]), x.dtype)
    out = _over_blocks(out, sizes, block, step, x, weights)
    return out.reshape(x.shape[0], -1), (x, weights, sizes)


def _blocks_backward(block: int, saved: tuple, g: Array) -> tuple[Array, Array, np.ndarray]:
    x, weights, sizes = saved
    tiles, g = x.reshape(-1, block, x.shape[1]), g.reshape(-1, block, g.shape[1])

    def inputs(out: Array, i: Array, group: Array) -> Array:
        return out.at[i].set(g[i] @ weights[group].T)

    def matrices(out: Array, i: Array, group: Array) -> Array:
        part = jnp.matmul(tiles[i].T, g[i], preferred_element_type=jnp.float32)
        return out.at[group].add(part)

    dx = _over_blocks(jnp.zeros_like(tiles), sizes, block, inputs, g, weights)
    dw = _over_blocks(jnp.zeros(weights.shape, jnp.float32), sizes, block, matrices, x, g)
    return dx.reshape(x.shape), dw.astype(weights.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


_aligned_blocks.defvjp(_blocks_forward, _blocks_backward)
