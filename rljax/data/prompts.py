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

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One question, ready to be sampled from.

    Attributes:
        id: The row of the data set (its number in the source and split, dropped rows counted).
        draw: How often this prompt was asked before: the epoch.
        tokens: The rendered text's token ids, int32 [n].
        text: The rendered text.
        columns: Every column of the row, with `question` and `answer` (text) among them.
    """

    id: int
    draw: int
    tokens: Int32[np.ndarray, " n"]
    text: str
    columns: dict[str, Any]


def load_prompts(
    source: Source,
    tokenizer: Tokenizer,
    template: str = "none",
    *,
    split: str | None = "train",
    max_prompt_length: int | None = None,
    too_long: Literal["drop", "error"] = "drop",
    question_column: str | Sequence[str] | None = None,
    answer_column: str | None = None,
    task_seed: int = 0,
) -> list[Prompt]:
    """Loads, renders and encodes a data set, in its own order, with draw 0.

    Args:
        source: A generated task's name, a .jsonl or .parquet file, a folder of them, or rows.
        tokenizer: Encodes the rendered text.
        template: A name in `TEMPLATES`.
        split: Which split of a task or folder; see `load_rows`.
        max_prompt_length: The most tokens a prompt may have; None for no limit.
        too_long: "drop" leaves longer prompts out and logs how many; "error" refuses them.
        question_column: See `question_and_answer`.
        answer_column: See `question_and_answer`.
        task_seed: See `load_rows`.

    Returns:
        The prompts.

    Raises:
        FileNotFoundError: Where the source does not exist.
        ValueError: Where it is empty, malformed or lacks a column, or where a prompt is empty or
            (all of them, or one with too_long="error") longer than max_prompt_length.
    """
    return _load(
        source,
        tokenizer,
        template,
        split,
        max_prompt_length,
        too_long,
        question_column,
        answer_column,
        task_seed,
    )[0]


def _load(
    source: Source,
    tokenizer: Tokenizer,
    template: str,
    split: str | None,
    max_prompt_length: int | None,
    too_long: str,
    question_column: str | Sequence[str] | None,
    answer_column: str | None,
    task_seed: int,
) -> tuple[list[Prompt], int]:
    """The prompts and how many were dropped."""
    if too_long not in ("drop", "error"):
        raise InputError(f"too_long={too_long!r} is unknown: use 'drop' or 'error'")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise InputError(f"max_prompt_length={max_prompt_length} is too small: use at least 1")
    name = describe(source)
    rows = load_rows(source, split, task_seed)
    rows = question_and_answer(rows, question_column, answer_column, name)
    prompts = []
    lengths = []
    for i, row in enumerate(rows):
        text = render(template, row["question"], tokenizer)
        tokens = np.asarray(tokenizer.encode(text), np.int32)
        if not len(tokens):
            raise InputError(f"row {i} of {name} renders to no tokens at all: remove the row")
        lengths.append(len(tokens))
        if max_prompt_length is None or len(tokens) <= max_prompt_length:
            prompts.append(Prompt(id=i, draw=0, tokens=tokens, text=text, columns=row))
        elif too_long == "error":
            raise InputError(
                f"row {i} of {name} is {len(tokens)} tokens long, over "
                f"max_prompt_length={max_prompt_length}: raise it or use too_long='drop'"
            )
    if not prompts:
        raise InputError(
            f"all {len(rows)} prompts of {name} are longer than "
            f"max_prompt_length={max_prompt_length} (the shortest has {min(lengths)} tokens): "
            "raise it"
        )
    if len(prompts) < len(rows):
        logger.warning(
            "%s: dropped %d of %d prompts, longer than max_prompt_length=%d tokens "
            "(the longest has %d)",
            name,
            len(rows) - len(prompts),
            len(rows),
            max_prompt_length,
            max(lengths),
        )
    return prompts, len(rows) - len(prompts)


class PromptStream(Iterator[Prompt]):
    """Prompts without end: every epoch holds each prompt once, in an order of its own.

    The order follows from the seed alone. `get_state` after any number of prompts, put into a new
    stream by `set_state`, continues with the very next one, also across the end of an epoch.

    Attributes:
        prompts: All prompts, in the data set's order.
        dropped: How many rows were left out for their length.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        template: str = "none",
        seed: int = 0,
        max_prompt_length: int | None = None,
        *,
        split: str | None = "train",
        too_long: Literal["drop", "error"] = "drop",
        question_column: str | Sequence[str] | None = None,
        answer_column: str | None = None,
        task_seed: int = 0,
    ):
        """Loads the data set; arguments and errors as in `load_prompts`, and seed (from 0)."""
        if seed < 0:
            raise InputError(f"seed={seed} is negative: use 0 or more")
        self.prompts, self.dropped = _load(
            source,
            tokenizer,
            template,
            split,
            max_prompt_length,
            too_long,
            question_column,
            answer_column,
            task_seed,
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
        """Moves to a position that `get_state` told.

        Args:
            state: Of a stream over the same prompts with the same seed.

        Raises:
            ValueError: Where the state is of other prompts or another seed.
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
