"""Scores of k samples a prompt: avg@k, pass@k, maj@k, answering rate."""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool

from rljax.errors import InputError


def avg_at_k(
    correct: Bool[np.ndarray, "prompts k"], valid: Bool[np.ndarray, "prompts k"] | None = None
) -> float:
    """Share of correct samples, every prompt counting the same.

    Args:
      correct: Whether each sample is correct.
      valid: Which samples count; all by default.

    Returns:
      In [0, 1]; NaN where no sample counts.

    Raises:
      InputError: If the shapes are not one [prompts, k].
    """
    number, num_correct = _counts(correct, valid)
    counted = number > 0
    return _mean(num_correct[counted] / number[counted])


def pass_at_k(
    correct: Bool[np.ndarray, "prompts n"],
    k: int,
    valid: Bool[np.ndarray, "prompts n"] | None = None,
) -> float:
    """Chance that at least one of k samples is correct, estimated without bias from n ≥ k.

    1 − C(n−c, k) / C(n, k) for n samples of which c are correct, as the product of
    (n−c−j) / (n−j) over j < k: no binomial is formed, so that nothing overflows. Mean over the
    prompts. A prompt with fewer than k valid samples has no unbiased estimate and is left out.

    Args:
      correct: Whether each sample is correct.
      k: How many samples may try.
      valid: Which samples count; all by default.

    Returns:
      In [0, 1]; NaN where no prompt has k valid samples.

    Raises:
      InputError: If k is not in [1, n], or the shapes are not one [prompts, n].

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    number, num_correct = _counts(correct, valid)
    if not 1 <= k <= correct.shape[1]:
        raise InputError(
            f"k must be between 1 and the {correct.shape[1]} samples a prompt, got {k}; sample more"
        )
    enough = number >= k
    number, num_correct = number[enough, None], num_correct[enough, None]
    drawn = np.arange(k)
    all_wrong = np.prod(np.maximum(number - num_correct - drawn, 0) / (number - drawn), axis=1)
    return _mean(1.0 - all_wrong)


def maj_at_k(
    answers: Sequence[Sequence[Hashable | None]],
    correct: Bool[np.ndarray, "prompts k"],
    valid: Bool[np.ndarray, "prompts k"] | None = None,
) -> float:
    """Share of prompts whose most frequent answer is correct.

    Samples without an answer do not vote; a prompt without any vote counts as wrong. A tie is
    worth its mean over a random choice among the tied. Equal answers are correct as often as their
    samples are. A prompt without a valid sample is left out.

    Args:
      answers: The answer of each sample, [prompts][k]; None where none was found. Equal answers
        must be equal objects: normalise them first.
      correct: Whether each sample is correct.
      valid: Which samples count; all by default.

    Returns:
      In [0, 1]; NaN where no sample counts.

    Raises:
      InputError: If the shapes are not one [prompts, k].
    """
    number, _ = _counts(correct, valid)
    if len(answers) != len(correct) or any(len(row) != correct.shape[1] for row in answers):
        raise InputError(
            f"answers must be [prompts][k] like correct, {correct.shape}, "
            f"got rows of {sorted({len(row) for row in answers})}; give None for a missing answer"
        )
    shares = []
    for prompt in np.flatnonzero(number > 0).tolist():
        verdicts: dict[Hashable, list[bool]] = {}
        for sample, answer in enumerate(answers[prompt]):
            if answer is not None and (valid is None or valid[prompt, sample]):
                verdicts.setdefault(answer, []).append(bool(correct[prompt, sample]))
        most = max(map(len, verdicts.values()), default=0)
        tied = [np.mean(votes) for votes in verdicts.values() if len(votes) == most]
        shares.append(np.mean(tied) if tied else 0.0)
    return _mean(np.array(shares))


def answering_rate(
    answers: Sequence[Sequence[Hashable | None]],
    valid: Bool[np.ndarray, "prompts k"] | None = None,
) -> float:
    """Share of samples in which an answer was found, correct or wrong.

    Args:
      answers: The answer of each sample, [prompts][k]; None where none was found.
      valid: Which samples count; all by default.

    Returns:
      In [0, 1]; NaN where no sample counts.
    """
    found = np.array([[answer is not None for answer in row] for row in answers], dtype=bool)
    return _mean(found if valid is None else found[valid])


def _counts(correct: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """How many samples count, and how many of them are correct: int [prompts] each."""
    if (
        correct.ndim != 2
        or correct.dtype != bool
        or (valid is not None and valid.shape != correct.shape)
    ):
        raise InputError(
            f"correct and valid must be bool [prompts, k], got {correct.dtype}{list(correct.shape)}"
            + ("" if valid is None else f" and {valid.dtype}{list(valid.shape)}")
            + "; compare scores with a threshold first"
        )
    if valid is None:
        valid = np.ones_like(correct)
    return valid.sum(axis=1), (correct & valid).sum(axis=1)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
