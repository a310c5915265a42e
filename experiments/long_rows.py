"""Memory and time of the gradient of one long row, for `experiments.benchmark_model`.

The row is one sequence of random tokens; the loss is the mean of its tokens' log-probabilities;
every layer is recomputed in the backward pass. `temporaries` are what XLA plans beside weights and
gradients; each length is compiled, and those that are run once more with all scores of attention at
once. Each has a process of its own, whose peak of resident memory is that of the second pass,
weights and gradients included.

torch computes the same by transformers' model with scaled_dot_product_attention, recomputing each
layer too, and with the logits of `chunk` tokens at a time, recomputed as well.
"""

import contextlib
import ctypes
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.timing import peer_half


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
      model: A name of `rljax.models.PRESETS`.
      lengths: Tokens of the row.
      run: Lengths up to this one are run, and compiled with all scores at once.
      chunk: Tokens whose logits exist at a time.
      torch_python: A Python that has torch and transformers; None: this one, if it has torch.
      seed: Of the weights and tokens.
    """

    model: str = "speed-s"
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    run: int = 16_384
    chunk: int = 1024
    torch_python: Path | None = None
    seed: int = 0


def row_of(config: Config, length: int, vocab_size: int) -> np.ndarray:
    """Token ids, [1, length]."""
    return np.random.default_rng(config.seed).integers(0, vocab_size, (1, length))


def peak_memory(reset: bool = False) -> float:
    """The most GB that this process had resident, since the last reset where Linux allows it.

    A reset gives memory that is free back to the system, such as that of a compilation.
    """
    if reset:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def gradient(config: Config, length: int, **changes: Any) -> Any:
    """The compiled gradient of a row, by the weights and its tokens."""
    import jax
    import jax.numpy as jnp

    from rljax import models

    model = dataclasses.replace(models.PRESETS[config.model](), **({"remat": "layer"} | changes))
    params = jax.eval_shape(lambda: models.init(jax.random.key(0), model))

    def loss(params: Any, tokens: Any) -> Any:
        return -models.token_logprobs(params, model, tokens, chunk=config.chunk)[0].mean()

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.grad(loss)).lower(params, tokens).compile()


def run_jax(config: Config, folder: str, length: int, run: bool) -> dict[str, float]:
    """Compiles, and runs twice where wanted; GB, seconds and the gradient's norm."""
    import jax
    import jax.numpy as jnp

    from rljax import models

    start = time.perf_counter()
    step = gradient(config, length)
    found = {
        "compile_s": time.perf_counter() - start,
        "temporaries_gb": step.memory_analysis().temp_size_in_bytes / 1e9,
    }
    if not run:
        return found
    model, params = models.from_pretrained(Path(folder), jnp.float32)
    tokens = jnp.asarray(row_of(config, length, model.vocab_size), jnp.int32)

    def once() -> float:
        squares = [jnp.vdot(g, g) for g in jax.tree.leaves(step(params, tokens))]
        return float(jnp.sqrt(sum(squares)))

    return found | twice(once)


def twice(once: Any) -> dict[str, float]:
    """Seconds, peak memory and result of a function's second call."""
    once()
    peak_memory(reset=True)
    start = time.perf_counter()
    value = once()
    return {"s": time.perf_counter() - start, "peak_gb": peak_memory(), "value": value}


def run_torch(config: Config, folder: str, length: int) -> dict[str, float]:
    """The same by transformers and torch."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()
    model.gradient_checkpointing_enable()
    ids = torch.from_numpy(row_of(config, length, model.config.vocab_size))

    def part(hidden: Any, targets: Any) -> Any:
        logits = model.lm_head(hidden)
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def once() -> float:
        model.zero_grad()
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        targets = ids[0, 1:]
        total = sum(
            checkpoint(
                part,
                hidden[i : i + config.chunk],
                targets[i : i + config.chunk],
                use_reentrant=False,
            )
            for i in range(0, length - 1, config.chunk)
        )
        (total / length).backward()
        squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
        return torch.stack(squares).sum().sqrt().item()

    return twice(once)


def measure(config: Config, folder: str) -> list[dict[str, Any]]:
    """Every length, each in processes of their own, on the weights in a folder."""
    found = []
    for length in config.lengths:
        run = length <= config.run
        print(f"a row of {length:,} tokens", file=sys.stderr, flush=True)
        line: dict[str, Any] = {"tokens": length}
        module, this = "experiments.long_rows", Path(sys.executable)
        line["jax"] = peer_half("jax", this, module, config, folder=folder, length=length, run=run)
        if run:
            whole = gradient(config, length, attention_backend="reference")
            line["reference_gb"] = whole.memory_analysis().temp_size_in_bytes / 1e9
            line["torch"] = peer_half(
                "torch", config.torch_python, module, config, folder=folder, length=length
            )
            if line["torch"] is not None:
                np.testing.assert_allclose(
                    line["jax"]["value"], line["torch"]["value"], rtol=1e-3, atol=1e-5
                )
        found.append(line)
    return found


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The lines of the table."""
    heads = ["tokens of the row", "temporaries, GB", "all scores at once, GB"]
    heads += ["peak of the process, GB", "s", "torch: peak, GB", "s", "JAX's speed"]
    cells = [heads, ["---"] * len(heads)]
    for line in lines:
        ours, theirs = line["jax"], line.get("torch")
        cells.append([f"{line['tokens']:,}", f"{ours['temporaries_gb']:.2f}"])
        cells[-1] += [f"{line['reference_gb']:.2f}"] if "reference_gb" in line else [""]
        cells[-1] += [f"{ours['peak_gb']:.2f}", f"{ours['s']:.1f}"] if "s" in ours else ["", ""]
        if theirs is None:
            cells[-1] += [""] * 3
        else:
            cells[-1] += [f"{theirs['peak_gb']:.2f}", f"{theirs['s']:.1f}"]
            cells[-1].append(f"{theirs['s'] / ours['s']:.2f}")
    return ["| " + " | ".join(row) + " |" for row in cells]
