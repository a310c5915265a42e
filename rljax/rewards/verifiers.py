"""Reward functions the library brings: each compares completions with the column `answer`."""

from collections.abc import Callable, Sequence
from typing import Any


def exact_match(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the whole completion is the answer, else 0.

    White space around both is ignored and inside counts as one space; all else must agree, also
    upper and lower case. Digits are compared as written, so "01" is not "1": a task whose answers
    have their digits reversed relies on that. An answer that is an integer is compared as its
    decimal digits.

    Args:
        completions: The responses' texts.
        answer: The data column.

    Returns:
        1.0 or 0.0 for each completion.
    """
    return [
        float(_squeeze(completion) == _squeeze(str(reference)))
        for completion, reference in zip(completions, answer, strict=True)
    ]


VERIFIERS: dict[str, Callable[..., list[float]]] = {
    "exact_match": exact_match,
}


def _squeeze(text: str) -> str:
    return " ".join(text.split())
