"""XLA compilations of this process: how many, of which functions, how long they took.

After the first steps of a run the number must not grow. Listening starts when this module is
imported and costs nothing between compilations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilation(NamedTuple):
    """One compilation, or one program read from the compilation cache.

    Attributes:
      name: The compiled function, such as "jit(update)"; "" where jax does not report it.
      seconds: How long it took.
    """

    name: str
    seconds: float


class Watch:
    """The compilations since a moment.

    Attributes:
      found: All of them, in order.
    """

    def __init__(self) -> None:
        self.found: list[Compilation] = []

    @property
    def seconds(self) -> float:
        """Seconds of all of them together; those of several threads add up."""
        return sum(c.seconds for c in self.found)

    def __len__(self) -> int:
        """How many there were."""
        return len(self.found)

    def __str__(self) -> str:
        """The longest one and how many others, for a log line; "nothing" where there was none."""
        if not self.found:
            return "nothing"
        longest = max(self.found, key=lambda c: c.seconds)
        others = f" and {len(self) - 1} more" if len(self) > 1 else ""
        return f"{longest.name or 'a function'}{others} in {self.seconds:.1f} s"


_lock = threading.Lock()
_seen = 0
_watches: list[Watch] = []


def count() -> int:
    """Compilations since this module was imported."""
    return _seen


@contextlib.contextmanager
def watch() -> Iterator[Watch]:
    """Collects the compilations of a block, in all threads.

    Yields:
      A `Watch`, to be read in the block or after it:

        with compilations.watch() as compiled:
            state = update(state, rows)
        if compiled:
            log.info("compiled %s", compiled)  # "jit(update) and 2 more in 3.2 s"
    """
    found = Watch()
    with _lock:
        _watches.append(found)
    try:
        yield found
    finally:
        with _lock:
            _watches.remove(found)


def _listen(event: str, duration_secs: float, **details: Any) -> None:
    global _seen
    if event != _EVENT:
        return
    with _lock:
        _seen += 1
        for found in _watches:
            found.found.append(Compilation(str(details.get("fun_name", "")), duration_secs))


jax.monitoring.register_event_duration_secs_listener(_listen)
