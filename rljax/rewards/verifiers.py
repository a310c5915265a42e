"""Reward functions the library brings: each compares completions with the column `answer`."""

from collections.abc import Callable, Sequence
from typing import Any

from rljax.rewards.answers import extract_boxed, extract_final, extract_reference, same_answer


def exact_match(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the whole completion is the answer, else 0.

    White space around both is ignored and inside counts as one space; all else must agree, also
    upper and lower case. Digits are compared as written, so "01" is not "1": a task whose answers
    have their digits reversed relies on that. An answer that is an integer is compared as its
    decimal digits.

    Args:
      completions: The responses' texts, [B].
      answer: The data column, [B].

    Returns:
      1.0 or 0.0 for each completion.
    """
    return [
        float(_squeeze(completion) == _squeeze(str(reference)))
        for completion, reference in zip(completions, answer, strict=True)
    ]


def boxed(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    r"""1 where the completion's last `\boxed{...}` holds the answer, else 0; also without any box.

    Answers are compared by the rules of `rljax.rewards.answers`. The answer column may be a worked
    solution that ends in `#### answer` or holds a `\boxed{answer}`.

    Args:
      completions: The responses' texts, [B].
      answer: The data column, [B].

    Returns:
      1.0 or 0.0 for each completion.
    """
    return _compare(extract_boxed, completions, answer)


def numeric(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    r"""1 where the completion's final answer is the right one, else 0; also without any answer.

    The final answer is the last `\boxed{...}`, or else what follows the last `####`, or else the
    content of the last `<answer>...</answer>`, or else the last number. All else is as in `boxed`.

    Args:
      completions: The responses' texts, [B].
      answer: The data column, [B].

    Returns:
      1.0 or 0.0 for each completion.
    """
    return _compare(extract_final, completions, answer)


VERIFIERS: dict[str, Callable[..., list[float]]] = {
    "exact_match": exact_match,
    "boxed": boxed,
    "numeric": numeric,
}


def _compare(
    extract: Callable[[str], str | None], completions: Sequence[str], answer: Sequence[Any]
) -> list[float]:
    scores = []
    for completion, reference in zip(completions, answer, strict=True):
        found = extract(completion)
        right = found is not None and same_answer(found, extract_reference(str(reference)))
        scores.append(float(right))
    return scores


def _squeeze(text: str) -> str:
    return " ".join(text.split())
