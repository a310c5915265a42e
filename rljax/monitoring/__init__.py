"""Watching a run: metrics, samples, TensorBoard, a live display, curves."""

from rljax.monitoring.curves import plot_curves
from rljax.monitoring.display import LiveDisplay
from rljax.monitoring.flops import mfu, model_flops_per_token, peak_flops
from rljax.monitoring.jsonl import read
from rljax.monitoring.metrics_log import METRICS_FILE, SAMPLES_FILE, MetricsLog
from rljax.monitoring.tags import TAGS, Tag, find_tag

__all__ = [
    "METRICS_FILE",
    "SAMPLES_FILE",
    "TAGS",
    "LiveDisplay",
    "MetricsLog",
    "Tag",
    "find_tag",
    "mfu",
    "model_flops_per_token",
    "peak_flops",
    "plot_curves",
    "read",
]
