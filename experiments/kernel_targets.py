"""The registry as text, and its kernels compiled for targets that are not here.

For `experiments.benchmark_kernels --list` and `--compile`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.benchmark_kernels import one_line, operation, programs
from experiments.kernel_cases import Case
from experiments.kernel_sizes import accelerator_cases, cases, tiny_cases

TPU = "v5p:2x2x1"
CAPABILITY = 90  # of Hopper GPUs, ten times


def listing(names: Sequence[str]) -> list[str]:
    """The lines of `--list`: implementations, whether they can run here, and what `auto` takes."""
    from rljax_kernels.registry import PLATFORMS, platform_here

    here, lines = platform_here(), []
    for name in names:
        chosen = operation(name)
        lines += [f"{name} (reference: {chosen.reference}), those to be preferred first"]
        for found in chosen.implementations:
            able = reason_here(found, here) or "runs here"
            places = ", ".join(found.platforms)
            lines.append(f"  {found.name:10} for {places}: {able} ({found.source})")
        for platform in PLATFORMS:
            for case in cases(platform):
                if case.operation == name:
                    lines.append(f"  {platform}, {case.name}: {choice(chosen, case, platform)}")
    return lines


def reason_here(implementation: Any, platform: str) -> str | None:
    """Why an implementation cannot run on these devices, whatever is asked; None: it can."""
    if platform not in implementation.platforms:
        return f"not on {platform}"
    return implementation.missing()


def choice(chosen: Any, case: Case, platform: str) -> str:
    """What `auto` takes for a case on a platform, and why not those for it that come before."""
    auto, passed = chosen.choose("auto", case.asked, platform).name, []
    for found in chosen.implementations:
        if found.name == auto:
            break
        if platform in found.platforms:
            reason = found.objection(case.asked, platform) or found.defers(case.asked, platform)
            passed.append(f"not {found.name}: {reason}")
    return "; ".join([f"auto takes {auto}", *passed])


def of_target(names: Sequence[str], platform: str, tiny: bool) -> Iterator[tuple[Case, Any]]:
    """The cases of operations with each implementation that is made for a platform alone."""
    for case in tiny_cases() if tiny else accelerator_cases(platform):
        if case.operation in names:
            for found in operation(case.operation).implementations:
                own = platform in found.platforms and "cpu" not in found.platforms
                if own and found.refuses(case.asked) is None:
                    yield case, found


def compile_all(names: Sequence[str], tell: Callable[[str], None], tiny: bool = False) -> int:
    """Compiles for TPU and GPU, and prints a table for each.

    Args:
      names: Of the operations.
      tell: Is given lines of progress.
      tiny: Whether cases are the tiny ones.

    Returns:
      How many programs failed.
    """
    tpu = [compile_for_tpu(case, found, tell) for case, found in of_target(names, "tpu", tiny)]
    heads = ("operation", "case", "implementation", "pass", "seconds", "temporaries, MB", "failed")
    print(f"TPU, {TPU.partition(':')[0]}, compiled by libtpu\n")
    failed = print_table(heads, tpu)
    kernels, exports = [], []
    for case, found in of_target(names, "gpu", tiny):
        tell(f"gpu: {case.operation} {case.name}, {found.name}")
        kind, function, arrays = whole_pass(case, found)
        if found.name == "triton":
            kernels += compile_launches(case, kind, function, arrays)
        exports.append((case.operation, case.name, found.name, kind, export(function, arrays)))
    heads = ("operation", "case", "pass", "kernel", "registers", "spills, bytes")
    heads += ("shared memory, KB", "warps", "failed")
    print(f"\nGPU, Triton kernels compiled for sm_{CAPABILITY}\n")
    failed += print_table(heads, kernels)
    print("\nGPU, whole programs lowered for CUDA by jax.export\n")
    heads = ("operation", "case", "implementation", "pass", "failed")
    return failed + print_table(heads, exports)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    """Prints rows, whose last cells say what failed.

    Returns:
      How many did.
    """
    lines = [heads, ["---"] * len(heads), *rows]
    print("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines), flush=True)
    return sum(bool(row[-1]) for row in rows)


def whole_pass(case: Case, found: Any) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    """A case's whole pass by an implementation: its name, function and arguments' shapes."""
    import jax

    chosen = operation(case.operation)
    arrays = jax.eval_shape(case.make)
    out = jax.eval_shape(case.call(chosen.named(chosen.reference).run), *arrays)
    given = {"forward": arrays, "both": (out, *arrays)}
    whole = programs(case, [found])[-1]  # forward and backward, where there are gradients
    return whole.kind, whole.function, given[whole.kind]


def compile_for_tpu(case: Case, found: Any, tell: Callable[[str], None]) -> tuple[Any, ...]:
    """A row: seconds, and the temporaries that libtpu's compiler plans."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from rljax.planning import Topology

    tell(f"tpu: {case.operation} {case.name}, {found.name}")
    kind, function, arrays = whole_pass(case, found)
    start, temporaries, failed = time.perf_counter(), "", ""
    donated = () if case.carried is None else (case.carried,)
    try:
        mesh = Mesh(Topology.parse(TPU).devices()[:1], ("chip",), axis_types=(AxisType.Auto,))
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arrays
        )
        with jax.set_mesh(mesh):
            made = jax.jit(function, donate_argnums=donated).lower(*placed).compile()
        temporaries = f"{made.memory_analysis().temp_size_in_bytes / 1e6:,.1f}"
    except Exception as error:  # of the compiler or of the kernel
        failed = one_line(error)
    seconds = f"{time.perf_counter() - start:.1f}"
    return case.operation, case.name, found.name, kind, seconds, temporaries, failed


def compile_launches(
    case: Case, kind: str, function: Callable[..., Any], arrays: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """A row for each Triton kernel of a pass."""
    from rljax_kernels import triton_tools

    try:
        found = triton_tools.launches(function, *arrays)
    except Exception as error:
        return [(case.operation, case.name, kind, "", "", "", "", "", one_line(error))]
    rows = []
    for launch, arguments in found:
        start = (case.operation, case.name, kind, launch.kernel.name)
        try:
            made = triton_tools.compile_launch(launch, arguments, capability=CAPABILITY)
            shared = f"{made.shared_memory / 1024:.0f}"
            rows.append((*start, made.registers, made.spills, shared, made.warps, ""))
        except Exception as error:
            rows.append((*start, "", "", "", launch.warps, one_line(error)))
    return rows


def export(function: Callable[..., Any], arrays: tuple[Any, ...]) -> str:
    """Why a program cannot be lowered for CUDA; empty where it can."""
    from rljax_kernels import triton_tools

    try:
        triton_tools.export(function, *arrays)
    except Exception as error:
        return one_line(error)
    return ""
