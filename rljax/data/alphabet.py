"""The alphabet of a character tokenizer: what a model from random weights must be able to write."""

from collections.abc import Sequence

from rljax.data.prompts import PromptFormat
from rljax.data.sources import Source, describe, load_rows, question_and_answer
from rljax.data.templates import render
from rljax.data.tokenizers import CharTokenizer


def alphabet(rows: Sequence[Source], prompt_format: PromptFormat | None = None) -> str:
    """The characters of all prompts, as rendered, and of all answers.

    Args:
      rows: Every set of rows that the run reads: of training, of validation, of evaluation
        (files are read whole; of a task or folder load a split first, by `load_rows`).
      prompt_format: The run's template and columns.

    Returns:
      Each character once, sorted: what `CharTokenizer` takes.

    Raises:
      InputError: As `load_prompts`; template="chat" needs a pretrained tokenizer.
    """
    prompt_format = prompt_format or PromptFormat()
    probe = CharTokenizer(" ")  # templates ask it for its start token, of which it has none
    found: set[str] = set()
    for part in rows:
        for row in question_and_answer(
            load_rows(part),
            prompt_format.question_column,
            prompt_format.answer_column,
            describe(part),
        ):
            found.update(render(prompt_format.template, row["question"], probe))
            found.update(row.get("answer", ""))
    return "".join(sorted(found))
