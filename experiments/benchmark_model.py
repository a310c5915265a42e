"""Times a model's forward and backward pass against the same model in transformers on torch.

Both sides get the same random weights (through a folder that `models.save_pretrained` writes) and
the same random tokens, in float32. `forward` computes the log-probability of every token (where a
row has one token: the logits, from layers held apart, as in decoding); `both` also the gradient of
their mean. Rows go through in micro-batches, whose gradients are added up. The results are compared
too.

A second table is of one long row: memory and time of its gradient, by its tokens
(`experiments.long_rows` says how).

torch runs with each number of threads and, for mixtures, with each of transformers' ways to
compute experts; the fastest is reported. JAX uses all cores. The share of the peak is that of
2 operations a token and parameter used forward, 6 for both (attention's own products are not
counted), over what a float32 matmul of `matmul_size` reaches in the same run.

Command:
    python -m experiments.benchmark_model                      # JAX alone
    python -m experiments.benchmark_model --torch-python /path/to/python-with-torch-and-transformers

Cost: about 12 minutes on 2 CPU cores for the first table, 5 without torch, and as much for the
second, most of it the row of 16,384 tokens; 6 GB of memory.

Expected: values agree to 1e-4; see experiments/README.md for the times.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments import long_rows
from experiments.timing import HOW_TO_COMPARE, peer_half, timed


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time.

    Attributes:
      models: Names of `rljax.models.PRESETS`.
      tables: Which of the two to measure.
      shapes: Rows x tokens of a row.
      micro_batch: Rows computed at once, at most.
      micro_batch_tokens: Their tokens, at most, but for a row of its own.
      repeats: Timed runs; the median and the fastest are reported.
      warm_up: Runs before them.
      threads: What torch tries.
      matmul_size: Side of the square matrices that tell the machine's peak.
      torch_python: A Python that has torch and transformers; None: this one, if it has torch.
      native: Whether rljax uses the kernels of `rljax_kernels.cpu`, where it has them.
      lengths: Tokens of the long rows, of the first of the models.
      run: Long rows up to this one are run; all are compiled.
      seed: Of the weights and tokens.
    """

    models: tuple[str, ...] = ("speed-s", "speed-m")
    tables: tuple[Literal["speed", "long-rows"], ...] = ("speed", "long-rows")
    shapes: tuple[str, ...] = ("64x1", "8x192", "64x192", "8x2048")
    micro_batch: int = 8
    micro_batch_tokens: int = 2048
    repeats: int = 3
    warm_up: int = 1
    threads: tuple[int, ...] = (1, 2)
    matmul_size: int = 2048
    torch_python: Path | None = None
    native: bool = True
    lengths: tuple[int, ...] = long_rows.Config.lengths
    run: int = long_rows.Config.run
    seed: int = 0


def batches(config: Config, shape: str, vocab_size: int) -> list[np.ndarray]:
    """Random tokens of a shape, cut into micro-batches; one-token rows go together."""
    rows, length = (int(n) for n in shape.split("x"))
    tokens = np.random.default_rng(config.seed).integers(0, vocab_size, (rows, length))
    fits = max(config.micro_batch_tokens // length, 1)
    step = rows if length == 1 else min(config.micro_batch, fits, rows)
    return [tokens[i : i + step].astype(np.int32) for i in range(0, rows, step)]


def gigaflops(matmul: Any, size: int) -> float:
    """Rate of a square matmul that waits for its result, the best of many."""
    return 2 * size**3 / timed(matmul, 20)["fastest_ms"] / 1e6


def run_jax(config: Config, folder: Path) -> dict[str, Any]:
    """Times rljax's own models, and leaves their weights in `folder`."""
    import jax
    import jax.numpy as jnp

    from rljax import models
    from rljax.sampling import unstack

    square = jnp.ones((config.matmul_size, config.matmul_size))
    matmul = jax.jit(jnp.matmul)
    peak = gigaflops(lambda: matmul(square, square).block_until_ready(), config.matmul_size)
    cases: dict[str, Any] = {}
    for name in config.models:
        model = models.PRESETS[name]()
        params = models.init(jax.random.key(config.seed), model)
        models.save_pretrained(folder / name, model, params)
        backend = "native" if config.native else "blocks"
        model = dataclasses.replace(model, expert_backend=backend)
        views = unstack.unstack_params(params, model)
        if config.native:
            views = unstack.with_kernels(views, model)
        decoding = (unstack.unstack_config(model), views)
        for shape in config.shapes:
            print(f"timing jax: {name} {shape}", file=sys.stderr, flush=True)
            held = decoding if shape.endswith("x1") else (model, params)
            cases[f"{name} {shape}"] = time_case(config, *held, shape)
    return {"peak_gflops": peak, "cases": cases}


def time_case(config: Config, model: Any, params: Any, shape: str) -> dict[str, Any]:
    """Times one model of ours on one shape: forward, and but for decoding with its gradient."""
    import jax
    import jax.numpy as jnp

    from rljax import models

    parts = [jnp.asarray(part) for part in batches(config, shape, model.vocab_size)]
    tokens = sum(part.size for part in parts)

    def forward(params: Any, part: Any) -> Any:
        if part.shape[1] == 1:
            return models.logits(params, model, part).sum()
        return models.token_logprobs(params, model, part)[0].sum()

    def add(params: Any, total: Any, part: Any) -> Any:
        gradient = jax.grad(lambda p: forward(p, part) / tokens)(params)
        return jax.tree.map(jnp.add, total, gradient)

    start = time.perf_counter()
    value = jax.jit(forward).lower(params, parts[0]).compile()
    found = {"forward": {"compile_s": time.perf_counter() - start}}

    def all_values() -> Any:
        return jax.block_until_ready([value(params, part) for part in parts])

    found["forward"] |= {
        "value": float(sum(all_values())) / tokens,
        **timed(all_values, config.repeats, config.warm_up),
    }
    if parts[0].shape[1] > 1:
        zeros = jax.tree.map(jnp.zeros_like, params)
        start = time.perf_counter()
        step = jax.jit(add, donate_argnums=1).lower(params, zeros, parts[0]).compile()
        found["both"] = {"compile_s": time.perf_counter() - start}

        def gradient() -> Any:
            total = jax.tree.map(jnp.zeros_like, params)
            for part in parts:
                total = step(params, total, part)
            return jax.block_until_ready(total)

        norm = sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(gradient())) ** 0.5
        found["both"] |= {"value": norm, **timed(gradient, config.repeats, config.warm_up)}
    for kind, times in found.items():
        times["flops"] = (2 if kind == "forward" else 6) * models.count_active(model) * tokens
    return found


def run_torch(config: Config, folder: str) -> dict[str, Any]:
    """Times transformers' models with the weights in `folder`, in the fastest of their ways."""
    import torch
    from transformers import AutoModelForCausalLM

    square, peak = torch.ones(config.matmul_size, config.matmul_size), 0.0
    cases: dict[str, Any] = {}
    for threads in config.threads:
        torch.set_num_threads(threads)
        peak = max(peak, gigaflops(lambda: square @ square, config.matmul_size))
    for name in config.models:
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / name, dtype=torch.float32)
        mixture = hasattr(model.config, "num_experts")
        ways = [
            (n, w) for n in config.threads for w in (("eager", "grouped_mm") if mixture else ("",))
        ]
        for shape in config.shapes:
            parts = [
                torch.from_numpy(part).long()
                for part in batches(config, shape, model.config.vocab_size)
            ]
            tokens = sum(part.numel() for part in parts)

            def forward(part: Any, model: Any = model) -> Any:
                logits = model(input_ids=part, use_cache=False).logits
                if part.shape[1] == 1:
                    return logits.sum()
                return -torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
                )

            def all_values(
                parts: Any = parts, forward: Any = forward, tokens: int = tokens
            ) -> float:
                with torch.no_grad():
                    return sum(forward(part).item() for part in parts) / tokens

            def gradient(
                parts: Any = parts, forward: Any = forward, tokens: int = tokens, model: Any = model
            ) -> float:
                model.zero_grad()
                for part in parts:
                    (forward(part) / tokens).backward()
                squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
                return torch.stack(squares).sum().sqrt().item()

            found: dict[str, Any] = {}
            for threads, way in ways:
                torch.set_num_threads(threads)
                if way:
                    model.set_experts_implementation(way)
                for kind, function in (("forward", all_values), ("both", gradient)):
                    if kind == "both" and parts[0].shape[1] == 1:
                        continue
                    value = function()
                    times = timed(function, config.repeats, max(0, config.warm_up - 1))
                    best = found.get(kind)
                    if best is None or times["fastest_ms"] < best["fastest_ms"]:
                        found[kind] = {"value": value, "threads": threads, "way": way, **times}
            cases[f"{name} {shape}"] = found
            print(f"timed torch: {name} {shape}", file=sys.stderr, flush=True)
    return {"peak_gflops": peak, "cases": cases}


def row(case: str, kind: str, ours: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    """One line of the table."""
    mine = ours["cases"][case][kind]
    share = mine["flops"] / mine["fastest_ms"] / 1e6 / ours["peak_gflops"]
    cells = [case, kind, f"{mine['fastest_ms']:,.1f}", f"{mine['median_ms']:,.1f}", f"{share:.0%}"]
    if theirs is not None:
        other = theirs["cases"][case][kind]
        share = mine["flops"] / other["fastest_ms"] / 1e6 / theirs["peak_gflops"]
        cells += [f"{other['fastest_ms']:,.1f}", f"{other['median_ms']:,.1f}", f"{share:.0%}"]
        cells += [f"{other['threads']} {other['way']}".strip()]
        cells += [f"{other['fastest_ms'] / mine['fastest_ms']:.2f} x"]
    return "| " + " | ".join([*cells, f"{mine['compile_s']:.1f}"]) + " |"


def speed_table(config: Config, folder: str) -> dict[str, Any]:
    """Runs both halves and prints one line a measurement."""
    ours = run_jax(config, Path(folder))
    module = "experiments.benchmark_model"
    theirs = peer_half("torch", config.torch_python, module, config, folder=folder)
    print(f"float32 matmul of {config.matmul_size}: jax {ours['peak_gflops']:.0f} GFLOP/s")
    heads = ["case", "what", "jax ms", "median", "of peak"]
    if theirs is not None:
        print(f"the same in torch: {theirs['peak_gflops']:.0f} GFLOP/s")
        heads += ["torch ms", "median", "of peak", "threads", "jax's speed"]
    heads += ["jax compiles, s"]
    print("| " + " | ".join(heads) + " |")
    print("| " + " | ".join(["---"] * len(heads)) + " |")
    for case, kinds in ours["cases"].items():
        for kind, mine in kinds.items():
            print(row(case, kind, ours, theirs))
            if theirs is not None:
                want = theirs["cases"][case][kind]["value"]
                np.testing.assert_allclose(mine["value"], want, rtol=1e-4, atol=1e-4)
    if theirs is None:
        print(HOW_TO_COMPARE["torch"])
    return {"jax": ours, "torch": theirs}


def long_rows_table(config: Config, folder: str) -> list[dict[str, Any]]:
    """Measures and prints the table of long rows."""
    import jax

    from rljax import models

    name = config.models[0]
    model = models.PRESETS[name]()
    params = models.init(jax.random.key(config.seed), model)
    models.save_pretrained(Path(folder) / name, model, params)
    wanted = long_rows.Config(
        name, config.lengths, config.run, torch_python=config.torch_python, seed=config.seed
    )
    found = long_rows.measure(wanted, str(Path(folder) / name))
    print("\n".join(["", f"the gradient of one row of {name}", "", *long_rows.table(found)]))
    return found


def main(config: Config) -> None:
    """Measures and prints the tables."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        if "speed" in config.tables:
            found = speed_table(config, folder)
        if "long-rows" in config.tables:
            found["long_rows"] = long_rows_table(config, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
