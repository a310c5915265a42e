"""The sampler's benchmark: what is timed, and the halves that run on other libraries.

`experiments.benchmark_sampler` compares with them; they run in a Python that need not have JAX.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np


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


def rates(run: Callable[[], int], repeats: int) -> dict[str, float]:
    """Useful tokens a second of a call that returns how many it made: median and best."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = run()
        found.append(tokens / (time.perf_counter() - start))
    return {"median": float(np.median(found)), "best": max(found)}


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
