"""Files of one JSON object a line: whole lines only, cut back atomically."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def encode(record: dict[str, Any]) -> bytes:
    """One line of JSON, newline included.

    Args:
      record: Names to values; numpy and jax scalars and arrays become numbers and lists,
        numbers that are not finite become null.

    Returns:
      UTF-8 bytes.
    """
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    # Only lone surrogates cannot be encoded, and their \ud800 escape is what JSON writes for them.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None where it is not a whole JSON object with an integer step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The whole records of a file; a line still being written, or broken, is passed over.

    Args:
      path: A file that may not exist yet.

    Yields:
      One dictionary a line.
    """
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as source:
        for line in source:
            record = parse(line)
            if record is not None:
                yield record


def cut_back(path: Path, last_step: float) -> tuple[int, int]:
    """Drop the lines after a step, and those that a killed process left incomplete.

    The file is replaced in one rename, so that a kill leaves the old one or the new one.

    Args:
      path: A file that may not exist yet.
      last_step: The last step whose lines stay.

    Returns:
      How many lines of later steps, and how many broken lines, were dropped.
    """
    if not path.exists():
        return 0, 0
    later = broken = 0
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as source, temporary.open("wb") as target:
        for line in source:
            record = parse(line)
            if record is None:
                broken += 1
            elif record["step"] > last_step:
                later += 1
            else:
                target.write(line.rstrip(b"\n") + b"\n")
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, path)
    return later, broken
