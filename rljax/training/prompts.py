"""The prompts of a run: to train on, held out, and for validation of the supervised warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax import processes
from rljax.config import Config
from rljax.data import (
    TASKS,
    Prompt,
    PromptFormat,
    PromptStream,
    Tokenizer,
    alphabet,
    load_prompts,
    load_rows,
)
from rljax.errors import InputError

Rows = Sequence[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class RunPrompts:
    """The prompts of a run.

    Attributes:
      stream: Those to train on, without end; its position is part of the run's state.
      held_out: Those of evaluations.
      validation: Those that end the supervised warm-up.
    """

    stream: PromptStream
    held_out: list[Prompt]
    validation: list[Prompt]


def run_alphabet(config: Config, rows: Rows | None = None, eval_rows: Rows | None = None) -> str:
    """The characters of all data of a run: what a model from random weights must know.

    Args:
      config: Names the data.
      rows: Rows to train on in place of the named data.
      eval_rows: Held-out rows in place of the named ones.
    """
    splits = [("train", rows), ("validation", None), ("test", eval_rows)]
    found = [(_find(config, split, own, rows), split) for split, own in splits]
    sources = [load_rows(source, split) for source, split in found if source is not None]
    return alphabet(sources, _prompt_format(config))


def _find(config: Config, split: str, own: Rows | None, rows: Rows | None) -> Any:
    """Where a split of the run's data comes from; None where it has none."""
    data = config.data
    if own is not None:
        return list(own)
    if split == "train":
        if not data.data:
            raise InputError(
                "data is not set; give a JSONL or Parquet file or folder, or one of "
                f"{', '.join(TASKS)}"
            )
        return data.data
    if split == "test" and data.eval_data:
        return data.eval_data
    named = rows is None
    if named and (data.data in TASKS or (split == "test" and Path(data.data).is_dir())):
        return data.data
    return None


def _prompt_format(config: Config) -> PromptFormat:
    data = config.data
    return PromptFormat(
        data.template,
        data.question_column or None,
        data.answer_column or None,
        data.max_prompt_length,
    )


def load_run_prompts(
    config: Config, tokenizer: Tokenizer, rows: Rows | None = None, eval_rows: Rows | None = None
) -> RunPrompts:
    """The prompts that a configuration names, or those of the caller's own rows.

    Args:
      config: The configuration.
      tokenizer: Encodes them.
      rows: Rows to train on: dicts with a question and an answer, or chat messages.
      eval_rows: Held-out rows.

    Raises:
      InputError: There are none, or they are malformed.
    """
    style, seed = _prompt_format(config), config.run.seed
    stream = PromptStream(_find(config, "train", rows, rows), tokenizer, style, seed=seed)
    processes.agree({"digest of the prompts": stream.get_state()["digest"]})

    def load(split: str, own: Rows | None) -> list[Prompt]:
        source = _find(config, split, own, rows)
        return [] if source is None else load_prompts(source, tokenizer, style, split=split)

    most = config.evals.eval_prompts
    held_out = load("test", eval_rows)
    return RunPrompts(stream, held_out[:most] if most else held_out, load("validation", None))
