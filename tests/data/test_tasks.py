"""Generated tasks: answers follow from their questions, splits never overlap."""

import re

import pytest

from rljax.data import TASKS, split_rows

SIZES = {
    "addition": (9232, 256, 512),
    "small_arithmetic": (103, 24, 42),
    "larger_number": (1048, 256, 256),
    "small_questions": (206, 48, 84),
}


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_disjoint_and_of_the_stated_size(name):
    splits = [TASKS[name](split, 0) for split in ("train", "validation", "test")]
    assert tuple(map(len, splits)) == SIZES[name]
    questions = [row["question"] for rows in splits for row in rows]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_alone_decides_the_split(name):
    assert TASKS[name]("test", 1) == TASKS[name]("test", 1)
    assert TASKS[name]("test", 1) != TASKS[name]("test", 2)


def test_addition_answers_with_reversed_digits():
    rows = TASKS["addition"]("train", 0) + TASKS["addition"]("test", 0)
    for row in rows:
        a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["question"]).groups())
        assert int(row["answer"][::-1]) == a + b
    answers = {row["question"]: row["answer"] for row in rows}
    expected = {"12+34=": "64", "57+68=": "521", "03+07=": "01", "00+00=": "0"}
    assert {q: a for q, a in expected.items() if q in answers}.items() <= answers.items()


def test_small_questions_answer_what_they_ask():
    rows = TASKS["small_questions"]("train", 0)
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["question"]))
        if row["family"] == "larger_number":
            assert row["question"] == f"What is the larger number: {a} or {b}?"
            assert int(row["answer"]) == max(a, b) and a != b
        else:
            assert row["question"] == f"What is {a} + {b}?"
            assert int(row["answer"]) == a + b
    families = [row["family"] for row in rows]
    assert families.count("larger_number") == families.count("small_arithmetic")


@pytest.mark.parametrize("name", ["small_arithmetic", "larger_number"])
def test_both_orders_of_a_pair_are_in_one_split(name):
    questions = {row["question"] for row in TASKS[name]("test", 0)}
    for question in questions:
        a, b = re.findall(r"\d+", question)
        swapped = re.sub(r"\d+", "{}", question).format(b, a)
        assert swapped in questions


def test_misfit_splits_are_refused():
    rows = [{"question": "q"}] * 10
    with pytest.raises(ValueError, match="split='dev' is unknown: use one of train"):
        split_rows(rows, "dev")
    with pytest.raises(ValueError, match="leave nothing to train on of 10 rows"):
        split_rows(rows, "train", validation=5, test=5)
