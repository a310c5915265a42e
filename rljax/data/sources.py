"""Rows of question and answer from JSONL and Parquet files, folders of them, generated tasks."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.data.tasks import SPLITS, TASKS, Row
from rljax.errors import InputError, MissingDependencyError, MissingFileError

RowLike = Mapping[str, Any] | str | Sequence[Mapping[str, Any]]
"""A dict of columns, or a question alone: its text, or a list of chat messages."""

Source = str | Path | Iterable[RowLike]

QUESTION_COLUMNS = ("question", "problem", "prompt", "Question", "Problem", "input")
ANSWER_COLUMNS = ("answer", "Answer", "final_answer", "solution", "Solution")
_FILE_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "test": "test"}


def load_rows(source: Source, split: str | None = None, task_seed: int = 0) -> list[Row]:
    """Loads every row of a source.

    Args:
      source: The name of a generated task (`TASKS`), a .jsonl or .parquet file, a folder of such
        files (read in the order of their names; subfolders are ignored), or
        the rows themselves: dicts of columns, or questions without answers (texts, or lists
        of chat messages {"role", "content"}), which get the column question.
      split: "train", "validation" or "test". Needed for generated tasks. Of a folder whose
        files begin with the name of a split, only that split's are read. A single file and
        rows given directly are always taken whole.
      task_seed: Decides which question of a generated task falls into which split. It is not
        the seed of the run: training and evaluation must share it.

    Returns:
      Rows as dicts. A column some rows lack is None in them.

    Raises:
      MissingFileError: Where there is neither such a task nor such a file.
      InputError: On a file that is malformed or cannot be read, or an empty source.
    """
    if isinstance(source, str) and source in TASKS:
        if split is None:
            raise InputError(f"split=None for the task {source!r}: use one of {', '.join(SPLITS)}")
        return TASKS[source](split, task_seed)
    if isinstance(source, str | Path):
        rows = [row for file in _files(Path(source), split) for row in _read(file)]
    else:
        rows = [_as_row(row, i) for i, row in enumerate(source)]
    if not rows:
        raise InputError(f"{describe(source)} holds no rows: give it at least one")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def question_and_answer(
    rows: Sequence[Row],
    question_column: str | Sequence[str] | None,
    answer_column: str | None,
    name: str = "the data",
) -> list[Row]:
    """Adds the columns question and answer to rows that have them under other names.

    A column is named by itself or, inside a nested record, by a path ("reward_model.answer").

    Args:
      rows: Rows with equal columns.
      question_column: The column of the question; several are joined by a space; None looks for
        the usual names (`QUESTION_COLUMNS`).
      answer_column: The column of the answer; "" if the rewards need none (answers are "");
        None looks for the usual names (`ANSWER_COLUMNS`) and, where there is none of them,
        adds no column: a reward function that needs an answer then refuses the data
        (`Scorer.check`).
      name: What to call the source in errors.

    Returns:
      Rows with `question` (text, or a list of chat messages) and `answer` (text, unchanged:
      the verifier extracts the final answer of a worked solution) besides all their other
      columns.

    Raises:
      InputError: Where a column is missing, or a row has no question or answer.
    """
    if question_column is None:
        question_column = _find(rows[0], QUESTION_COLUMNS, "question", name)
    if answer_column is None:
        answer_column = next((c for c in ANSWER_COLUMNS if c in rows[0]), None)
    parts = [question_column] if isinstance(question_column, str) else list(question_column)
    result = []
    for i, row in enumerate(rows):
        values = [_value(row, part, "question_column", i, name) for part in parts]
        question = values[0] if len(values) == 1 else " ".join(map(_text, values))
        if not isinstance(question, list):
            question = _text(question)
        found = {"question": question}
        if answer_column is not None:
            answer = _value(row, answer_column, "answer_column", i, name) if answer_column else ""
            found["answer"] = _text(answer)
        result.append({**row, **found})
    return result


def _as_row(row: Any, index: int) -> Row:
    if isinstance(row, Mapping):
        return dict(row)
    messages = isinstance(row, list | tuple) and all(isinstance(m, Mapping) for m in row)
    if row and (messages or isinstance(row, str)):
        return {"question": row if isinstance(row, str) else list(row)}
    raise InputError(
        f"row {index} of the given list of rows is {_short(row)}: give a dict with a question and "
        "an answer, the text of a question, or a list of chat messages"
    )


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe(source: Source) -> str:
    """Names a source in a message."""
    return repr(str(source)) if isinstance(source, str | Path) else "the given list of rows"


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise MissingFileError(
            f"data source {str(path)!r} is neither a file, a folder nor a generated task: give a "
            f".jsonl or .parquet file, a folder of them, or one of {', '.join(TASKS)}"
        )
    try:
        files = sorted(f for f in path.iterdir() if f.suffix in _READERS and f.is_file())
    except OSError as error:
        raise InputError(
            f"folder {str(path)!r} cannot be read ({error.strerror}): check its permissions"
        ) from None
    if not files:
        raise InputError(
            f"folder {str(path)!r} holds no {' or '.join(_READERS)} file: name the folder with "
            "the files themselves"
        )
    of_split: dict[str | None, list[Path]] = {}
    for file in files:
        first = file.name.replace("-", ".").replace("_", ".").split(".")[0]
        of_split.setdefault(_FILE_SPLITS.get(first), []).append(file)
    if set(of_split) == {None}:
        return files
    if split not in of_split:
        have = ", ".join(sorted(str(s) for s in of_split if s))
        raise InputError(
            f"folder {str(path)!r} has files of the splits {have} but none of split={split!r}: "
            "use one of them, or name a file"
        )
    return of_split[split]


def _read(path: Path) -> list[Row]:
    if path.suffix not in _READERS:
        raise InputError(
            f"data file {str(path)!r} is of an unknown kind: give a {' or '.join(_READERS)} file"
        )
    return _READERS[path.suffix](path)


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}:{number} is not JSON ({error}): give one JSON object a line"
            ) from None
        except (ValueError, RecursionError) as error:  # such as an integer of 5,000 digits
            raise InputError(
                f"{path}:{number} cannot be read ({str(error).split(';')[0]}): write the value as "
                "text"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"{path}:{number} is a JSON {type(row).__name__}: give one JSON object a line"
            )
        rows.append(row)
    return rows


def _text_of(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"data file {str(path)!r} cannot be read ({error.strerror}): check its permissions"
        ) from None
    try:
        return data.decode("utf-8-sig")  # a byte-order mark is no part of the text
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line} is not UTF-8 (byte {data[error.start]:#04x}): convert the file to UTF-8"
        ) from None


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingDependencyError(
            f"data file {str(path)!r} needs pyarrow, which is not installed: "
            "run `pip install pyarrow`, or give a .jsonl file"
        ) from None
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        reason = str(error).splitlines()[0]
        raise InputError(
            f"data file {str(path)!r} is not readable as Parquet ({reason}): write it again"
        ) from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _find(row: Row, candidates: Sequence[str], what: str, name: str) -> str:
    for candidate in candidates:
        if candidate in row:
            return candidate
    raise InputError(
        f"{name} has no column named like {what} ({', '.join(candidates)}) but has "
        f"{', '.join(row)}: set {what}_column"
    )


def _value(row: Row, column: str, field: str, index: int, name: str) -> Any:
    value: Any = row
    for key in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise InputError(
                f"{field}={column!r} is not in row {index} of {name}, which has "
                f"{', '.join(row)}: name one of them"
            )
        value = value[key]
    if value is None:
        raise InputError(f"row {index} of {name} has no {column!r}: fill it in or remove the row")
    return value


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return str(int(value))  # 145.0 in a data file is the integer 145
    return value if isinstance(value, str) else str(value)
