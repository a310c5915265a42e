"""Times the sampling engine against its limit on this machine, transformers and vLLM.

Eight prompts of 64 tokens, eight responses each, temperature 1, no end ids; float32,
random weights. Uniform: every response has 128 tokens. Long-tail: the responses' limits come from a
geometric distribution (7 + geometric(1/32), between 8 and 128; 2,466 tokens in all). transformers,
which has no limits for single rows, decodes one batch up to the longest. Only tokens within a
response's own limit count as useful. vLLM's CPU build takes 64 requests, each with its own limit,
and computes a prompt's first block of 32 tokens once a run.

The limit ("ideal") is the model without attention over a cache and without a host: its matmuls and
its sampling, on rows that shrink to the next power of two as responses end.

Command:
    python -m experiments.benchmark_sampler                     # JAX alone
    python -m experiments.benchmark_sampler --torch-python /path/to/python-with-transformers \
        --vllm-python /path/to/python-with-vllm

Under Linux, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in front gives all of them huge pages.

Cost: about 4 minutes a model on 2 CPU cores, half of it compilation; 2 more for each peer.

Expected: nothing is compiled after warm-up; figures are in experiments/README.md.
"""

import dataclasses
import json
import sys
import time
from typing import Any

from experiments.sampler_peers import Config, lengths_of, prompts_of, rates
from experiments.timing import HOW_TO_COMPARE, peer_half

PEERS = {"torch": "transformers", "vllm": "vLLM"}
LEAST_ROWS = 4  # of the engine's decode steps and of the ideal ones


def tell(line: str) -> None:
    """Prints a line of progress; results go to standard output, it does not."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def run_engine(config: Config, model: Any, params: Any) -> dict[str, Any]:
    """The engine's rates, the cost of its warm-up, and where its time goes."""
    from rljax.monitoring import compilations
    from rljax.sampling import Engine, SamplingParams

    engine = Engine(
        model,
        slots=config.prompts * config.generations,
        max_length=config.prompt_length + config.new_tokens,
        least_rows=LEAST_ROWS,
        kernels=config.kernels,
    )
    engine.load(params, version=0)
    start = time.perf_counter()
    longest = SamplingParams(max_tokens=config.new_tokens)
    count = config.prompts * config.generations
    programs = engine.warm_up(
        sampling=longest, max_prompt_length=config.prompt_length, num_requests=count, tell=tell
    )
    found: dict[str, Any] = {"warm_up_s": time.perf_counter() - start, "programs": programs}
    before = compilations.count()
    prompts = prompts_of(config)
    for workload in config.workloads:
        limits = [SamplingParams(max_tokens=int(n)) for n in lengths_of(config, workload)]

        def run(limits: list[SamplingParams] = limits) -> int:
            groups = engine.generate(prompts, config.generations, limits)
            return sum(len(r.tokens) for group in groups for r in group)

        tell(f"engine, {workload}: {config.repeats + 1} runs")
        run()
        found[workload] = rates(run, config.repeats)
    found["late_compilations"] = compilations.count() - before
    return found


def uses_kernels(config: Config, model: Any) -> bool:
    """Whether the engine decodes with the kernels for CPUs."""
    from rljax.sampling.config import EngineConfig
    from rljax.sampling.kernels import choose

    return choose(model, None, EngineConfig.from_options(kernels=config.kernels)).native


def step_seconds(config: Config, model: Any, params: Any, rows: int, sampled: bool = True) -> float:
    """Seconds of a decode step of so many rows: matmuls, and sampling if wanted."""
    import jax
    import jax.numpy as jnp

    from rljax import models
    from rljax.models.forward import output_logits
    from rljax.sampling.token_sampling import key_words, keys_at, row_keys, sample_tokens
    from rljax.sampling.unstack import unstack_config, unstack_params, with_kernels

    native = uses_kernels(config, model)
    backend = "native" if native else "blocks"
    bare = unstack_config(dataclasses.replace(model, expert_backend=backend))

    def attend(q: Any, k: Any, v: Any, layer: Any, cache: Any, **_: Any) -> tuple[Any, Any]:
        return q + 1e-3 * jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), cache

    @jax.jit
    def steps(weights: Any, token: Any, keys: Any, count: Any) -> Any:
        def step(i: Any, token: Any) -> Any:
            hidden, _, _ = models.hidden_states(
                weights, bare, token[:, None], jnp.full((rows, 1), i), attend
            )
            z = output_logits(weights, bare, hidden[:, 0])
            if not sampled:
                return jnp.max(z, axis=-1).astype(jnp.int32) % model.vocab_size
            at = keys_at(keys, jnp.full(rows, i))
            return sample_tokens(at, z, jnp.ones(rows), None)[0]

        return jax.lax.fori_loop(0, count, step, token)

    weights = unstack_params(params, model)
    if native:
        weights = with_kernels(weights, model)
    keys = row_keys(key_words([(row, row, row, row) for row in range(rows)]))

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(steps(weights, jnp.arange(rows), keys, count))
        return time.perf_counter() - start

    seconds(1)
    few, many = (min(seconds(n) for _ in range(config.repeats)) for n in (1, 9))
    return (many - few) / 8


def run_ideal(config: Config, model: Any, params: Any) -> dict[str, Any]:
    """The rates that the matmuls and the sampling of ever fewer rows allow, and their seconds."""
    from rljax.sampling.decode_rows import Shapes

    count = config.prompts * config.generations
    exact = uses_kernels(config, model)
    shapes = Shapes(count, LEAST_ROWS, share=1, page_size=1, most_pages=1, exact=exact)
    both, alone = {}, {}
    for n in (rows for rows, *_ in shapes.every()):
        tell(f"ideal: steps of {n} rows")
        both[n] = step_seconds(config, model, params, n)
        alone[n] = step_seconds(config, model, params, n, sampled=False)
    found: dict[str, Any] = {"step_ms": {n: 1e3 * t for n, t in both.items()}}
    for workload in config.workloads:
        lengths = lengths_of(config, workload)
        rows = [shapes.rows(int((lengths > t).sum())) for t in range(max(lengths))]
        total = sum(both[n] for n in rows)
        found[workload] = {
            "best": int(lengths.sum()) / total,
            "matmuls_s": sum(alone[n] for n in rows),
            "sampling_s": total - sum(alone[n] for n in rows),
        }
    return found


def main(config: Config) -> None:
    """Times what there is and prints a line a model and workload."""
    import jax

    from rljax import models

    results = {}
    for name in config.models:
        tell(f"{name}: making random weights")
        model = models.PRESETS[name]()
        params = models.init(jax.random.key(0), model)
        engine, ideal = run_engine(config, model, params), run_ideal(config, model, params)
        peers = {}
        for library, python in (("torch", config.torch_python), ("vllm", config.vllm_python)):
            tell(f"{name}: {PEERS[library]}")
            module = "experiments.sampler_peers"
            peers[library] = peer_half(library, python, module, config, model=name)
        print(
            f"{name}: warm-up {engine['warm_up_s']:.0f} s, {engine['programs']} programs; "
            f"{engine['late_compilations']} compilations after it"
        )
        for workload in config.workloads:
            ours, limit = engine[workload], ideal[workload]
            total = int(lengths_of(config, workload).sum()) / ours["best"]
            rest = total - limit["matmuls_s"] - limit["sampling_s"]
            line = (
                f"  {workload:9} {ours['best']:6.0f} tokens/s (median {ours['median']:.0f}); "
                f"ideal {limit['best']:.0f}, share {ours['best'] / limit['best']:.2f}; "
                f"of {total:.2f} s: matmuls {limit['matmuls_s']:.2f}, "
                f"sampling {limit['sampling_s']:.2f}, attention, prefill and host {rest:.2f}"
            )
            for library, theirs in peers.items():
                if theirs is not None:
                    peer = theirs[workload]["best"]
                    line += f"; {PEERS[library]} {peer:.0f}, {ours['best'] / peer:.2f} x"
            print(line)
        for library, theirs in peers.items():
            if theirs is None:
                print(HOW_TO_COMPARE[library])
        results[name] = {"engine": engine, "ideal": ideal} | {
            PEERS[library]: theirs for library, theirs in peers.items()
        }
    print(json.dumps(results))


if __name__ == "__main__":
    import tyro

    from experiments import renamed_flags
    from experiments.flags import fail
    from rljax.errors import RljaxError

    try:
        old = {"native": "--kernels native", "no_native": "--kernels off"}
        renamed_flags.refuse(sys.argv[1:], old)
        main(tyro.cli(Config, description=__doc__))
    except RljaxError as error:
        sys.exit(fail(error))
