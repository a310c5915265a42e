r"""Samples responses to the prompts of a file with the paged-KV engine.

    python -m experiments.generate --model PATH --prompts questions.jsonl --out responses.jsonl
    python -m experiments.generate --model smollm2 --prompts q.jsonl --out r.jsonl \
        --template chat --num_generations 4 --temperature 0.7 --top_p 0.9

Every row of the file holds a question (or prompt, problem, ...), a text or chat messages. Each
response becomes a line of the output, written as soon as its prompt's last response is finished:
prompt_index, sample_index, prompt, tokens, text, logp (the sum, in nats), finish_reason. Lines come
in the order of finishing; prompt_index says where they belong. --help lists all flags. The last
line printed is JSON: responses, tokens, seconds, out.
"""

import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments import renamed_flags
from experiments.flags import fail, read
from rljax.errors import InputError, RljaxError

if TYPE_CHECKING:
    from rljax.sampling import Engine, Response


@dataclasses.dataclass(frozen=True)
class Config:
    """What to sample, and how."""

    model: str
    """A Hugging Face folder, a .gguf file, or smollm2 (from its package)."""
    prompts: Path
    """A JSONL or Parquet file of questions."""
    out: Path
    """The JSONL file to write; it must not exist yet."""
    question_column: str = ""
    """The column of the question; empty: the usual names are looked for."""
    template: Literal["none", "chat", "r1", "qwen-math"] = "none"
    """How a question becomes a prompt."""
    num_generations: int = 1
    """Responses a prompt."""
    max_tokens: int = 256
    """Most tokens of a response, its end token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that reach this probability; 1: all."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the model's end tokens."""
    seed: int = 0
    """Part of every random key: the same seed gives the same responses."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights, activations and KV cache."""
    mesh: str = ""
    """Sizes of mesh axes, such as data=2,tensor=4; empty puts all devices on fsdp."""
    rollout_rules: str = ""
    """Changes to how weights lie on the mesh, such as experts=fsdp+expert."""
    slots: int = 64
    """Sequences decoded at once."""
    page_size: int = 0
    """Tokens of a page of the KV cache; 0: 128 on TPU, where kernels need it, 16 elsewhere."""
    num_pages: int = 0
    """Pages of the KV cache; 0: enough for all slots at full length."""
    kernels: Literal["auto", "off", "native", "triton", "pallas", "blocked", "reference"] = "auto"
    """What decoding is computed by. native: C++ kernels, on one CPU in float32. triton, pallas:
    kernels for GPU and TPU that read the KV cache in place. blocked, reference: the same in plain
    JAX. off: XLA alone. auto: the fastest that is possible."""


def generate(config: Config) -> dict[str, Any]:
    """Samples all prompts, and writes the groups as they are finished.

    Returns:
      responses, tokens, seconds (of sampling, compilation included), out.

    Raises:
      ValueError: Something in the configuration or the file does not fit; one line.
      OSError: A file does not exist, or cannot be written.
    """
    import jax

    from rljax.data import PromptFormat, load_prompts, load_tokenizer, model_path
    from rljax.monitoring import LiveDisplay
    from rljax.sampling import SamplingParams

    if config.num_generations < 1:
        raise InputError(f"num_generations={config.num_generations} must be at least 1")
    if config.out.exists():
        raise InputError(f"out={str(config.out)!r} exists already; remove it or name another")
    path = model_path(config.model)
    tokenizer = load_tokenizer(path)
    prompts = load_prompts(
        config.prompts,
        tokenizer,
        PromptFormat(config.template, config.question_column or None, answer_column=""),
    )
    sampling = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_token_ids=tokenizer.end_ids,
        stop=config.stop,
    )
    engine = _engine(config, path, tokenizer, max(len(p.tokens) for p in prompts))
    mesh = engine.mesh
    groups = engine.generate(
        [p.tokens for p in prompts], config.num_generations, sampling, config.seed
    )
    started, responses, tokens = time.perf_counter(), 0, 0
    with (
        jax.set_mesh(mesh),
        config.out.open("x", encoding="utf-8") as file,
        LiveDisplay(len(prompts), f"{config.model} answers {len(prompts)} prompts") as display,
    ):
        for done, group in enumerate(groups, 1):
            for response in group:
                text = tokenizer.decode(response.tokens.tolist())
                line = _line(response, prompts[response.prompt_index].text, text)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                responses, tokens = responses + 1, tokens + len(response.tokens)
            file.flush()
            seconds = time.perf_counter() - started
            pace = {"completion/length_mean": tokens / responses}
            display.update(done, pace | {"perf/tokens_per_s": tokens / seconds})
    return {
        "responses": responses,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started, 2),
        "out": str(config.out),
    }


def _engine(config: Config, path: Path, tokenizer: Any, longest_prompt: int) -> "Engine":
    """An engine with the model's weights."""
    import jax

    from rljax import mesh as meshes
    from rljax import models
    from rljax.sampling import Engine

    # Programs with collectives in flight at once can wait for each other for ever on CPU devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mesh, dtype = meshes.from_flags(config.mesh), config.compute_dtype
    rules = meshes.read_rules(config.rollout_rules, meshes.ROLLOUT_RULES)
    _tell(f"loading {config.model}")
    loading = time.perf_counter()
    model, params = models.from_pretrained(path, dtype, mesh, rules=rules, compute_dtype=dtype)
    _tell(f"loaded {config.model} in {time.perf_counter() - loading:.1f} s")
    engine = Engine(
        model,
        mesh,
        slots=config.slots,
        page_size=config.page_size or None,
        num_pages=config.num_pages or None,
        kernels=config.kernels,
        max_length=longest_prompt + config.max_tokens,
        stop_ids=len(tokenizer.end_ids),
        detokenize=tokenizer.decode,
        rules=rules,
    )
    engine.load(params, version=0)
    return engine


def _tell(line: str) -> None:
    """Shows progress to those who watch a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _line(response: "Response", prompt: str, text: str) -> dict[str, Any]:
    return {
        "prompt_index": response.prompt_index,
        "sample_index": response.sample_index,
        "prompt": prompt,
        "tokens": response.tokens.tolist(),
        "text": text,
        "logp": float(response.logp.sum()),
        "finish_reason": response.finish_reason,
    }


def main() -> int:
    """Parses the flags, samples, prints a summary; 1 where the user must fix something."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        renamed_flags.refuse(sys.argv[1:], {"native": "--kernels native (or off)"})
        config = read(Config, sys.argv[1:], "python -m experiments.generate", __doc__)
        print(json.dumps(generate(config)))
    except RljaxError as error:
        return fail(error)
    except KeyboardInterrupt:
        print("stopped; what was finished is in the file", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
