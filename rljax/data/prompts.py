"""The stream of prompts: an endless, reshuffled, exactly resumable walk over a data set."""

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import grain
import numpy as np
from jaxtyping import Int32

from rljax.data.sources import Source, describe, load_rows, question_and_answer
from rljax.data.templates import render
from rljax.data.tokenizers import Tokenizer
from rljax.errors import InputError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One question, ready to be sampled from.

    Attributes:
      id: The row of the data set (its number in the source and split, dropped rows counted).
      draw: How often this prompt was drawn before: the epoch.
      tokens: The rendered text's token ids, int32 [n].
      text: The rendered text.
      columns: Every column of the row, with `question` and `answer` (text) among them.
    """

    id: int
    draw: int
    tokens: Int32[np.ndarray, " n"]
    text: str
    columns: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a row becomes a prompt.

    Attributes:
      template: A name in `TEMPLATES`.
      question_column: The column of the question; None looks for the usual names. See
        `question_and_answer`.
      answer_column: The column of the answer; None looks for the usual names, "" if the rewards
        need none.
      max_prompt_length: The most tokens a prompt may have; None for no limit.
      too_long: "drop" leaves longer prompts out and logs how many; "error" refuses them.
    """

    template: str = "none"
    question_column: str | Sequence[str] | None = None
    answer_column: str | None = None
    max_prompt_length: int | None = None
    too_long: Literal["drop", "error"] = "drop"

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, in one line."""
        if self.too_long not in ("drop", "error"):
            raise InputError(f"too_long={self.too_long!r} is unknown: use 'drop' or 'error'")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise InputError(
                f"max_prompt_length={self.max_prompt_length} is too small: use at least 1"
            )


_PLAIN = PromptFormat()


def load_prompts(
    source: Source,
    tokenizer: Tokenizer,
    prompt_format: PromptFormat = _PLAIN,
    *,
    split: str | None = "train",
    task_seed: int = 0,
) -> list[Prompt]:
    """Loads, renders and encodes a data set, in its own order, with draw 0.

    Args:
      source: A generated task's name, a .jsonl or .parquet file, a folder of them, or rows: a
        list of dicts, of questions (texts) or of lists of chat messages.
      tokenizer: Encodes the rendered text.
      prompt_format: Template, columns and length limit.
      split: Which split of a task or folder; see `load_rows`.
      task_seed: See `load_rows`.

    Returns:
      The prompts.

    Raises:
      MissingFileError: Where the source does not exist.
      InputError: Where it is empty, malformed or lacks a column, or where a prompt is empty or
        (all of them, or one with too_long="error") longer than max_prompt_length.
    """
    name = describe(source)
    rows = load_rows(source, split, task_seed)
    rows = question_and_answer(
        rows, prompt_format.question_column, prompt_format.answer_column, name
    )
    limit = prompt_format.max_prompt_length
    prompts = [
        _render(i, row, tokenizer, prompt_format.template, name) for i, row in enumerate(rows)
    ]
    kept = [p for p in prompts if limit is None or len(p.tokens) <= limit]
    if len(kept) == len(prompts):
        return prompts
    lengths = [len(p.tokens) for p in prompts]
    if not kept:
        raise InputError(
            f"all {len(rows)} prompts of {name} are longer than max_prompt_length={limit} (the "
            f"shortest has {min(lengths)} tokens): raise it"
        )
    if prompt_format.too_long == "error":
        kept_ids = {p.id for p in kept}
        first = next(p for p in prompts if p.id not in kept_ids)
        raise InputError(
            f"row {first.id} of {name} is {len(first.tokens)} tokens long, over "
            f"max_prompt_length={limit}: raise it or use too_long='drop'"
        )
    _log.warning(
        "%s: dropped %d of %d prompts, longer than max_prompt_length=%d tokens "
        "(the longest has %d)",
        name,
        len(prompts) - len(kept),
        len(prompts),
        limit,
        max(lengths),
    )
    return kept


def _render(
    index: int, row: dict[str, Any], tokenizer: Tokenizer, template: str, name: str
) -> Prompt:
    try:
        text = render(template, row["question"], tokenizer)
        tokens = np.asarray(tokenizer.encode(text), np.int32)
    except InputError as error:
        raise InputError(f"row {index} of {name}: {error}") from None
    if not len(tokens):
        raise InputError(f"row {index} of {name} renders to no tokens at all: remove the row")
    return Prompt(id=index, draw=0, tokens=tokens, text=text, columns=row)


class PromptStream(Iterator[Prompt]):
    """An endless stream of prompts: each epoch is a new permutation of all of them.

    The order follows from the seed alone. `get_state` after any number of prompts, put into a new
    stream by `set_state`, continues with the very next one, also across the end of an epoch.

    Attributes:
      prompts: All prompts, in the data set's order.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        prompt_format: PromptFormat = _PLAIN,
        *,
        seed: int = 0,
        split: str | None = "train",
        task_seed: int = 0,
    ):
        """Loads the data set.

        Args:
          source: See `load_prompts`, as for all others.
          tokenizer: Encodes the rendered text.
          prompt_format: Template, columns and length limit.
          seed: Of the order, from 0.
          split: Which split of a task or folder.
          task_seed: See `load_rows`.

        Raises:
          InputError: As `load_prompts`, and for a negative seed.
        """
        if seed < 0:
            raise InputError(f"seed={seed} is negative: use 0 or more")
        self.prompts = load_prompts(
            source, tokenizer, prompt_format, split=split, task_seed=task_seed
        )
        self._seed = seed
        self._digest = _digest(self.prompts)
        dataset = (
            grain.MapDataset.source(self.prompts)
            .seed(seed)
            .shuffle()
            .repeat()
            .map_with_index(self._at)
        )
        # The prompts are in memory already: prefetching threads would only cost determinism.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(read_options=options))

    def __len__(self) -> int:
        """The prompts of one epoch."""
        return len(self.prompts)

    def __next__(self) -> Prompt:
        """The next prompt, with its draw."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position, as a dict that JSON can hold."""
        return {
            "iterator": self._iterator.get_state(),
            "seed": self._seed,
            "digest": self._digest,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that `get_state` returned.

        Args:
          state: Of a stream over the same prompts with the same seed.

        Raises:
          InputError: Where the state is of other prompts or another seed.
        """
        if state["seed"] != self._seed:
            raise InputError(
                f"seed={self._seed} but the saved data position is of seed={state['seed']}: "
                "use the same seed, or start a new run"
            )
        if state["digest"] != self._digest:
            raise InputError(
                f"the {len(self)} prompts differ from those of the saved data position: give the "
                "same data, template and tokenizer, or start a new run"
            )
        self._iterator.set_state(state["iterator"])

    def _at(self, index: int, prompt: Prompt) -> Prompt:
        return dataclasses.replace(prompt, draw=index // len(self.prompts))


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}:{len(prompt.tokens)}:".encode())
        digest.update(prompt.tokens.astype("<i4").tobytes())
    return digest.hexdigest()[:16]
