"""avg@k, pass@k and maj@k against their definitions."""

import itertools
import math

import numpy as np
import pytest

from rljax.evals import answering_rate, avg_at_k, maj_at_k, pass_at_k

pytestmark = pytest.mark.smoke


def _row(text):
    """'x.xx' → [[True, False, True, True]]."""
    return np.array([[letter == "x" for letter in text]])


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.5), (4, 1.0)])
def test_pass_at_k_of_four_samples_one_right(k, expected):
    assert pass_at_k(_row("x..."), k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("n", [1, 5, 8])
def test_pass_at_k_is_one_minus_the_share_of_all_wrong_draws(n):
    for right_count, k in itertools.product(range(n + 1), range(1, n + 1)):
        row = _row("x" * right_count + "." * (n - right_count))
        draws = list(itertools.combinations(row[0], k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at_k(row, k) == pytest.approx(expected, abs=1e-14)


def test_pass_at_k_is_stable_for_many_samples():
    right = np.zeros((1, 100_000), dtype=bool)
    right[0, :3] = True
    n, c, k = 100_000, 3, 50_000
    log_all_wrong = (
        math.lgamma(n - c + 1) - math.lgamma(n - c - k + 1) - math.lgamma(n + 1)
    ) + math.lgamma(n - k + 1)
    assert pass_at_k(right, k) == pytest.approx(1 - math.exp(log_all_wrong), rel=1e-6)


def test_pass_at_1_is_avg_and_prompts_count_the_same():
    right = np.concatenate([_row("xx.."), _row("...."), _row("xxxx")])
    assert pass_at_k(right, 1) == pytest.approx(avg_at_k(right)) == pytest.approx(0.5)


def test_invalid_samples_are_not_wrong():
    right = np.concatenate([_row("xx.."), _row("x...")])
    valid = np.concatenate([_row("xx.."), _row("xx..")])
    assert avg_at_k(right, valid) == pytest.approx((1.0 + 0.5) / 2)
    assert pass_at_k(right, 2, valid) == pytest.approx(1.0)
    assert math.isnan(pass_at_k(right, 3, valid))
    assert avg_at_k(right, np.concatenate([_row("xx.."), _row("....")])) == 1.0
    assert math.isnan(avg_at_k(right, np.zeros_like(right)))


def test_pass_at_k_leaves_out_prompts_with_fewer_valid_samples():
    right = np.concatenate([_row("x..."), _row("....")])
    valid = np.concatenate([_row("xxxx"), _row("x...")])
    assert pass_at_k(right, 2, valid) == pytest.approx(0.5)


def test_the_majority_decides():
    answers = [["4", "4", "5"], ["7", "8", "8"]]
    right = np.concatenate([_row("xx."), _row("x..")])
    assert maj_at_k(answers, right) == 0.5


def test_a_tie_is_worth_its_mean():
    assert maj_at_k([["4", "5", "4", "5"]], _row("x.x.")) == 0.5
    assert maj_at_k([["4", "5", "6"]], _row("x..")) == pytest.approx(1 / 3)


def test_missing_answers_do_not_vote():
    assert maj_at_k([[None, None, None, "4"]], _row("...x")) == 1.0
    assert maj_at_k([[None, None]], _row("..")) == 0.0


def test_invalid_samples_do_not_vote():
    right = _row("xx...")
    assert maj_at_k([list("44555")], right) == 0.0
    assert maj_at_k([list("44555")], right, _row("xxx..")) == 1.0
    assert math.isnan(maj_at_k([list("44555")], right, _row(".....")))


def test_answering_rate_counts_answers_right_or_wrong():
    answers = [["4", None], [None, "5"]]
    assert answering_rate(answers) == 0.5
    assert answering_rate(answers, np.array([[True, True], [False, True]])) == pytest.approx(2 / 3)
    assert math.isnan(answering_rate(answers, np.zeros((2, 2), dtype=bool)))


def test_wrong_shapes_types_and_k_are_refused():
    right = _row("x...")
    with pytest.raises(ValueError, match=r"bool \[prompts, k\], got float64\[1, 4\]"):
        avg_at_k(right.astype(float))
    with pytest.raises(ValueError, match=r"and bool\[4\]"):
        avg_at_k(right, right[0])
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k must be between 1 and the 4 samples .*got {k}"):
            pass_at_k(right, k)
    with pytest.raises(ValueError, match=r"got rows of \[3\]"):
        maj_at_k([["1", "2", "3"]], right)
