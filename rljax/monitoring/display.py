"""The live display of a run: one panel in a terminal, plain lines elsewhere."""

import collections
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljax.errors import InputError
from rljax.monitoring.shown_metrics import SHOWN_METRICS, HeldOutMetric, History

_WINDOW = 50  # steps over which the pace is measured
_MAX_WIDTH = 100
_PLAIN_SECONDS = 5.0  # between two plain lines
_SILENT_SECONDS = 2.0  # that a stage may take before a plain line announces it


class _Stage:
    """A part of the run that may take long, and how far it is."""

    def __init__(self, name: str, started: float, announce: "Callable[[_Stage], None]"):
        self.name = name
        self.started = started
        self.announced: float | None = None
        self.timer = threading.Timer(_SILENT_SECONDS, lambda: announce(self))
        self.timer.daemon = True
        self._announce = announce
        self._progress: tuple[int, int] | None = None

    def report(self, done: int, total: int) -> None:
        self._progress = (done, total)
        self._announce(self)

    def text(self) -> str:
        progress = self._progress
        return self.name if progress is None else f"{self.name} {progress[0]}/{progress[1]}"


class LiveDisplay:
    """Shows a run while it goes: progress, the main numbers and their history, the last message.

    In a terminal a panel is redrawn in place, twice a second; log records and printed lines appear
    above it. Elsewhere (a file, CI, a notebook) a plain line is written every few seconds. Either
    goes to standard error. Leaving the context, by an exception too, gives the terminal back.
    """

    def __init__(
        self,
        total_steps: int,
        description: str = "",
        *,
        console: Console | None = None,
        live: bool | None = None,
        quiet: bool = False,
    ):
        """Prepare the display; entering the context shows it.

        Args:
          total_steps: The number of the last step.
          description: The panel's title.
          console: Where to draw; standard error by default.
          live: Whether to draw in place; by default where the console is a terminal that can.
          quiet: Whether to show nothing, as in all processes of a run but the first.
        """
        if total_steps < 1:
            raise InputError(
                f"total_steps must be at least 1, got {total_steps}; pass the last step"
            )
        self._total = total_steps
        self._description = description
        if live is None:
            stream = sys.stderr if console is None else console.file
            terminal = console is not None or stream.isatty()
            live = terminal and (console or Console(stderr=True)).is_interactive
        self._console = console or Console(stderr=True, quiet=quiet)
        self._live = live and not quiet
        self._step = -1
        self._histories = {metric.label: History() for metric in SHOWN_METRICS}
        self._message = ("", "")
        self._stages: list[_Stage] = []
        self._pace: collections.deque[tuple[int, float]] = collections.deque(maxlen=_WINDOW)
        self._started = time.monotonic()
        self._last_plain = -math.inf
        self._lock = threading.Lock()  # the panel is drawn by a thread of its own
        self._stack = contextlib.ExitStack()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Show a step's numbers; what `values` lacks keeps its last value.

        Args:
          step: Updates finished.
          values: Tags to numbers, as logged.
        """
        with self._lock:
            if step > self._step:
                self._pace.append((step, time.monotonic()))
            self._step = step
            for metric in SHOWN_METRICS:
                value = metric.find(values)
                if value is not None:
                    self._histories[metric.label].add(step, value)
        if not self._live:
            now = time.monotonic()
            evaluated = any(tag.startswith("eval/") for tag in values)
            if evaluated or step >= self._total or now - self._last_plain >= _PLAIN_SECONDS:
                self._last_plain = now
                self._print(self._plain_line())

    def message(self, text: str) -> None:
        """Show a line about the latest event, until the next one.

        Args:
          text: One short line.
        """
        with self._lock:
            self._message = (time.strftime("%H:%M:%S"), text)
        if not self._live:
            self._print(text)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Show a stage that may take long, such as loading, compiling or evaluating.

        In a terminal the line of messages shows its name, progress and time, and the former
        message after it. Elsewhere a plain line is written once it has taken two seconds, then
        every five seconds as it reports progress, and one with its time at the end.

        Args:
          name: What is being done: "evaluating".

        Yields:
          A function to report progress: how many are done, and of how many.
        """
        stage = _Stage(name, time.monotonic(), self._announce)
        with self._lock:
            self._stages.append(stage)
        if not self._live:
            stage.timer.start()
        try:
            yield stage.report
        finally:
            stage.timer.cancel()
            with self._lock:
                self._stages.remove(stage)
            seconds = time.monotonic() - stage.started
            if not self._live and stage.announced:
                self._print(f"{name}: took {seconds:.1f} s")

    def _announce(self, stage: "_Stage") -> None:
        """Writes a plain line about a stage, if one is due."""
        now = time.monotonic()
        if self._live or now - stage.started < _SILENT_SECONDS:
            return
        if stage.announced is None or now - stage.announced >= _PLAIN_SECONDS:
            stage.announced = now
            self._print(f"{stage.text()} ...")

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live:
            live = Live(
                console=self._console,
                get_renderable=self._panel,
                refresh_per_second=2,
                redirect_stdout=sys.stdout.isatty(),
            )
            stderr, stdout = sys.stderr, sys.stdout
            self._stack.enter_context(live)
            live.refresh()
            self._stack.enter_context(_handlers_moved({stderr: sys.stderr, stdout: sys.stdout}))
        elif self._description:
            self._print(self._description)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.message(f"stopped by {exc_type.__name__}" + (f": {exc}" if str(exc) else ""))
        self._stack.close()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _seconds_left(self) -> float | None:
        if len(self._pace) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._pace[0], self._pace[-1]
        pace = (last_time - first_time) / (last_step - first_step)
        return max(0.0, pace * (self._total - last_step) - (time.monotonic() - last_time))

    def _plain_line(self) -> str:
        parts = [f"step {self._step}/{self._total}"]
        for metric in SHOWN_METRICS:
            value = self._histories[metric.label].last
            if value is not None:
                parts.append(f"{metric.label} {metric.format(value)}")
        left = self._seconds_left()
        if left is not None and self._step < self._total:
            parts.append(f"left {_clock(left)}")
        return "  ".join(parts)

    def _panel(self) -> RenderableType:
        with self._lock:
            when, text = self._message
            if self._stages:
                stage = self._stages[-1]
                when, text = _clock(time.monotonic() - stage.started), f"{stage.text()} ..."
            message = Text(
                f"{when}  " if text else "", style="dim", no_wrap=True, overflow="ellipsis"
            )
            message.append(text.partition("\n")[0], style="not dim")
            # As many lines every time: rich finds the panel's top by the height it drew last, and
            # a record printed by another thread in between would tear a panel that has grown.
            return Panel(
                Group(self._progress(), Text(""), self._numbers(), Text(""), message),
                title=Text(self._description or "rljax", style="bold"),
                title_align="left",
                border_style="bright_black",
                padding=(0, 2),
                width=min(self._console.width, _MAX_WIDTH),
            )

    def _progress(self) -> RenderableType:
        step = max(0, self._step)
        done = min(1.0, step / self._total)
        left = self._seconds_left()
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_column(no_wrap=True, justify="right")
        clock = Text(_clock(time.monotonic() - self._started), style="dim")
        if step >= self._total:
            clock.append("  done", style="not dim green")
        else:
            clock.append("  left ").append("–" if left is None else _clock(left), style="not dim")
        row.add_row(
            Text.assemble(("step ", "dim"), (str(step), "bold"), (f"/{self._total}", "dim")),
            ProgressBar(total=1.0, completed=done, complete_style="green"),
            Text(f"{done:.0%}"),
            clock,
        )
        return row

    def _numbers(self) -> RenderableType:
        inside = min(self._console.width, _MAX_WIDTH) - 6
        columns = 2 if inside >= 70 else 1
        width_left = max(0, min(22, inside // columns - 21))  # without label, number, gaps
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(columns):
            table.add_column(no_wrap=True, style="dim", min_width=8)
            table.add_column(no_wrap=True, justify="right", min_width=7)
            table.add_column(no_wrap=True, min_width=width_left)
        cells: list[list[Text]] = []
        for metric in SHOWN_METRICS:
            history = self._histories[metric.label]
            value = history.last
            number = "–" if value is None else metric.format(value)
            bad = value is not None and not math.isfinite(value)
            when = f"at {history.last_step}" if isinstance(metric, HeldOutMetric) else ""
            width = width_left - len(f" {when}") if when else width_left
            history_line = "" if self._console.options.ascii_only else history.sparkline(width)
            beside = Text(history_line, style=metric.colour)
            if when and value is not None:
                beside.append(f" {when}" if history_line else when, style="dim")
            style = "bold red" if bad else "bold"
            cells.append([Text(metric.label), Text(number, style=style), beside])
        for start in range(0, len(cells), columns):
            table.add_row(*(entry for cell in cells[start : start + columns] for entry in cell))
        return table


@contextlib.contextmanager
def _handlers_moved(streams: dict[TextIO, TextIO]) -> Iterator[None]:
    """Log handlers that hold a standard stream write above the panel instead of through it."""
    moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for name in (None, "rljax"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                moved.append((handler, handler.stream))
                handler.setStream(streams[handler.stream])
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
