"""Kernels in C++ for CPUs, in float32, built by the system's compiler at first use.

XLA's programs for CPUs are slow at few rows by large matrices, at mixtures, whose experts get
different numbers of rows, and at attention over pages, which it first copies together.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_SOURCE = pathlib.Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
_TARGETS = ("rljax_grouped_matmul", "rljax_grouped_outer", "rljax_decode_attention")


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, else the first of c++, g++ and clang++ that is installed."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def register() -> None:
    """Makes the kernels known to JAX, once in a process; raises as `library` does."""
    loaded = ctypes.CDLL(str(library()))
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")


def library() -> pathlib.Path:
    """Compiles the kernels for this machine, unless that was done before.

    The library is kept in `$XDG_CACHE_HOME/rljax` (`~/.cache/rljax` by default) under a name made
    of all that went into it: only the first process on a machine compiles, for a few seconds.

    Returns:
      Where it lies.

    Raises:
      RuntimeError: There is no compiler, or it fails.
    """
    found = compiler()
    if found is None:
        raise RuntimeError(
            "kernels for CPUs need a C++ compiler and found none of $CXX, c++, g++ and clang++; "
            "install one, or do without them"
        )
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    setting = repr((_FLAGS, jax.__version__, platform.machine(), _cpu_features()))
    inputs = b"\0".join([_SOURCE.read_bytes(), version, setting.encode()])
    kept = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(kept) / "rljax"
    kept_as = folder / f"cpu-{hashlib.sha256(inputs).hexdigest()[:16]}.so"
    if not kept_as.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = pathlib.Path(scratch) / kept_as.name
            command = [found, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            made.replace(kept_as)  # whole or not at all, whoever else builds it
    return kept_as


def _cpu_features() -> str:
    """What distinguishes machines that share a home directory."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.processor())


@struct.dataclass
class Native:
    """A weight whose products these kernels make; it lies as it did, and nothing is copied.

    Attributes:
      array: float32 [in..., out...].
      transposed: Whether it is [out, in], and left to XLA with the weight on the left, where it is
        read in order; on the right it would be packed anew each time.
    """

    array: Array
    transposed: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape."""
        return self.array.shape

    def astype(self, dtype: Any) -> Native:
        """The same weight, which has to have that dtype.

        Raises:
          ValueError: It has another.
        """
        if dtype != self.array.dtype:
            raise ValueError(
                f"kernels for CPUs compute in {self.array.dtype}, not in {jnp.dtype(dtype).name}"
            )
        return self

    def product(self, x: Float[Array, "M in"]) -> Float[Array, "M out"]:
        """`x @ w`, w taken as a matrix."""
        if not self.transposed:
            return matmul(x, self.array.reshape(x.shape[1], -1))
        y = jnp.matmul(self.array, x.T, precision=jax.lax.Precision.HIGHEST)
        # Kept apart, or XLA would exchange the operands to spare the transposition.
        return jax.lax.optimization_barrier(y).T


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """`rljax_kernels.grouped_matmul.grouped_matmul`, in float32.

    A row's bits depend on itself and its group's matrix alone.

    Args:
      x: Rows sorted by group.
      weights: One matrix a group.
      group_sizes: Rows of each group, int32; their sum may be below M.

    Returns:
      The products; rows past the last group are 0. An empty group's weights get a gradient of
      exactly 0.

    Raises:
      RuntimeError: The kernels cannot be built.
    """
    return _grouped_matmul(x, weights, group_sizes)


def _grouped_matmul(x: Array, weights: Array, sizes: Array, transposed: bool = False) -> Array:
    register()
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1 if transposed else 2]), jnp.float32)
    call = jax.ffi.ffi_call("rljax_grouped_matmul", out)
    return _vary_as(x, call(x, weights, sizes, transposed=transposed))


def _vary_as(x: Array, y: Array) -> Array:
    """Tells JAX that inside `shard_map` y differs wherever x does, that it was made of."""
    axes = tuple(jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(y, axes, to="varying") if axes else y


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_matmul(x, weights, sizes), (x, weights, sizes)


def _backward(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, weights, sizes = saved
    outer = jax.ffi.ffi_call(
        "rljax_grouped_outer", jax.ShapeDtypeStruct(weights.shape, jnp.float32)
    )
    dx = _grouped_matmul(g, weights, sizes, transposed=True)
    return dx, _vary_as(x, outer(x, g, sizes)), None


grouped_matmul.defvjp(_forward, _backward)


def matmul(x: Float[Array, "M D"], w: Float[Array, "D F"]) -> Float[Array, "M F"]:
    """`x @ w`, as `grouped_matmul` of one group."""
    return grouped_matmul(x, w[None], jnp.full((1,), x.shape[0], jnp.int32))


def decode_attention(
    q: Float[Array, "R H d"],
    k: Float[Array, "R K d"],
    v: Float[Array, "R K d"],
    keys: Float[Array, "layers pages K d page_size"],
    values: Float[Array, "layers pages K page_size d"],
    table: Int[Array, "R P"],
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Array, Array, Array]:
    """Writes one token a row into its page, and attends over the row's pages.

    Costs what the tokens cost, however wide the page table is. `rljax.sampling.attention` has the
    plain function, `paged_attention`.

    Args:
      q: Queries, float32.
      k: The same tokens' keys.
      v: Their values.
      keys: All keys; updated in place, so that the caller must not use them again.
      values: Likewise all values.
      table: The pages of each row, in order.
      positions: The tokens' places in their sequences.
      live: Which rows there are; others are not written and give 0.
      layer: Whose pages.
      scale: Multiplies the scores.
      window: How many positions back a query sees, its own included; None: all.
      sinks: Logits that take part in the softmax and have no value; None: there are none.

    Returns:
      The output [R, H, d], the keys and the values.

    Raises:
      RuntimeError: The kernels cannot be built.
    """
    register()
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, keys, values)]
    call = jax.ffi.ffi_call("rljax_decode_attention", shapes, input_output_aliases={7: 1, 8: 2})
    sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    number: dict[str, Any] = dict(
        layer=np.int64(layer), window=np.int64(window or 0), scale=np.float32(scale)
    )
    out, keys, values = call(q, k, v, table, positions, live, sinks, keys, values, **number)
    return out, keys, values
