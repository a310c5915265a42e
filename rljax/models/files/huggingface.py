"""Hugging Face model folders: config.json beside safetensors, one file or several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Imported for its effect: numpy then knows bfloat16, which safetensors asks it for by name.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from rljax.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class Folder:
    """The weights of a folder, open for reading (a `weights.Store`).

    Attributes:
      path: The folder.
      shapes: Name -> shape of every weight.
    """

    def __init__(self, path: Path):
        """Reads the headers of the folder's weight files.

        Raises:
          ValueError: There are none, one is missing or broken, or a weight's dtype is no float.
        """
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, str] = {}
        self._open: dict[str, Any] | None = None
        files, assigned = _weight_files(path)
        for file in files:
            for name, (shape, dtype) in _header(path / file).items():
                if assigned.get(name, file) != file:
                    continue  # an overlay's older copy of a weight that the index finds elsewhere
                if dtype not in _FLOATS:
                    raise InputError(
                        f"{path / file}: weight {name!r} is stored as {dtype}; only "
                        f"{', '.join(_FLOATS)} are read: save it unquantised"
                    )
                self.shapes[name] = shape
                self._file[name] = file

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Holds files open; their pages count as this process's memory until it ends."""
        self._open = {}
        try:
            yield
        finally:
            self._open = None

    def read(self, name: str, cut: tuple[slice, ...]) -> np.ndarray:
        """A part of one weight, in the dtype of the file."""
        if self._open is None:
            raise RuntimeError("Folder.read needs Folder.reading around it")
        file = self._file[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="np")
        return self._open[file].get_slice(name)[cut]


def _weight_files(path: Path) -> tuple[list[str], dict[str, str]]:
    """The folder's weight files, and the file of each weight by the index, if there is one."""
    if (path / INDEX).is_file():
        assigned = read_json(path / INDEX).get("weight_map", {})
        files = sorted(set(assigned.values()))
        for file in files:
            if not (path / file).is_file():
                raise InputError(f"{path / INDEX} names {file!r}, which is not there; fetch it too")
        if files:
            return files, assigned
    if (path / SINGLE).is_file():
        return [SINGLE], {}
    shards = sorted(f.name for f in path.glob("*.safetensors"))
    if shards:
        raise InputError(
            f"model folder {path} has {shards[0]} but no {INDEX}, which names the file of each "
            "weight; fetch it too"
        )
    others = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".gguf"))
    fix = (
        f"found {others[0]}: give the path of the .gguf file itself"
        if others and others[0].endswith(".gguf")
        else f"found {others[0]}: save it again as safetensors"
        if others
        else "fetch the weights first"
    )
    raise InputError(f"model folder {path} has no {SINGLE} and no {INDEX}; {fix}")


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="np") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except Exception as e:  # safetensors raises its own kinds
        raise InputError(f"{file} cannot be read as safetensors ({e}); fetch it again") from e


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: It is missing or cannot be parsed.
    """
    if not file.is_file():
        raise InputError(f"{file} is not there; a model folder needs it beside its weights")
    try:
        found = json.loads(file.read_text())
    except ValueError as e:
        raise InputError(f"{file} is not valid JSON ({e}); fetch it again") from e
    if not isinstance(found, dict):
        raise InputError(f"{file} holds a {type(found).__name__}, not an object; fetch it again")
    return found


def write(
    path: Path,
    fields: dict[str, Any],
    weights: Iterable[tuple[str, np.ndarray]],
    sizes: dict[str, int],
    shard_bytes: int,
) -> None:
    """Writes config.json and the weights, each file whole or not at all.

    Args:
      path: The folder, made where it is missing.
      fields: What config.json holds.
      weights: Name and array of every weight, in order; one shard of them is held at a time.
      sizes: Bytes of every weight, in the same order.
      shard_bytes: A file is closed before it grows past this.
    """
    path.mkdir(parents=True, exist_ok=True)
    # Written again at the very end: a folder half-way through a save is refused, not read.
    (path / CONFIG).unlink(missing_ok=True)
    shard, used, place = 0, 0, {}
    for name, size in sizes.items():
        if used and used + size > shard_bytes:
            shard, used = shard + 1, 0
        used += size
        place[name] = shard
    count = shard + 1
    files = (
        [SINGLE]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    held: dict[str, np.ndarray] = {}
    current = 0
    for name, array in weights:
        if place[name] != current:
            _save(path / files[current], held)
            held, current = {}, place[name]
        held[name] = array
    _save(path / files[current], held)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: files[i] for n, i in place.items()},
        }
        _write_json(path / INDEX, index)
    # What an earlier save left here under other names would be read as part of this one.
    for old in {*path.glob("model*.safetensors"), *path.glob(INDEX)}:
        if old.name not in files and not (count > 1 and old.name == INDEX):
            old.unlink()
    _write_json(path / CONFIG, fields)


def _save(file: Path, arrays: dict[str, np.ndarray]) -> None:
    partial = file.with_suffix(".partial")
    save_file(arrays, partial, metadata={"format": "pt"})
    os.replace(partial, file)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, file)
