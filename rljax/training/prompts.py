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


def alphabet(config: Config, rows: Rows | None = None, eval_rows: Rows | None = None) -> str:
    """The characters of the questions and answers: what a model from random weights must know.

    Args:
      config: Names the data.
      rows: Rows to train on in place of the named data.
      eval_rows: Held-out rows in place of the named ones.
    """
    data = config.data
    found = list(rows) if rows is not None else load_rows(_source(config), "train")
    if eval_rows is not None:
        found += list(eval_rows)
    elif data.eval_data:
        found += load_rows(data.eval_data, "test")
    texts = [str(value) for row in found for value in _values(row)]
    return "".join(sorted({character for text in texts for character in text}))


def _values(row: Any) -> list[Any]:
    return list(row.values()) if isinstance(row, dict) else [row]


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
    data = config.data
    style = PromptFormat(
        data.template,
        data.question_column or None,
        data.answer_column or None,
        data.max_prompt_length,
    )
    source = _source(config) if rows is None else list(rows)
    stream = PromptStream(source, tokenizer, style, seed=config.run.seed)
    processes.agree({"digest of the prompts": stream.get_state()["digest"]})
    generated = rows is None and data.data in TASKS
    held_out: list[Prompt] = []
    if eval_rows is not None:
        held_out = load_prompts(list(eval_rows), tokenizer, style)
    elif data.eval_data or (rows is None and (generated or Path(data.data).is_dir())):
        held_out = load_prompts(data.eval_data or data.data, tokenizer, style, split="test")
    most = config.evals.eval_prompts
    validation = []
    if generated:
        validation = load_prompts(data.data, tokenizer, style, split="validation")
    return RunPrompts(stream, held_out[:most] if most else held_out, validation)


def _source(config: Config) -> str:
    if not config.data.data:
        raise InputError(
            f"data is not set; give a JSONL or Parquet file or folder, or one of {', '.join(TASKS)}"
        )
    return config.data.data
