"""The curves of a run as one picture."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rljax.errors import InputError
from rljax.monitoring import jsonl
from rljax.monitoring.metrics_log import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES_FILE = "curves.png"

_COLOURS = ("#2166ac", "#d6604d", "#1b9e77", "#7b5ea7", "#b8860b", "#666666")
_INK = "#333333"
_FAINT = "#d9d9d9"
_MAX_LINES = len(_COLOURS)

Series = tuple[np.ndarray, np.ndarray]  # steps int64 [n], values float64 [n]


@dataclasses.dataclass(frozen=True)
class _Chart:
    """One small chart: the lines whose tags match a pattern, and how to draw them."""

    title: str
    unit: str
    pattern: str
    smooth: bool = True
    bounds: tuple[float | None, float | None] = (None, None)
    log: bool = False


_CHARTS = (
    _Chart("Reward", "mean over the batch", r"reward/mean"),
    _Chart(
        "Held-out score", "share right", r"eval/[^/]+/(greedy|avg@\d+|maj@\d+)", False, (0.0, 1.0)
    ),
    _Chart("Response length", "tokens", r"completion/length_mean", bounds=(0.0, None)),
    _Chart("Entropy", "nats per token", r"policy/entropy", bounds=(0.0, None)),
    _Chart("Clipped", "share of tokens", r"policy/clip_frac_(low|high)", bounds=(0.0, None)),
    _Chart("Sampler against trainer", "|KL|, nats per token", r"mismatch/kl", log=True),
)


def plot_curves(run_dir: str | os.PathLike[str]) -> Path:
    """Draw the main curves of a run: reward, held-out scores, length, entropy, clipping, mismatch.

    Each chart shows the logged values faintly and a smoothed line (a centred mean over about
    a tenth of the run) strongly; held-out scores are shown as measured. Charts of which nothing
    was logged are left out.

    Args:
      run_dir: A run's directory with its `metrics.jsonl`.

    Returns:
      The path of `curves.png` in that directory.

    Raises:
      InputError: If nothing that can be drawn was logged there.
    """
    # matplotlib takes half a second to import; its pyplot would also touch the caller's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    run_dir = Path(run_dir)
    series = _read_series(run_dir)
    filled = [
        (chart, found)
        for chart in _CHARTS
        if (found := {tag: series[tag] for tag in series if re.fullmatch(chart.pattern, tag)})
    ]
    if not filled:
        raise InputError(
            f"nothing to draw in {run_dir / METRICS_FILE}, got {len(series)} other tags; "
            "give the directory of a run that logged reward/mean or eval/..."
        )
    columns = min(3, len(filled))
    rows = -(-len(filled) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(4.4 * columns, 0.6 + 2.9 * rows), dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(
        _headline(run_dir, series), x=0.012, ha="left", fontsize=12, color=_INK, weight="bold"
    )
    last_step = max(int(steps[-1]) for steps, _ in series.values())
    for index, (chart, found) in enumerate(filled):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw(axes, chart, found)
        axes.set_xlim(0, max(1, last_step))
        if index >= len(filled) - columns:
            axes.set_xlabel("step", color=_INK, fontsize=9)
    path = run_dir / CURVES_FILE
    temporary = run_dir / f".{CURVES_FILE}.tmp"
    figure.savefig(temporary, format="png", facecolor="white")
    os.replace(temporary, path)
    return path


def _read_series(run_dir: Path) -> dict[str, Series]:
    """Tag to its steps and values in order; null values are left out."""
    points: dict[str, dict[int, float]] = {}
    for record in jsonl.read(run_dir / METRICS_FILE):
        step = record["step"]
        for tag, value in record.items():
            if tag not in ("step", "time") and value is not None:
                points.setdefault(tag, {})[step] = value
    return {
        tag: (np.array(sorted(at)), np.array([at[step] for step in sorted(at)]))
        for tag, at in points.items()
    }


def _headline(run_dir: Path, series: dict[str, Series]) -> str:
    parts = [run_dir.resolve().name]
    for tag, (_, values) in series.items():
        if re.fullmatch(r"eval/[^/]+/greedy", tag) and len(values) > 1:
            parts.append(f"{tag.split('/')[1]} {values[0]:.2f} → {values[-1]:.2f} held out, greedy")
    return "    ".join(parts[:4])


def _draw(axes: "Axes", chart: _Chart, found: dict[str, Series]) -> None:
    names = _short_names(sorted(found))
    for (tag, name), colour in zip(list(names.items())[:_MAX_LINES], _COLOURS, strict=False):
        steps, values = found[tag]
        if chart.log:
            values = np.abs(values)  # an estimate may be negative
            steps, values = steps[values > 0], values[values > 0]
        if not len(steps):
            continue
        smooth = chart.smooth and len(steps) >= 10
        if smooth:
            axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.9)
            values = _smoothed(values)
        name = f"{name}  {values[-1]:.3g}"
        if smooth:
            axes.plot(steps, values, color=colour, linewidth=1.9, label=name)
        else:
            marker = "o" if len(steps) <= 40 else None
            axes.plot(steps, values, color=colour, linewidth=1.9, marker=marker, ms=3.2, label=name)
    if chart.log and axes.lines:
        axes.set_yscale("log")
    low, high = chart.bounds
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom if low is None else low, top if high is None else 1.02 * high)
    axes.set_title(chart.title, loc="left", fontsize=10.5, color=_INK, pad=8)
    axes.set_title(chart.unit, loc="right", fontsize=8.5, color="#777777", pad=8)
    axes.tick_params(colors="#555555", labelsize=8, length=3)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aaaaaa")
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="best", handlelength=1.4)


def _short_names(tags: Sequence[str]) -> dict[str, str]:
    """Tags without the parts that all of them share."""
    parts = [tag.split("/") for tag in tags]
    shared = next(
        (index for index, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1), -1
    )
    return {
        tag: " ".join(pieces[shared:]).removeprefix("clip_frac_")
        for tag, pieces in zip(tags, parts, strict=True)
    }


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Centred triangular mean over about a tenth of the values; cut off at the ends."""
    half = max(2, len(values) // 20)
    kernel = 1.0 - np.abs(np.arange(-half, half + 1)) / (half + 1)
    inside = slice(half, half + len(values))
    total = np.convolve(values, kernel)[inside]
    return total / np.convolve(np.ones(len(values)), kernel)[inside]
