"""Reinforcement-learning post-training of language models in JAX.

`import rljax` is quick and starts no device: its parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.batch import Batch, Rows
    from rljax.config import Config

__all__ = ["Batch", "Config", "Rows"]

_WHERE = {"Batch": "rljax.batch", "Rows": "rljax.batch", "Config": "rljax.config"}
_ROOMS = (
    "batch", "config", "data", "evals", "losses", "mesh", "models", "monitoring", "planning",
    "rewards", "rollouts", "sampling", "training",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"rljax.{name}")
    raise AttributeError(f"module 'rljax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
