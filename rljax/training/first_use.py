"""What is told once: compilations at the first use of a shape, and warnings."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from rljax.monitoring import compilations

_log = logging.getLogger(__name__)


class FirstUses:
    """Logs what is compiled at a program's first use with a shape.

    Attributes:
      announced: How many compilations were announced so far; any others are unexpected.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._steps = 0
        self._others = 0
        self.announced = 0

    @contextlib.contextmanager
    def of(self, program: str, shapes: object, padding: float = 0.0) -> Iterator[None]:
        """Announces the compilations inside the block, if it is the first for these shapes.

        Args:
          program: What runs inside.
          shapes: Its shapes, as they are to be told.
          padding: The share of padding among the tokens of this first use.
        """
        new = (program, str(shapes)) not in self._seen
        if new:
            _log.info("compiling %s for %s; %.0f%% padding", program, shapes, 100 * padding)
        started = time.perf_counter()
        with self._expect(program, str(shapes)) as compiled:
            yield
        if new:
            _log.info(
                "compiled %s for %s: %s; first run included %.1f s",
                program,
                shapes,
                compiled,
                time.perf_counter() - started,
            )

    @contextlib.contextmanager
    def quietly(self, program: str) -> Iterator[None]:
        """Takes the compilations inside the block for announced, if it is the first of its name."""
        with self._expect(program, ""):
            yield

    @contextlib.contextmanager
    def _expect(self, program: str, shapes: str) -> Iterator[compilations.Watch]:
        key = (program, shapes)
        with compilations.watch() as compiled:
            yield compiled
        if key not in self._seen:
            self._seen.add(key)
            self.announced += len(compiled)

    def warn(self, line: str) -> None:
        """Logs a warning the first time that it is given."""
        if (line, "") not in self._seen:
            self._seen.add((line, ""))
            _log.warning("%s", line)

    def end_step(self, step: int) -> None:
        """Warns of what a step compiled without announcing it; the first step of a process may.

        Args:
          step: The number of the step.
        """
        others = compilations.count() - self.announced
        if self._steps and others > self._others:
            _log.warning(
                "step %d compiled %d programs that earlier steps did not; a run that goes on so "
                "wastes time: report the shapes of its rows and requests",
                step,
                others - self._others,
            )
        self._steps, self._others = self._steps + 1, others
