"""Times every implementation of every operation of `rljax_kernels` that runs on these devices.

A line for each operation, case, pass (forward, or both: forward and backward) and implementation:
milliseconds of the fastest call and of the median, FLOPs and bytes that the case takes at least,
what bounds it, the share of the chip's roofline that was reached, and the largest difference from
the plain reference (from XLA's way where that would take too much memory) over its largest value,
of results and gradients. `auto` marks the implementation that the rule takes. The chip's rates are
its vendor's; on a CPU, and on a chip that is not known, those of a matmul and of a copy in the same
run. On a GPU or TPU the sampling engine's tokens per second on Qwen2.5-7B (random weights,
bfloat16) follow, beside their roofline.

Command:
    python -m experiments.benchmark_kernels             # what runs here
    python -m experiments.benchmark_kernels --list      # what there is, what auto takes, and why
    python -m experiments.benchmark_kernels --compile   # what does not run here, for its target:
                                                        # v5p by libtpu, sm_90 by Triton

Cost: on a GPU at most 4 minutes (`--seconds`: what there is no time for is left out, and said); 1
minute on 2 CPU cores; `--compile` 2 minutes.

Expected on an H100 or H200: paged attention at least 80% of the memory's bandwidth, grouped
matmul at least 70% of the peak, attention by the Triton kernels as fast as cuDNN's within 10%. On a
CPU: the implementations agree to 1e-5. Figures are in experiments/README.md.
"""

import concurrent.futures
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from experiments.chip_rates import Peak, peak_here

OPERATIONS = ("attention", "paged_attention", "grouped_matmul", "logprobs")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
      operations: Which of them; empty: all.
      list: Print the registry, and run nothing.
      compile: Compile what cannot run here for its target, and run nothing.
      repeats: Timed runs; the median and the fastest are reported.
      seconds: No case is begun after so many.
      engine: Whether the engine is run on a model of 7B: on GPU and TPU (auto), or never.
      tiny: Whether cases are too small to be worth timing.
    """

    operations: tuple[
        Literal["attention", "paged_attention", "grouped_matmul", "logprobs"], ...
    ] = ()
    list: bool = False
    compile: bool = False
    repeats: int = 5
    seconds: float = 240.0
    engine: Literal["auto", "never"] = "auto"
    tiny: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """One implementation of a case's pass, to be compiled and timed.

    Attributes:
      implementation: Of the registry.
      kind: `forward`, or `both`.
      function: What is jitted, of the case's arrays and, for `both`, of the output's gradient.
    """

    implementation: Any
    kind: str
    function: Callable[..., Any]


def tell(line: str) -> None:
    """Prints a line of progress; results go to standard output, it does not."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def operation(name: str) -> Any:
    """The operation of a name."""
    return importlib.import_module(f"rljax_kernels.{name}").OPERATION


def programs(case: Any, able: list[Any]) -> list[Program]:
    """What of a case is timed or compared with, the truth first."""
    found = []
    for implementation in able:
        forward = case.call(implementation.run)
        found.append(Program(implementation, "forward", forward))
        if case.gradients:
            found.append(Program(implementation, "both", with_gradients(case, forward)))
    return sorted(found, key=lambda p: p.implementation.name != case.against)


def with_gradients(case: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and the gradients of the arrays that have some, for a gradient of the result."""
    import jax

    def both(cotangent: Any, *arrays: Any) -> Any:
        def of_those(*given: Any) -> Any:
            whole = list(arrays)
            for i, x in zip(case.gradients, given, strict=True):
                whole[i] = x
            return forward(*whole)

        out, pull = jax.vjp(of_those, *(arrays[i] for i in case.gradients))
        return out, pull(cotangent)

    return both


def lowered(case: Any, program: Program, arrays: tuple[Any, ...]) -> Any:
    """The program as XLA takes it, or one line that says why there is none."""
    import jax

    donated = () if case.carried is None else (case.carried,)
    try:
        return jax.jit(program.function, donate_argnums=donated).lower(*arrays)
    except Exception as error:  # each library has errors of its own
        return one_line(error)


def compiled(program: Any) -> Any:
    """The compiled program, or one line that says why there is none."""
    try:
        return program if isinstance(program, str) else program.compile()
    except Exception as error:
        return one_line(error)


def one_line(error: Exception) -> str:
    """An error's kind and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def time_program(made: Any, case: Any, arrays: list[Any], repeats: int) -> tuple[list[float], Any]:
    """Milliseconds of each timed run, and the results of the first call.

    On a GPU or TPU a run is as many calls as take 5 ms, sent one after the other.
    """
    import jax

    def run(calls: int) -> tuple[float, Any]:
        nonlocal arrays
        out = None
        start = time.perf_counter()
        for _ in range(calls):
            out = made(*arrays)
            if case.carried is not None:
                arrays = [*arrays[: case.carried], out[1], *arrays[case.carried + 1 :]]
        jax.block_until_ready(out)
        return 1e3 * (time.perf_counter() - start) / calls, out

    _, found = run(1)
    first = found if case.carried is None else found[0]
    once = min(run(1)[0] for _ in range(2))
    calls = 1 if jax.default_backend() == "cpu" else int(np.clip(5 / once, 1, 50))
    return [run(calls)[0] for _ in range(repeats)], first


def difference(found: Any, truth: Any) -> float:
    """The largest difference of any array, over the truth's largest value in that array."""
    import jax

    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def run_case(case: Any, config: Config, peak: Peak) -> list[dict[str, Any]]:
    """Times one case by all that can compute it here."""
    import jax

    chosen = operation(case.operation)
    able = [i for i, reason in chosen.objections(case.asked) if reason is None]
    auto = chosen.choose("auto", case.asked).name
    arrays = jax.block_until_ready(case.make())
    todo = programs(case, able)
    cotangent = None
    if case.gradients:
        shape = jax.eval_shape(todo[0].function, *arrays)
        keys = jax.random.split(jax.random.key(9), len(jax.tree.leaves(shape)))
        keys = jax.tree.unflatten(jax.tree.structure(shape), list(keys))
        cotangent = jax.tree.map(lambda k, s: jax.random.normal(k, s.shape, s.dtype), keys, shape)
    given = {"forward": arrays, "both": (cotangent, *arrays)}
    threads = max(1, (os.cpu_count() or 2) // 2)
    to_compile = [lowered(case, program, given[program.kind]) for program in todo]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(compiled, to_compile))
    lines: list[dict[str, Any]] = []
    truth: dict[str, Any] = {}
    for program, ready in zip(todo, made, strict=True):
        name = program.implementation.name
        line = {"operation": case.operation, "case": case.name, "pass": program.kind, "by": name}
        line |= {"auto": name == auto, "expected": case.expected, "work": case.works[program.kind]}
        untimed = name == "reference" and not case.timed_reference
        try:
            if isinstance(ready, str):
                raise RuntimeError(ready)
            fresh = [jax.tree.map(lambda x: x.copy(), a) for a in given[program.kind]]
            took, out = time_program(ready, case, fresh, 1 if untimed else config.repeats)
            if name == case.against:
                truth[program.kind] = out
            line |= {"fastest_ms": min(took), "median_ms": float(np.median(took))}
            line["share"] = peak.seconds(case.works[program.kind]) / (min(took) / 1e3)
            if program.kind in truth:
                line["difference"] = difference(out, truth[program.kind])
        except Exception as error:
            line["failed"] = one_line(error) if not isinstance(ready, str) else ready
        lines.append(line)
    return lines


def row(line: dict[str, Any], peak: Peak) -> str:
    """One line of the table."""
    work = line["work"]
    cells = [line["operation"], line["case"], line["pass"]]
    cells.append(line["by"] + (" (auto)" if line["auto"] else ""))
    if "failed" in line:
        cells += ["failed", "", "", "", "", "", line["failed"], ""]
    else:
        compared = f"{line['difference']:.0e}" if "difference" in line else "none"
        cells += [f"{line['fastest_ms']:.3f}", f"{line['median_ms']:.3f}"]
        cells += [f"{work.flops / 1e9:,.1f}", f"{work.bytes / 1e6:,.1f}", peak.bound(work)]
        cells += [f"{line['share']:.0%}", compared, line["expected"]]
    return "| " + " | ".join(cells) + " |"


HEADS = ("operation", "case", "pass", "implementation", "ms", "median", "GFLOP", "MB")
HEADS += ("bound", "of roofline", "difference", "expected on a GPU")


def run_here(config: Config) -> None:
    """Times what runs here, prints a line each and what was left out."""
    import jax

    from experiments import kernel_engine
    from experiments.kernel_sizes import cases

    started = time.perf_counter()
    platform, wanted = jax.default_backend(), config.operations or OPERATIONS
    peak, measured = peak_here()
    print(
        f"{jax.devices()[0].device_kind}: shares are of {peak.flops / 1e12:,.2f} TFLOP/s and "
        f"{peak.bandwidth / 1e9:,.0f} GB/s ({peak.name}); a matmul reaches "
        f"{measured.flops / 1e12:,.2f} TFLOP/s here, a copy {measured.bandwidth / 1e9:,.0f} GB/s"
    )
    print("| " + " | ".join(HEADS) + " |")
    print("| " + " | ".join(["---"] * len(HEADS)) + " |", flush=True)
    lines, left_out = [], []
    for case in cases(platform, config.tiny):
        if case.operation not in wanted:
            continue
        if time.perf_counter() - started > config.seconds:
            left_out.append(f"{case.operation} {case.name}")
            continue
        tell(f"{case.operation}: {case.name}")
        for line in run_case(case, config, peak):
            print(row(line, peak), flush=True)
            lines.append(line | {"work": dataclasses.asdict(line["work"])})
    if left_out:
        print(f"\n{config.seconds:.0f} seconds are over; left out: {'; '.join(left_out)}")
    found = None
    if config.engine == "auto" and platform != "cpu":
        found = kernel_engine.run(peak, tell)
        print("\n" + kernel_engine.spelt(found))
    tell(f"{time.perf_counter() - started:.0f} seconds in all")
    print(json.dumps({"peak": dataclasses.asdict(peak), "lines": lines, "engine": found}))


def main(config: Config) -> None:
    """Does what is asked for."""
    from experiments import kernel_targets

    wanted = config.operations or OPERATIONS
    if config.list:
        print("\n".join(kernel_targets.listing(wanted)))
    elif config.compile:
        kernel_targets.compile_all(wanted, tell, tiny=config.tiny)
    else:
        run_here(config)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
