"""Rows sorted by group through functions with one set of matrices a group: dropless mixtures.

`grouped_matmul` is one product, `grouped` several in turn; `choose_backend` picks what computes
them, of the implementations in `OPERATION`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from rljax_kernels import cpu, triton_tools
from rljax_kernels.grouped_matmul import blocks, megablox, pallas, reference, triton
from rljax_kernels.grouped_matmul.blocks import Dot, Stage
from rljax_kernels.grouped_matmul.layout import RowLayout, group_of, row_layout
from rljax_kernels.registry import PLATFORMS, Implementation, Operation

__all__ = [
    "OPERATION",
    "Asked",
    "Dot",
    "RowLayout",
    "Stage",
    "choose_backend",
    "grouped",
    "grouped_matmul",
    "row_layout",
]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of `grouped_matmul` asks for, all of it static.

    Attributes:
      dtype: Of rows and matrices.
      devices: How many the program is compiled for.
    """

    dtype: str
    devices: int = 1


def _native_refuses(asked: Asked) -> str | None:
    return None if asked.dtype == "float32" else f"it computes in float32, got {asked.dtype}"


def _native_defers(asked: Asked, platform: str) -> str | None:
    return "it is slower on several devices" if asked.devices > 1 else None


def _off_cpu(asked: Asked, platform: str) -> str | None:
    return "it is slower on TPU and GPU" if platform != "cpu" else None


def _ragged(x: Array, weights: Array, group_sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, weights, group_sizes)


OPERATION = Operation(
    "grouped_matmul",
    (
        Implementation(
            "native",
            ("cpu",),
            cpu.grouped_matmul,
            _native_refuses,
            lambda: cpu.unavailable_reason(),
            _native_defers,
            source="C++, kernels/cpu.cpp",
        ),
        Implementation(
            "pallas",
            ("tpu",),
            pallas.run,
            pallas.refuses,
            source="XLA's ragged_dot, and Pallas for the weights' gradient",
        ),
        Implementation(
            "megablox",
            ("tpu",),
            megablox.run,
            megablox.refuses,
            source="JAX's megablox, jax.experimental.pallas.ops.tpu.megablox",
        ),
        Implementation("blocks", PLATFORMS, blocks.run, defers=_off_cpu, source="plain JAX"),
        Implementation(
            "triton",
            ("gpu",),
            triton.run,
            triton.refuses,
            triton_tools.missing,
            source="our own kernels, after MegaBlocks (Gale et al. 2022)",
        ),
        Implementation("ragged", PLATFORMS, _ragged, source="XLA, jax.lax.ragged_dot"),
        Implementation("reference", PLATFORMS, reference.run, source="plain JAX"),
    ),
    reference="reference",
)
"""The ways to compute grouped products, in the order in which they are preferred."""


def choose_backend(wanted: str = "auto", dtype: Any = jnp.float32) -> str:
    """The name of what multiplies rows: `OPERATION`'s rule.

    On CPU `auto` is `native` (`rljax_kernels.cpu`, in C++) for float32 on one device, where these
    kernels can be built, and `blocks` (batched products of XLA) otherwise. On TPU and GPU it is a
    kernel, where its package is installed, or else `ragged` (XLA's ragged_dot, which is slow on
    CPU). Programs may be compiled for devices of another kind than those at hand: under
    `jax.set_mesh` the mesh's devices count. `native` has first derivatives only, in reverse mode.

    Args:
      wanted: The name of an implementation, or `auto`.
      dtype: That of rows and matrices.

    Raises:
      ValueError: The backend is unknown, or not for these devices or this dtype.
      rljax_kernels.cpu.UnavailableError: `native` is asked for and its kernels cannot be built.
    """
    devices = max(jax.sharding.get_abstract_mesh().size, 1)
    asked = Asked(jnp.dtype(dtype).name, devices)
    try:
        return OPERATION.choose(wanted, asked).name
    except ValueError:
        reason = cpu.unavailable_reason() if wanted == "native" else None
        if reason and asked.dtype == "float32":
            raise cpu.UnavailableError(reason) from None
        raise


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    backend: str = "auto",
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
    run = OPERATION.named(choose_backend(backend, x.dtype)).run
    return run(x, weights, group_sizes.astype(jnp.int32))


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
        return blocks.over_blocks(tuple(stages), x, params, group_sizes, laid)
    group = group_of(group_sizes, jnp.arange(laid.rows))
    multiply = OPERATION.named(laid.backend).run

    def dot(x: Array, weights: Array, bias: Array | None = None) -> Array:
        y = multiply(x, weights, group_sizes)
        return y if bias is None else y + bias.at[group].get(mode="fill", fill_value=0)

    for stage in stages:
        x = stage(dot, x, params)
    return x
