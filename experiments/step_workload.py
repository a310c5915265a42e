"""The workload of `experiments.benchmark_step`: what every side of it is given."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import numpy as np

VOCABULARY = 8192
SPECIAL = ("<pad>", "<end>", "<unknown>")
"""The first tokens; prompts have none of them, and no response ends before its limit."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time.

    Attributes:
      model: A dense configuration of `rljax.models.PRESETS`, of 8,192 tokens.
      workloads: step: a whole step of reinforcement learning, every response of `new_tokens`.
        long-tail: an update alone, on responses of the lengths of `lengths_of`.
      prompts: Prompts of a step.
      prompt_length: Tokens of each.
      generations: Responses a prompt.
      new_tokens: Tokens of a response, at most.
      micro_batch: Rows of a micro-batch: of the peers, and of ours where rows are not packed.
      tunix_micro_batch: Rows of a micro-batch of tunix, which is faster with more; whole groups.
      repeats: Timed steps; the median and the fastest are reported.
      learning_rate: Of AdamW.
      variants: Settings of ours; empty: all that `experiments.benchmark_step` names.
      peers: Who else is timed, where there is a Python for it.
      checkpointing: Whether the peers recompute activations in the backward pass. They are faster
        without.
      trl_python: A Python with trl; None: this one, if it has it.
      tunix_python: A Python with google-tunix; None: this one, if it has it.
      torch_python: A Python with torch and transformers; None: this one, if it has them.
    """

    model: str = "speed-s"
    workloads: tuple[Literal["step", "long-tail"], ...] = ("step", "long-tail")
    prompts: int = 8
    prompt_length: int = 64
    generations: int = 8
    new_tokens: int = 128
    micro_batch: int = 8
    tunix_micro_batch: int = 16
    repeats: int = 3
    learning_rate: float = 1e-6
    variants: tuple[str, ...] = ()
    peers: tuple[Literal["trl", "tunix", "torch"], ...] = ("trl", "tunix", "torch")
    checkpointing: bool = False
    trl_python: Path | None = None
    tunix_python: Path | None = None
    torch_python: Path | None = None

    @property
    def responses(self) -> int:
        """Responses of a step."""
        return self.prompts * self.generations


def prompts_of(config: Config) -> np.ndarray:
    """Token ids, [prompts, prompt_length]."""
    shape = (config.prompts, config.prompt_length)
    return np.random.default_rng(0).integers(16, VOCABULARY, shape)


def texts_of(config: Config) -> list[str]:
    """The prompts as the tokenizer of `write_tokenizer` reads them: a word a token."""
    return [" ".join(f"w{token}" for token in row) for row in prompts_of(config).tolist()]


def lengths_of(config: Config) -> np.ndarray:
    """Tokens of the long-tail responses, [responses]."""
    drawn = 7 + np.random.default_rng(1).geometric(1 / 32, config.responses)
    return np.clip(drawn, min(8, config.new_tokens), config.new_tokens)


def responses_of(config: Config) -> list[np.ndarray]:
    """Token ids of the long-tail responses."""
    rng = np.random.default_rng(2)
    return [rng.integers(16, VOCABULARY, n).astype(np.int32) for n in lengths_of(config)]


def parities(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward that differs within every group: whether the sum of a response's ids is odd."""
    return [float(sum(map(int, ids)) % 2) for ids in completion_ids]


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of the words w3, w4, ... that transformers loads."""
    plain_words = (f"w{token}" for token in range(len(SPECIAL), VOCABULARY))
    words = {word: token for token, word in enumerate((*SPECIAL, *plain_words))}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": word, "special": True, **plain} for i, word in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[2]},
    }
    settings = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
