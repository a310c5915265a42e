"""Rows come from JSONL and Parquet files and folders, whatever their columns are called."""

import json
from pathlib import Path

import pytest

from rljax.data import CharTokenizer, load_prompts, load_rows
from rljax.data.sources import question_and_answer
from rljax.errors import InputError

ROWS = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_jsonl_file(tmp_path):
    path = write(tmp_path / "x.jsonl", ROWS)
    assert load_rows(path) == load_rows(str(path)) == ROWS


def test_blank_lines_are_skipped_and_absent_columns_are_none(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": "b", "answer": "2"}')
    assert load_rows(path) == [{"question": "a", "answer": None}, ROWS[1]]


def test_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    assert load_rows(tmp_path / "x.parquet") == ROWS
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not readable as Parquet"):
        load_rows(tmp_path / "bad.parquet")


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="run `pip install pyarrow`"):
        load_rows(tmp_path / "x.parquet")


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write(tmp_path / "part2.jsonl", ROWS[1:])
    write(tmp_path / "part1.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text("not data")
    assert load_rows(tmp_path) == ROWS


def test_a_folder_with_splits_never_mixes_them(tmp_path):
    write(tmp_path / "train-00000.jsonl", ROWS[:1])
    write(tmp_path / "test.jsonl", ROWS[1:])
    assert load_rows(tmp_path, "train") == ROWS[:1]
    assert load_rows(tmp_path, "test") == ROWS[1:]
    for split in ("validation", None):
        with pytest.raises(ValueError, match="splits test, train but none of split="):
            load_rows(tmp_path, split)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"question": "a"}\n{"question": ', ":2 is not JSON"),
        ("[1]", ":1 is a JSON list: give one JSON object a line"),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_rows(path)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_said_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a file, a folder nor a generated task"):
        load_rows(tmp_path / "gone.jsonl")
    with pytest.raises(FileNotFoundError, match="one of addition, small_arithmetic"):
        load_rows("adition", "train")
    with pytest.raises(ValueError, match=r"holds no \.jsonl or \.parquet file"):
        load_rows(tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match="is of an unknown kind"):
        load_rows(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"problem": "p", "solution": "s", "answer": "a"}, "p", "a"),
        ({"problem": "p", "solution": "s"}, "p", "s"),
        ({"Body": "b", "Question": "q", "Answer": 145.0}, "q", "145"),
        ({"prompt": "p", "answer": 0.5}, "p", "0.5"),
        ({"question": "q", "answer": "so 3+4=7\n#### 7"}, "q", "so 3+4=7\n#### 7"),
    ],
)
def test_usual_column_names_are_found_and_answers_kept_raw(row, question, answer):
    (result,) = question_and_answer([row], None, None)
    assert result == {**row, "question": question, "answer": answer}


def test_columns_can_be_named_joined_and_nested():
    row = {"Body": "Two birds.", "Question": "How many?", "reward": {"truth": 2}}
    (result,) = question_and_answer([row], ("Body", "Question"), "reward.truth")
    assert (result["question"], result["answer"]) == ("Two birds. How many?", "2")
    assert question_and_answer([row], "Body", "")[0]["answer"] == ""


def test_without_an_answer_column_rows_have_no_answer():
    assert question_and_answer([{"text": "t"}], "text", None) == [{"text": "t", "question": "t"}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((None, None), "no column named like question .* but has text, label: set question_column"),
        (("txt", "label"), "question_column='txt' is not in row 0 .* which has text, label: name"),
        (("text", "label.x"), "answer_column='label.x' is not in row 0"),
        (("text", "label"), "row 1 of the data has no 'label': fill it in or remove the row"),
    ],
)
def test_missing_columns_are_refused_in_one_line(columns, message):
    rows = [{"text": "t", "label": "l"}, {"text": "t", "label": None}]
    with pytest.raises(ValueError, match=message) as error:
        question_and_answer(rows, *columns)
    assert "\n" not in str(error.value)


def test_prompts_of_a_file_carry_every_column(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"problem": "ab", "solution": "b", "subject": "x"}])
    (prompt,) = load_prompts(path, CharTokenizer("ab"))
    assert prompt.text == "ab"
    assert prompt.columns == {
        "problem": "ab",
        "solution": "b",
        "subject": "x",
        "question": "ab",
        "answer": "b",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": "é"}\n{"a": "é"}'.encode("latin-1"), r"x.jsonl:1 is not UTF-8 .byte 0xe9."),
        (b'{"a": 1}\n' + '{"a": 1}'.encode("utf-16"), r"x.jsonl:2 is not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"x.jsonl:1 cannot be read .*: write the value as text"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        load_rows(tmp_path / "x.jsonl")
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_and_separators_inside_text_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "b\u2028c"}\r\n', encoding="utf-8-sig")
    assert load_rows(path) == [{"a": "b\u2028c"}]


def test_a_file_without_permission_is_refused_in_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", ROWS)

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"cannot be read .Permission denied.: check its perm"):
        load_rows(path)
