"""Reinforcement-learning post-training of language models in JAX.

`import rljax` is quick and starts no device: its parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.batch import Batch, Rows
    from rljax.config import Config
    from rljax.presets import PRESETS
    from rljax.training import open_run, train

__all__ = ["PRESETS", "Batch", "Config", "Rows", "open_run", "train"]

_WHERE = {
    "Batch": "rljax.batch",
    "Config": "rljax.config",
    "PRESETS": "rljax.presets",
    "Rows": "rljax.batch",
    "open_run": "rljax.training",
    "train": "rljax.training",
}
_PACKAGES = (
    "batch", "config", "data", "errors", "evals", "losses", "mesh", "models", "monitoring",
    "planning", "presets", "rewards", "rollouts", "sampling", "settings", "training",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"rljax.{name}")
    raise AttributeError(f"module 'rljax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
