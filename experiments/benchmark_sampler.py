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
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.timing import HOW_TO_COMPARE, peer_half


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time.

    Attributes:
        models: Configurations: S, a dense model of 29M parameters, and M, S with 8 experts.
        workloads: Lengths of the responses.
        prompts: Prompts.
        prompt_length: Tokens of each.
        generations: Responses a prompt.
        new_tokens: Tokens of the longest response.
        repeats: Timed runs; the median and the fastest are reported.
        kernels: Whether the engine, and its limit, decode with the kernels for CPUs: where that is
            possible (auto), else refuse (native), or never (off).
        torch_python: A Python with torch and transformers; None: this one, if it has them.
        vllm_python: A Python with vLLM's CPU build; None: this one, if it has it.
    """

    models: tuple[Literal["speed-s", "speed-m"], ...] = ("speed-s", "speed-m")
    workloads: tuple[Literal["uniform", "long-tail"], ...] = ("uniform", "long-tail")
    prompts: int = 8
    prompt_length: int = 64
    generations: int = 8
    new_tokens: int = 128
    repeats: int = 3
    kernels: Literal["auto", "native", "off"] = "auto"
    torch_python: Path | None = None
    vllm_python: Path | None = None


VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PEERS = {"torch": "transformers", "vllm": "vLLM"}
LEAST_ROWS = 4  # of the engine's decode steps and of the ideal ones


def prompts_of(config: Config) -> np.ndarray:
    """Token ids, [prompts, prompt_length]."""
    shape = (config.prompts, config.prompt_length)
    return np.random.default_rng(0).integers(16, 8192, shape)


def lengths_of(config: Config, workload: str) -> np.ndarray:
    """Tokens of each response, prompt by prompt."""
    count = config.prompts * config.generations
    if workload == "uniform":
        return np.full(count, config.new_tokens)
    drawn = 7 + np.random.default_rng(1).geometric(1 / 32, count)
    return np.clip(drawn, min(8, config.new_tokens), config.new_tokens)


def tell(line: str) -> None:
    """Prints a line of progress; results go to standard output, it does not."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def rates(run: Callable[[], int], repeats: int) -> dict[str, float]:
    """Useful tokens a second of a call that returns how many it made: median and best."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = run()
        found.append(tokens / (time.perf_counter() - start))
    return {"median": float(np.median(found)), "best": max(found)}


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
    from rljax.sampling.config import ProgramConfig
    from rljax.sampling.kernels import choose

    return choose(model, None, ProgramConfig(kernels=config.kernels)).native


def step_seconds(config: Config, model: Any, params: Any, rows: int, sampled: bool = True) -> float:
    """Seconds of a decode step of so many rows: matmuls, and sampling if wanted."""
    import jax
    import jax.numpy as jnp

    from rljax import models
    from rljax.models.forward import output_logits
    from rljax.sampling.token_sampling import key_words, keys_at, row_keys, sample_tokens
    from rljax.sampling.unstack import unstack_config, unstack_params, with_kernels

    native = uses_kernels(config, model)
    backend = "native" if native else None
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
    from rljax.sampling.rows import Shapes

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


def torch_policy(model: str) -> Any:
    """The transformers model of a configuration, with random weights."""
    import torch
    import transformers

    sizes: dict[str, Any] = dict(
        vocab_size=8192, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    if model == "speed-s":
        architecture = transformers.Qwen3Config(intermediate_size=1536, **sizes)
    else:
        architecture = transformers.Qwen3MoeConfig(
            moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, **sizes,
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(architecture).eval()


def run_torch(config: Config, model: str) -> dict[str, Any]:
    """The rates of transformers' generate, at the same sizes and lengths."""
    import torch

    policy = torch_policy(model)
    tokens = torch.from_numpy(prompts_of(config)).repeat_interleave(config.generations, dim=0)
    found = {}
    for workload in config.workloads:
        lengths = lengths_of(config, workload)

        def run(lengths: np.ndarray = lengths) -> int:
            with torch.inference_mode():
                policy.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=int(max(lengths)),
                    min_new_tokens=int(max(lengths)),
                    eos_token_id=None,
                    pad_token_id=0,
                )
            return int(lengths.sum())

        run()
        found[workload] = rates(run, config.repeats)
    return found


def run_vllm(config: Config, model: str) -> dict[str, Any]:
    """The rates of vLLM's CPU build, compiled, at the same sizes and lengths."""
    with tempfile.TemporaryDirectory() as folder:
        # vLLM reads these as it is imported; what it compiles for this folder serves no other run.
        os.environ.update(VLLM_ENVIRONMENT, VLLM_CACHE_ROOT=folder)
        import vllm

        torch_policy(model).save_pretrained(folder)
        engine = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=32,
            enable_prefix_caching=True,
            max_num_seqs=config.prompts * config.generations,
            max_model_len=config.prompt_length + config.new_tokens,
        )
        prompts = [
            {"prompt_token_ids": row}
            for row in prompts_of(config).tolist()
            for _ in range(config.generations)
        ]
        found = {}
        for workload in config.workloads:
            limits = [
                vllm.SamplingParams(
                    temperature=1, max_tokens=int(n), ignore_eos=True, detokenize=False
                )
                for n in lengths_of(config, workload)
            ]

            def run(limits: list[Any] = limits) -> int:
                engine.reset_prefix_cache()  # as new weights do: no run finds another's prompts
                responses = engine.generate(prompts, limits, use_tqdm=False)
                return sum(len(r.outputs[0].token_ids) for r in responses)

            run()
            found[workload] = rates(run, config.repeats)
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
            module = "experiments.benchmark_sampler"
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
