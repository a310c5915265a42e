"""The sampling engine on a model of 7B beside its roofline, for `experiments.benchmark_kernels`."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODEL = "qwen2.5-7b"
ROWS, PROMPT, NEW_TOKENS = 128, 256, 256


def limit(model: Any, rows: int, seen: int, peak: Any) -> float:
    """Tokens a second of decode steps that read each weight and each row's keys and values once.

    Args:
      model: The configuration, in bfloat16.
      rows: Sequences of a step.
      seen: Tokens of a sequence, on average.
      peak: The device's rates.
    """
    from rljax import models
    from rljax.planning.memory import kv_bytes

    used = models.count_active(model)
    if not model.tie_embeddings:
        used -= model.vocab_size * model.hidden_size  # looked up, not multiplied
    moved = 2 * used + rows * kv_bytes(model, seen)
    return rows / max(moved / peak.bandwidth, 2 * rows * used / peak.flops)


def run(
    peak: Any,
    tell: Callable[[str], None],
    name: str = MODEL,
    sizes: tuple[int, int, int] = (ROWS, PROMPT, NEW_TOKENS),
    **options: Any,
) -> dict[str, Any]:
    """Samples once to warm up and once timed.

    Args:
      peak: The device's rates.
      tell: Is given lines of progress.
      name: Of the model.
      sizes: Sequences, tokens of a prompt, new tokens.
      **options: Of the engine.

    Returns:
      Tokens, tokens a second, those of the roofline, seconds of the warm-up and its programs.
    """
    import jax
    import jax.numpy as jnp

    from rljax import models
    from rljax.sampling import Engine, SamplingParams

    rows, prompt, new_tokens = sizes
    model = dataclasses.replace(models.PRESETS[name](), dtype="bfloat16")
    tell(f"engine: random weights of {name}")
    params = models.init(jax.random.key(0), model, jnp.bfloat16)
    engine = Engine(
        model, slots=rows, least_rows=rows, share=1, max_length=prompt + new_tokens, **options
    )
    engine.load(params, version=0)
    del params
    sampling = SamplingParams(max_tokens=new_tokens)
    start = time.perf_counter()
    programs = engine.warm_up(
        sampling=sampling, max_prompt_length=prompt, num_requests=rows, tell=tell
    )
    warm = time.perf_counter() - start
    prompts = np.random.default_rng(0).integers(16, model.vocab_size, (rows, prompt))

    def timed(limit: int) -> tuple[float, int]:
        """Seconds, and the tokens that were made."""
        engine.forget_prefixes()
        start = time.perf_counter()
        groups = engine.generate(prompts, 1, SamplingParams(max_tokens=limit))
        made = sum(len(response.tokens) for group in groups for response in group)
        return time.perf_counter() - start, made

    tell("engine: sampling")
    (prefill, first), (whole, made) = (min(timed(n) for _ in range(2)) for n in (1, new_tokens))
    return {
        "model": name,
        "rows": rows,
        "tokens": made,
        "tokens_per_s": made / whole,
        "decode_tokens_per_s": (made - first) / (whole - prefill),
        "limit": limit(model, rows, prompt + new_tokens // 2, peak),
        "warm_up_s": warm,
        "programs": programs,
    }


def spelt(found: dict[str, Any]) -> str:
    """The result as a line."""
    return (
        f"engine, {found['model']} in bfloat16, {found['rows']} sequences: "
        f"{found['tokens_per_s']:,.0f} tokens/s; without prefill "
        f"{found['decode_tokens_per_s']:,.0f}, roofline of decoding {found['limit']:,.0f}, share "
        f"{found['decode_tokens_per_s'] / found['limit']:.0%}; warm-up "
        f"{found['warm_up_s']:.0f} s, {found['programs']} programs"
    )
