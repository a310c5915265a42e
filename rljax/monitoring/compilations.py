"""How many XLA compilations this process has done: after warm-up the number must not grow."""

from __future__ import annotations

from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_seen = 0


def count() -> int:
    """Compilations since this module was imported."""
    return _seen


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _seen
    _seen += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)
