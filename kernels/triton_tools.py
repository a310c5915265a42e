"""Calling Triton kernels from JAX, compiling them without a GPU, and running them elsewhere.

An operation's `triton.py` describes each kernel by a `Kernel` (the module that holds its source,
imported only when it is needed, and its name) and calls it by `call(Launch(...), *arguments)`
inside jit. Who runs the launch is a setting: jax_triton, or for tests Triton's interpreter.

`report(given=None, capability=90) -> list[Compiled]` compiles the kernels of all operations,
or of the `Example`s given, for GPUs of a compute capability without having one, and returns one
record a kernel: name, dtype, registers, spills, shared_memory (bytes), warps. `table` prints it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

OPERATIONS = ("attention", "paged_attention", "logprobs", "grouped_matmul")
"""The folders that may have a `triton.py` with `examples()`."""

_TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int32": "i32",
    "uint16": "u16",
    "bool": "i1",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Where a kernel's source is.

    Attributes:
      module: Full name of the module, which ends in `_kernels` (`rljax_kernels.x.triton_kernels`);
        it imports triton at its head, so it is imported only when first needed.
      name: Of the `triton.jit` function in it; arguments in the order inputs, outputs, constants.
    """

    module: str
    name: str

    def function(self) -> Any:
        """The `triton.jit` function."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a kernel, but for its arguments; all static.

    Attributes:
      kernel: Which one.
      grid: Programs along up to three axes.
      outputs: Shapes and dtypes of what it writes.
      constants: Its `tl.constexpr` arguments.
      warps: Per program.
      stages: Of software pipelining.
      zeroed: Which outputs are filled with zeros before it runs.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    zeroed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Example:
    """A use of an operation at sizes that matter, whose kernels the report compiles.

    Attributes:
      name: What the report calls it.
      function: Calls the operation; traced, never run, and not jitted itself.
      arguments: Shapes and dtypes of the function's arguments, pytrees of `jax.ShapeDtypeStruct`.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes.

    Attributes:
      name: Of the kernel, and of the example that it is of.
      dtype: Of its first argument.
      registers: Per thread.
      spills: Bytes of registers stored to memory per thread.
      shared_memory: Bytes per program.
      warps: Per program.
    """

    name: str
    dtype: str
    registers: int
    spills: int
    shared_memory: int
    warps: int


Runner = Callable[..., Sequence[jax.Array]]
_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)
_runner: contextvars.ContextVar[Runner | None] = contextvars.ContextVar("runner", default=None)


@functools.cache
def missing() -> str | None:
    """Why Triton kernels cannot run here, in one line; None: they can."""
    if capability() < 80:
        return "they need an NVIDIA GPU of compute capability 8.0"
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'rljax[gpu]')"
    try:
        _jax_triton()
    except Exception as error:
        return f"jax_triton cannot be imported: {str(error).splitlines()[0]}"
    return None


def call(launch: Launch, *arguments: jax.Array | int) -> list[jax.Array]:
    """Runs a kernel inside jit: by jax_triton, or as `running_by` says.

    It knows neither `vmap` nor derivatives nor sharding: wrap it in `jax.custom_vjp`, and in
    `shard_map` where arrays are spread over devices. There, outputs vary over the mesh axes that
    any of the inputs varies over.

    Args:
      launch: What to run.
      *arguments: The kernel's inputs: arrays, and Python integers that are known when it is called.

    Returns:
      The outputs, in the launch's order.
    """
    runner = _runner.get() or _run_by_jax_triton
    inputs = [_varying(a) for a in arguments if not isinstance(a, int)]
    axes = frozenset().union(*inputs)
    return [_vary(x, axes) for x in runner(launch, *arguments)]


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """An array made to vary over mesh axes, as `shard_map` counts it."""
    more = tuple(axes - _varying(x))
    return jax.lax.pcast(x, more, to="varying") if more else x


@contextlib.contextmanager
def running_by(runner: Runner) -> Iterator[None]:
    """Lets a function run the launches that are traced meanwhile.

    A function that jit has traced before is not traced again: give it a new one.
    """
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def capability() -> int:
    """Ten times the compute capability of the GPU at hand; without one 90, a Hopper GPU's.

    `report` sets another one. A GPU that is not NVIDIA's has 0.
    """
    if (wanted := _capability.get()) is not None:
        return wanted
    if jax.default_backend() != "gpu":
        return 90
    found = re.fullmatch(r"(\d+)\.(\d)", jax.local_devices()[0].compute_capability)
    return int(found[1]) * 10 + int(found[2]) if found else 0


def _jax_triton() -> Any:
    """The package; it clears TRITON_CACHE_DIR when imported, which this undoes."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def _run_by_jax_triton(launch: Launch, *arguments: jax.Array | int) -> Sequence[jax.Array]:
    return _jax_triton().triton_call(
        *arguments,
        kernel=launch.kernel.function(),
        name=launch.kernel.name,
        out_shape=list(launch.outputs),
        grid=launch.grid,
        num_warps=launch.warps,
        num_stages=launch.stages,
        compute_capability=capability(),
        zeroed_outputs=launch.zeroed,
        **launch.constants,
    )


@contextlib.contextmanager
def _compiling_for(capability: int) -> Iterator[None]:
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def launches(function: Callable[..., Any], *arguments: Any) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The launches of a function and their arguments, found by tracing it."""
    found = []

    def record(launch: Launch, *given: jax.Array | int) -> Sequence[jax.Array]:
        shapes = (
            g if isinstance(g, int) else jax.ShapeDtypeStruct(g.shape, g.dtype) for g in given
        )
        found.append((launch, tuple(shapes)))
        return [jnp.zeros(out.shape, out.dtype) for out in launch.outputs]

    with running_by(record):
        jax.eval_shape(lambda *a: function(*a), *arguments)
    return found


def compile_launch(
    launch: Launch, arguments: Sequence[Any], *, example: str = "", capability: int = 90
) -> Compiled:
    """Compiles a launch for a GPU that need not be here.

    Args:
      launch: What to compile.
      arguments: Its inputs: integers, and anything with shape and dtype.
      example: Put before the kernel's name.
      capability: The compute capability, ten times (90: Hopper).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launch.kernel.function()
    given = [*arguments, *launch.outputs]
    names = function.arg_names
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(names, given, strict=False)):
        if isinstance(value, int):
            signature[name] = "i32"
        else:
            signature[name] = f"*{_TYPES[jnp.dtype(value.dtype).name]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in launch.constants}
    if set(signature) != set(names):
        raise ValueError(f"{launch.kernel.name} takes {names}, got {list(signature)}")
    source = ASTSource(function, signature, dict(launch.constants), attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _resources(made.asm["ptx"], capability)
    first = next(jnp.dtype(v.dtype).name for v in given if not isinstance(v, int))
    label = f"{example}: {launch.kernel.name}" if example else launch.kernel.name
    return Compiled(label, first, registers, spills, made.metadata.shared, launch.warps)


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as Triton's own assembler tells."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(source)]
        made = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        )
    said = made.stdout + made.stderr
    spills = re.findall(r"(\d+) bytes spill stores", said)
    return int(re.findall(r"Used (\d+) registers", said)[-1]), max(map(int, spills), default=0)


def export(function: Callable[..., Any], *arguments: Any) -> jax.export.Exported:
    """Lowers a function for CUDA without a GPU, which really compiles its Triton kernels.

    Args:
      function: To be jitted and lowered.
      *arguments: Its arguments, or their shapes and dtypes.
    """
    allowed = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
    jitted = jax.jit(lambda *a: function(*a))
    return jax.export.export(jitted, platforms=["cuda"], disabled_checks=allowed)(*arguments)


def examples() -> list[Example]:
    """Those of all operations that have Triton kernels."""
    found: list[Example] = []
    for operation in OPERATIONS:
        name = f"rljax_kernels.{operation}.triton"
        package = importlib.util.find_spec(f"rljax_kernels.{operation}")
        if package is not None and importlib.util.find_spec(name) is not None:
            found += importlib.import_module(name).examples()
    return found


def report(given: Iterable[Example] | None = None, capability: int = 90) -> list[Compiled]:
    """Compiles the kernels of examples without a GPU.

    Args:
      given: The examples; None: those of all operations.
      capability: The compute capability, ten times (90: Hopper).
    """
    found = []
    with _compiling_for(capability):
        for example in examples() if given is None else given:
            found += [
                compile_launch(launch, shapes, example=example.name, capability=capability)
                for launch, shapes in launches(example.function, *example.arguments)
            ]
    return found


def table(compiled: Iterable[Compiled]) -> str:
    """The report as lines of text."""
    rows = [("kernel", "dtype", "registers", "spills", "shared", "warps")]
    rows += [tuple(map(str, dataclasses.astuple(c))) for c in compiled]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        name, dtype, *numbers = zip(row, widths, strict=True)
        cells = [cell.ljust(w) for cell, w in (name, dtype)]
        lines.append("  ".join(cells + [cell.rjust(w) for cell, w in numbers]))
    return "\n".join(lines)
