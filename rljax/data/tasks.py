"""Generated tasks: question-answer rows made by a rule, with splits that never overlap."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.errors import InputError

Row = dict[str, Any]

SPLITS = ("train", "validation", "test")


def split_rows(
    rows: Sequence[Row], split: str, seed: int = 0, validation: int = 256, test: int = 512
) -> list[Row]:
    """Cuts rows into splits by a seeded permutation and returns one of them.

    The splits of one (rows, seed, validation, test) are disjoint and together hold every row, so
    train and held-out rows must be cut with the same seed.

    Args:
      rows: All rows.
      split: "train", "validation" or "test".
      seed: Decides which row falls into which split.
      validation: Rows in the validation split.
      test: Rows in the test split.

    Returns:
      The rows of the split, in the order of the permutation.

    Raises:
      InputError: On an unknown split, or where no row would be left to train on.
    """
    if split not in SPLITS:
        raise InputError(f"split={split!r} is unknown: use one of {', '.join(SPLITS)}")
    held_out = validation + test
    if held_out >= len(rows):
        raise InputError(
            f"validation={validation} and test={test} leave nothing to train on of {len(rows)} "
            "rows: make them smaller"
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    bounds = {
        "test": (0, test),
        "validation": (test, held_out),
        "train": (held_out, len(rows)),
    }
    start, stop = bounds[split]
    return [rows[i] for i in order[start:stop]]


def addition(split: str, seed: int = 0) -> list[Row]:
    """Two-digit addition whose answer is the sum with its digits reversed.

    "12+34=" is answered by "64" and "57+68=" by "521": written in this order, a digit depends on
    those before it only through the carry. All 10,000 pairs of 00 to 99 exist; both numbers are
    written with two digits, so every prompt is 6 characters long.

    Args:
      split: "train" (9,232 rows), "validation" (256) or "test" (512).
      seed: Decides which pair falls into which split.

    Returns:
      Rows with the columns question and answer.
    """
    rows = [
        {"question": f"{a:02d}+{b:02d}=", "answer": str(a + b)[::-1]}
        for a in range(100)
        for b in range(100)
    ]
    return split_rows(rows, split, seed)


def small_arithmetic(split: str, seed: int = 0) -> list[Row]:
    """Sums of two numbers up to 12, asked in English: "What is 3 + 4?".

    For small chat models. They answer in sentences at first, so score them by the final number
    (the verifier `numeric`): an untrained one never earns a reward for the bare number alone.
    Both orders of a pair fall into the same split.

    Args:
      split: "train" (103 rows at seed 0), "validation" (24) or "test" (42).
      seed: Decides which pair falls into which split.

    Returns:
      Rows with the columns question and answer.
    """
    pairs = [{"pair": (a, b)} for a in range(13) for b in range(a + 1)]
    return [
        {"question": f"What is {x} + {y}?", "answer": str(x + y)}
        for x, y in _both_orders(split_rows(pairs, split, seed, validation=12, test=24))
    ]


def larger_number(split: str, seed: int = 0) -> list[Row]:
    """The larger of two different numbers up to 39: "What is the larger number: 7 or 12?".

    For small chat models, as `small_arithmetic`. Both orders of a pair fall into the same split: a
    held-out comparison was never trained on the other way round.

    Args:
      split: "train" (1,048 rows), "validation" (256) or "test" (256).
      seed: Decides which pair falls into which split.

    Returns:
      Rows with the columns question and answer.
    """
    pairs = [{"pair": (a, b)} for a in range(40) for b in range(a)]
    return [
        {"question": f"What is the larger number: {x} or {y}?", "answer": str(max(x, y))}
        for x, y in _both_orders(split_rows(pairs, split, seed, validation=128, test=128))
    ]


def small_questions(split: str, seed: int = 0) -> list[Row]:
    """`small_arithmetic` and as many rows of `larger_number`, with the task's name as `family`.

    Args:
      split: "train", "validation" or "test".
      seed: Decides which question falls into which split.

    Returns:
      Rows with the columns question, answer and family.
    """
    sums, comparisons = small_arithmetic(split, seed), larger_number(split, seed)
    return [{**row, "family": "small_arithmetic"} for row in sums] + [
        {**row, "family": "larger_number"} for row in comparisons[: len(sums)]
    ]


def _both_orders(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [pair for row in rows for pair in dict.fromkeys((row["pair"], row["pair"][::-1]))]


TASKS: dict[str, Callable[[str, int], list[Row]]] = {
    "addition": addition,
    "small_arithmetic": small_arithmetic,
    "larger_number": larger_number,
    "small_questions": small_questions,
}
