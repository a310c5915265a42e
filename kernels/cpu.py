"""Kernels in C++ for CPUs, in float32, built by the system's compiler at first use.

They replace XLA's CPU programs where those are slow: products of few rows with large matrices,
mixtures, whose experts get different numbers of rows, and attention over a paged KV cache, whose
pages XLA first copies into one array.

This module does not know rljax. `unavailable_reason` says whether the kernels can be used here, so
that callers choose, or refuse in their own words.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_SOURCE = pathlib.Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
_TARGETS = ("rljax_grouped_matmul", "rljax_grouped_outer", "rljax_decode_attention")
_NO_COMPILER = (
    "the CPU kernels need a C++ compiler, and none of $CXX, c++, g++ and clang++ was found; "
    "install one (apt-get install g++), or do without the kernels"
)


class UnavailableError(RuntimeError):
    """The kernels cannot be used on this machine: no compiler, or it failed; in one line."""


def unavailable_reason() -> str | None:
    """Why the kernels cannot be used on this machine; None: they can, and are registered.

    The first call on a machine compiles them, for a few seconds.
    """
    found = compiler()
    return _NO_COMPILER if found is None else _build_failure(found)


@functools.cache
def _build_failure(compiler: str) -> str | None:
    """Why the kernels cannot be built; a compiler that failed is not run again by the process."""
    try:
        register()
    except (UnavailableError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, else the first of c++, g++ and clang++ that is installed."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def register() -> None:
    """Makes the kernels known to JAX, once in a process.

    Raises:
      UnavailableError: As `library`.
    """
    loaded = ctypes.CDLL(str(library()))
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")


def library() -> pathlib.Path:
    """Compiles the kernels for this machine, unless that was done before.

    The library is kept in `$XDG_CACHE_HOME/rljax` (`~/.cache/rljax` by default). Its name is a hash
    of the source, compiler, flags, JAX version and processor, so that only the first process on a
    machine compiles, for a few seconds.

    Returns:
      The path of the library.

    Raises:
      UnavailableError: There is no compiler, or it fails.
    """
    found = compiler()
    if found is None:
        raise UnavailableError(_NO_COMPILER)
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    setting = repr((_FLAGS, jax.__version__, platform.machine(), _cpu_features()))
    inputs = b"\0".join([_SOURCE.read_bytes(), version, setting.encode()])
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(cache) / "rljax"
    path = folder / f"cpu-{hashlib.sha256(inputs).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = pathlib.Path(scratch) / path.name
            command = [found, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = " | ".join(done.stderr.split("\n"))[-1000:].strip(" |") or "no output"
                raise UnavailableError(
                    f"{found} failed to compile the CPU kernels (exit status {done.returncode}): "
                    f"{said}; set $CXX to another compiler, or do without the kernels"
                )
            built.replace(path)  # atomic: other processes may build the same library
    return path


def _cpu_features() -> str:
    """The processor's features, which differ between machines that share a home directory."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.processor())


@struct.dataclass
class Native:
    """A weight whose products these kernels compute; it wraps the array and copies nothing.

    Attributes:
      array: float32 [in..., out...].
      transposed: Whether it is [out, in]. XLA then computes the product with the weight as the left
        operand, which it reads in order; a right operand would be packed anew at each call.
    """

    array: Array
    transposed: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape."""
        return self.array.shape

    def astype(self, dtype: Any) -> Native:
        """The same weight: the kernels convert nothing.

        Raises:
          ValueError: The dtype is another.
        """
        if dtype != self.array.dtype:
            raise ValueError(
                f"the CPU kernels compute in {self.array.dtype}, not in {jnp.dtype(dtype).name}"
            )
        return self

    def product(self, x: Float[Array, "M in"]) -> Float[Array, "M out"]:
        """`x @ w`, w taken as a matrix."""
        if not self.transposed:
            return matmul(x, self.array.reshape(x.shape[1], -1))
        y = jnp.matmul(self.array, x.T, precision=jax.lax.Precision.HIGHEST)
        # Without the barrier XLA exchanges the operands to save the transposition.
        return jax.lax.optimization_barrier(y).T


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """`rljax_kernels.grouped_matmul.grouped_matmul`, in float32.

    The bits of a row of the result depend on that row and its group's matrix only.

    Args:
      x: Rows sorted by group.
      weights: One matrix a group.
      group_sizes: Rows of each group, int32; their sum may be below M.

    Returns:
      The products; rows past the last group are 0. An empty group's weights get a gradient of
      exactly 0.

    Raises:
      UnavailableError: The kernels cannot be built.
    """
    return _grouped_matmul(x, weights, group_sizes)


def _grouped_matmul(x: Array, weights: Array, sizes: Array, transposed: bool = False) -> Array:
    register()
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1 if transposed else 2]), jnp.float32)
    call = jax.ffi.ffi_call("rljax_grouped_matmul", out)
    return _vary_as(x, call(x, weights, sizes, transposed=transposed))


def _vary_as(x: Array, y: Array) -> Array:
    """Declares that inside `shard_map` y, computed from x, varies over the mesh axes of x."""
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


class PagedTokens(NamedTuple):
    """A paged KV cache, and where the new token of each row belongs in it.

    Attributes:
      keys: Keys of all layers; updated in place, so that the caller must not use them again.
      values: Values of all layers, likewise.
      page_table: The pages of each row, in order of position.
      positions: The position of each row's new token in its sequence.
      live: Which rows hold a token; the others write nothing and their output is 0.
    """

    keys: Float[Array, "layers pages K d page_size"]
    values: Float[Array, "layers pages K page_size d"]
    page_table: Int[Array, "R P"]
    positions: Int[Array, " R"]
    live: Bool[Array, " R"]


def decode_attention(
    q: Float[Array, "R H d"],
    k: Float[Array, "R K d"],
    v: Float[Array, "R K d"],
    cache: PagedTokens,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Array, Array, Array]:
    """Writes one new token of each row into its page, and attends over the row's pages.

    The cost is proportional to the tokens that are there, not to the width of the page table. The
    sampler has the same function in plain JAX, `paged_attention`.

    Args:
      q: Queries of the new tokens, float32.
      k: Their keys.
      v: Their values.
      cache: The KV cache and the place of the tokens in it.
      layer: The layer whose pages are read and written.
      scale: Multiplies the scores.
      window: How many positions back a query attends, its own included; None: all.
      sinks: Logits that take part in the softmax and have no value; None: there are none.

    Returns:
      The output [R, H, d], and the keys and values of the cache with the new tokens.

    Raises:
      UnavailableError: The kernels cannot be built.
    """
    register()
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, cache.keys, cache.values)]
    call = jax.ffi.ffi_call("rljax_decode_attention", results, input_output_aliases={7: 1, 8: 2})
    sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    attributes: dict[str, Any] = dict(
        layer=np.int64(layer), window=np.int64(window or 0), scale=np.float32(scale)
    )
    rows = (cache.page_table, cache.positions, cache.live)
    out, keys, values = call(q, k, v, *rows, sinks, cache.keys, cache.values, **attributes)
    return out, keys, values
