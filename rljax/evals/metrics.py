"""Scores of k samples a prompt: avg@k, pass@k, maj@k, answering rate."""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool

from rljax.errors import InputError


def avg_at_k(
    right: Bool[np.ndarray, "prompts k"], valid: Bool[np.ndarray, "prompts k"] | None = None
) -> float:
    """Share of right samples, every prompt counting the same.

    Args:
        right: Whether each sample is right.
        valid: Which samples count; all by default.

    Returns:
        In [0, 1]; NaN where no sample counts.

    Raises:
        ValueError: If the shapes are not one [prompts, k].
    """
    number, correct = _counts(right, valid)
    counted = number > 0
    return _mean(correct[counted] / number[counted])


def pass_at_k(
    right: Bool[np.ndarray, "prompts n"],
    k: int,
    valid: Bool[np.ndarray, "prompts n"] | None = None,
) -> float:
    """Chance that at least one of k samples is right, estimated without bias from n ≥ k.

    1 − C(n−c, k) / C(n, k) for n samples of which c are right, as the product of
    (n−c−j) / (n−j) over j < k: no binomial is formed, so that nothing overflows. Mean over the
    prompts. A prompt with fewer than k valid samples has no unbiased estimate and is left out.

    Args:
        right: Whether each sample is right.
        k: How many samples may try.
        valid: Which samples count; all by default.

    Returns:
        In [0, 1]; NaN where no prompt has k valid samples.

    Raises:
        ValueError: If k is not in [1, n], or the shapes are not one [prompts, n].

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    number, correct = _counts(right, valid)
    if not 1 <= k <= right.shape[1]:
        raise InputError(
            f"k must be between 1 and the {right.shape[1]} samples a prompt, got {k}; sample more"
        )
    enough = number >= k
    number, correct = number[enough, None], correct[enough, None]
    drawn = np.arange(k)
    all_wrong = np.prod(np.maximum(number - correct - drawn, 0) / (number - drawn), axis=1)
    return _mean(1.0 - all_wrong)


def maj_at_k(
    answers: Sequence[Sequence[Hashable | None]],
    right: Bool[np.ndarray, "prompts k"],
    valid: Bool[np.ndarray, "prompts k"] | None = None,
) -> float:
    """Share of prompts whose most frequent answer is right.

    Samples without an answer do not vote; a prompt without any vote counts as wrong. A tie is
    worth its mean over a random choice among the tied. Equal answers are right as often as their
    samples are. A prompt without a valid sample is left out.

    Args:
        answers: The answer of each sample, [prompts][k]; None where none was found. Equal answers
            must be equal objects: normalise them first.
        right: Whether each sample is right.
        valid: Which samples count; all by default.

    Returns:
        In [0, 1]; NaN where no sample counts.

    Raises:
        ValueError: If the shapes are not one [prompts, k].
    """
    number, _ = _counts(right, valid)
    if len(answers) != len(right) or any(len(row) != right.shape[1] for row in answers):
        raise InputError(
            f"answers must be [prompts][k] like right, {right.shape}, "
            f"got rows of {sorted({len(row) for row in answers})}; give None for a missing answer"
        )
    shares = []
    for prompt in np.flatnonzero(number > 0).tolist():
        verdicts: dict[Hashable, list[bool]] = {}
        for sample, answer in enumerate(answers[prompt]):
            if answer is not None and (valid is None or valid[prompt, sample]):
                verdicts.setdefault(answer, []).append(bool(right[prompt, sample]))
        most = max(map(len, verdicts.values()), default=0)
        tied = [np.mean(votes) for votes in verdicts.values() if len(votes) == most]
        shares.append(np.mean(tied) if tied else 0.0)
    return _mean(np.array(shares))


def answering_rate(
    answers: Sequence[Sequence[Hashable | None]],
    valid: Bool[np.ndarray, "prompts k"] | None = None,
) -> float:
    """Share of samples in which an answer was found, right or wrong.

    Args:
        answers: The answer of each sample, [prompts][k]; None where none was found.
        valid: Which samples count; all by default.

    Returns:
        In [0, 1]; NaN where no sample counts.
    """
    found = np.array([[answer is not None for answer in row] for row in answers], dtype=bool)
    return _mean(found if valid is None else found[valid])


def _counts(right: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """How many samples count, and how many of them are right: int [prompts] each."""
    if right.ndim != 2 or right.dtype != bool or (valid is not None and valid.shape != right.shape):
        raise InputError(
            f"right and valid must be bool [prompts, k], got {right.dtype}{list(right.shape)}"
            + ("" if valid is None else f" and {valid.dtype}{list(valid.shape)}")
            + "; compare scores with a threshold first"
        )
    if valid is None:
        valid = np.ones_like(right)
    return valid.sum(axis=1), (right & valid).sum(axis=1)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
