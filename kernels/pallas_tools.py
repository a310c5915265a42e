"""What our Pallas kernels for TPU share: the interpreter elsewhere, types inside `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rljax_kernels.registry import platform_here

LANES = 128
"""Width of a TPU's registers; last dimensions of blocks are best its multiples."""

VMEM_BYTES = 2**26
"""What a kernel may use of a core's own memory, in bytes; v5e, v5p and v6e have as much."""


def interpreted() -> bool:
    """Whether Pallas has to interpret TPU kernels here: programs are compiled for other devices."""
    return platform_here() != "tpu"


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Casts arrays to differ over all mesh axes that any of them differs over, in `shard_map`.

    In the backward pass the gradients of an array's copies add up. None stays None.
    """
    axes = sorted({a for x in arrays if x is not None for a in _varying(x)})

    def cast(x: Any) -> Any:
        missing = () if x is None else tuple(a for a in axes if a not in _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in arrays]


def refuse_checks(x: jax.Array, name: str, instead: str) -> None:
    """Refuses a library's kernel, which says not over which mesh axes its results differ.

    Raises:
      ValueError: It is called inside `jax.shard_map` with its checks.
    """
    if jax.typeof(x).manual_axis_type.varying:
        raise ValueError(
            f"{name} does not say over which mesh axes its results differ, which jax.shard_map "
            f"checks here; use {instead!r}"
        )


def result(shape: Sequence[int], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that differs over the mesh axes over which `like` does."""
    manual = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=manual)


def pad_to(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """An array that is padded at the end of an axis up to a size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def dot(a: jax.Array, b: jax.Array, over: tuple[int, int], exact: bool = False) -> jax.Array:
    """The product of two matrices over one axis of each, with float32 sums.

    In the interpreter operands are cast first: XLA has not all such products on CPU.

    Args:
      a: One matrix.
      b: The other, of the same dtype.
      over: The axis of each.
      exact: Whether float32 operands are not to be rounded to bfloat16, as TPUs do by default.
    """
    precision = jax.lax.Precision.HIGHEST if exact and a.dtype == jnp.float32 else None
    if interpreted():
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def spread(takes: jax.Array, steps: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Items in a list of steps, one after the other, each as often as it takes.

    Args:
      takes: How many steps each item takes, one or more.
      steps: The most that there can be in all.

    Returns:
      The item of each step, its turn from 0 on, and the number of steps; what is listed past them
      means nothing.
    """
    until = jnp.cumsum(takes)
    step = jnp.arange(steps, dtype=jnp.int32)
    item = jnp.minimum((until <= step[:, None]).sum(1, dtype=jnp.int32), takes.shape[0] - 1)
    return item, step - (until - takes)[item], until[-1]


def _varying(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
