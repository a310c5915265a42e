"""The numbers that the live display shows, and their history."""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable

_BLOCKS = "▁▂▃▄▅▆▇█"
MAX_POINTS = 64  # of a history


def _compact(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


@dataclasses.dataclass(frozen=True)
class ShownMetric:
    """One number of the panel: the sum of some tags.

    Attributes:
      label: Its name in the panel.
      tags: The tags that are added.
      format: Number to text.
      colour: Of its history.
    """

    label: str
    tags: tuple[str, ...]
    format: Callable[[float], str]
    colour: str

    def find(self, values: dict[str, float]) -> float | None:
        """The number in the metrics of a step; None where they lack it."""
        found = [float(values[tag]) for tag in self.tags if tag in values]
        return sum(found) if found else None


class HeldOutMetric(ShownMetric):
    """The held-out score: greedy where there is one, avg@k otherwise, mean over the tasks."""

    def find(self, values: dict[str, float]) -> float | None:
        """The number in the metrics of a step; None where they lack it."""
        for wanted in (r"eval/[^/]+/greedy", r"eval/[^/]+/avg@\d+"):
            scores = [float(values[tag]) for tag in values if re.fullmatch(wanted, tag)]
            if scores:
                return statistics.fmean(scores)
        return None


SHOWN_METRICS = (
    ShownMetric("reward", ("reward/mean",), "{:.3f}".format, "green"),
    HeldOutMetric("held-out", (), "{:.3f}".format, "magenta"),
    ShownMetric("length", ("completion/length_mean",), "{:.1f}".format, "blue"),
    ShownMetric("entropy", ("policy/entropy",), "{:.3f}".format, "yellow"),
    ShownMetric(
        "clipped", ("policy/clip_frac_low", "policy/clip_frac_high"), "{:.1%}".format, "cyan"
    ),
    ShownMetric("tokens/s", ("perf/tokens_per_s",), _compact, "white"),
)


class History:
    """The history of a number over the whole run, in a bounded number of points.

    Attributes:
      last: The newest value; None before the first.
      last_step: Its step.
    """

    def __init__(self) -> None:
        self.last: float | None = None
        self.last_step = 0
        self._points: list[float] = []
        self._pending: list[float] = []
        self._stride = 1

    def add(self, step: int, value: float) -> None:
        """Adds a value; one that is not finite is the last one and no part of the history."""
        self.last, self.last_step = value, step
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._points.append(statistics.fmean(self._pending))
            self._pending.clear()
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [statistics.fmean(pair) for pair in pairs]
            self._stride *= 2

    def sparkline(self, width: int) -> str:
        """The history as a line of blocks, at most `width` characters; "" where there is none."""
        points = self._points
        if len(points) < 2 or width < 2:
            return ""
        width = min(width, len(points))
        edges = [index * len(points) // width for index in range(width + 1)]
        bins = [statistics.fmean(points[start:end]) for start, end in itertools.pairwise(edges)]
        low, high = min(bins), max(bins)
        scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BLOCKS[round((value - low) * scale)] for value in bins)
