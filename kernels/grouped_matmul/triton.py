"""Grouped matmul by our own Triton kernels, for GPUs, with both gradients.

Costs are those of the rows that there are: a group without rows costs nothing, and a last tile of a
group that is not full is all the padding there is. Sums are float32.

The kernels see one device's arrays: call them in `shard_map` where those are spread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rljax_kernels import triton_tools
from rljax_kernels.varying import vary_as

_MODULE = "rljax_kernels.grouped_matmul.triton_kernels"
MULTIPLY = triton_tools.Kernel(_MODULE, "multiply")
GRADIENT = triton_tools.Kernel(_MODULE, "gradient")


class Blocks(NamedTuple):
    """Rows and columns of a tile, terms of its sums at a time, warps, and stages of pipelining."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def refuses(asked: Any) -> str | None:
    """Why the kernels do not compute what is asked; None: they do."""
    if asked.dtype in ("bfloat16", "float16", "float32"):
        return None
    return f"it takes bfloat16, float16 and float32, not {asked.dtype}"


@jax.custom_vjp
def run(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As `rljax_kernels.grouped_matmul.grouped_matmul`."""
    return _multiply(x, weights, group_sizes, transposed=False)


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, tuple]:
    return run(x, weights, sizes), (x, weights, sizes)


def _backward(saved: tuple, g: Array) -> tuple[Array, Array, np.ndarray]:
    x, weights, sizes = saved
    dx = _multiply(g, weights, sizes, transposed=True)
    dw = _gradient(x, g, sizes).astype(weights.dtype)
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0)


run.defvjp(_forward, _backward)


def _multiply(x: Array, weights: Array, sizes: Array, transposed: bool) -> Float[Array, "M F"]:
    rows, (groups, d, f) = x.shape[0], weights.shape
    inner, outer = (f, d) if transposed else (d, f)
    cut = _cut(x.dtype, rows // groups)
    tiles = _tiles(sizes, rows, cut.rows)
    launch = triton_tools.Launch(
        MULTIPLY,
        (-(-outer // cut.columns) * tiles[0].shape[0],),
        (jax.ShapeDtypeStruct((rows, outer), x.dtype),),
        {
            "TILES": tiles[0].shape[0],
            "INNER": inner,
            "OUTER": outer,
            "GROUPS": groups,
            "STRIDE_INNER": 1 if transposed else f,
            "STRIDE_OUTER": f if transposed else 1,
            "BLOCK_M": cut.rows,
            "BLOCK_N": cut.columns,
            "BLOCK_K": cut.terms,
            "TOGETHER": 8,
            "PRECISION": _precision(x.dtype),
        },
        warps=cut.warps,
        stages=cut.stages,
    )
    return vary_as((x, weights, sizes), triton_tools.call(launch, x, weights, *tiles)[0])


def _gradient(x: Array, g: Array, sizes: Array) -> Float[Array, "E D F"]:
    d, f = x.shape[1], g.shape[1]
    cut = _cut(x.dtype, 128)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    launch = triton_tools.Launch(
        GRADIENT,
        (-(-d // cut.rows), -(-f // cut.columns), sizes.shape[0]),
        (jax.ShapeDtypeStruct((sizes.shape[0], d, f), x.dtype),),
        {
            "INNER": d,
            "OUTER": f,
            "BLOCK_M": cut.rows,
            "BLOCK_N": cut.columns,
            "BLOCK_K": cut.terms,
            "PRECISION": _precision(x.dtype),
        },
        warps=cut.warps,
        stages=cut.stages,
    )
    return vary_as((x, g, sizes), triton_tools.call(launch, x, g, starts)[0])


def _tiles(
    sizes: Int[Array, " E"], rows: int, block: int
) -> tuple[Int[Array, " t"], Int[Array, " t"], Int[Array, " t"]]:
    """Group, first row and end of rows of all tiles that there may be.

    Those behind the last group take the rows without a group, and then none.
    """
    groups = sizes.shape[0]
    sizes = sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - sizes.sum(dtype=jnp.int32))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    takes = -(-sizes // block)
    until = jnp.cumsum(takes, dtype=jnp.int32)
    tile = jnp.arange(-(-rows // block) + groups, dtype=jnp.int32)
    group = jnp.minimum((until <= tile[:, None]).sum(1, dtype=jnp.int32), groups)
    first = (ends - sizes)[group] + (tile - (until - takes)[group]) * block
    return group, jnp.minimum(first, ends[group]), ends[group]


def _cut(dtype: Any, rows: int) -> Blocks:
    """Tiles that fit registers and shared memory; not tuned on a GPU.

    Args:
      dtype: Of rows and matrices.
      rows: About how many a group has.
    """
    if dtype == jnp.float32:
        return Blocks(64, 64, 16, 4, 3)
    tall = 128 if rows > 64 else 64 if rows > 32 else 32 if rows > 16 else 16
    if triton_tools.capability() not in (80, 90, 100, 103):
        return Blocks(min(tall, 64), 128, 32, 4, 3)
    if tall < 64:
        return Blocks(tall, 128, 64, 4, 4)
    return Blocks(tall, 256 if tall == 128 else 128, 64, 8 if tall == 128 else 4, 3)


def _precision(dtype: Any) -> str:
    return "ieee" if dtype == jnp.float32 else "tf32"


def examples() -> list[triton_tools.Example]:
    """Uses whose kernels the report compiles."""
    found = []
    for name, dtype, m, e, d, f in (
        ("grouped 65536 x 128 x 2048 x 768", jnp.bfloat16, 65_536, 128, 2048, 768),
        ("grouped 65536 x 8 x 4096 x 14336", jnp.bfloat16, 65_536, 8, 4096, 14_336),
        ("grouped 1024 x 128 x 2048 x 768", jnp.bfloat16, 1024, 128, 2048, 768),
        ("grouped 4096 x 64 x 2048 x 1024", jnp.bfloat16, 4096, 64, 2048, 1024),
        ("grouped 65536 x 128 x 2048 x 768", jnp.float32, 65_536, 128, 2048, 768),
    ):

        def loss(x, weights, sizes):
            return jnp.sum(run(x, weights, sizes).astype(jnp.float32))

        arguments = (
            jax.ShapeDtypeStruct((m, d), dtype),
            jax.ShapeDtypeStruct((e, d, f), dtype),
            jax.ShapeDtypeStruct((e,), jnp.int32),
        )
        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        found.append(triton_tools.Example(name, gradient, arguments))
    return found
