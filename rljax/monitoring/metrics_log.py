"""The log of a run: metrics and samples as JSON lines, and TensorBoard events."""

import logging
import math
import operator
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from rljax.errors import InputError
from rljax.monitoring import jsonl
from rljax.monitoring.tags import find_tag

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class MetricsLog:
    """The metrics and samples of one run, each written once however often it is restarted.

    The run directory holds `metrics.jsonl` (an object a line: step, time in seconds since 1970,
    then the tags), `samples.jsonl` (step, then the sample's fields) and TensorBoard's event files.
    Each call is flushed, so that a killed run loses no whole line. `metrics.jsonl` is the
    authority: the event files are written anew from it whenever the log is opened.

    A step's number is the number of finished updates. For a resume to lose nothing, log a step
    before its checkpoint is saved. Of several processes that share a run directory exactly one
    opens the log.
    """

    def __init__(self, run_dir: str | os.PathLike[str], restored_step: int | None = None):
        """Open the log, cut back to where the run continues.

        Args:
          run_dir: The run's directory; made where it does not exist.
          restored_step: The step of the restored checkpoint: lines of later steps are dropped.
            None for a new run: all lines are dropped.
        """
        self._run_dir = Path(run_dir)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"run directory {str(self._run_dir)!r} cannot be made ({error.strerror}): choose "
                "another run_dir"
            ) from None
        last_step = -math.inf if restored_step is None else restored_step
        for name in (METRICS_FILE, SAMPLES_FILE):
            later, broken = jsonl.cut_back(self._run_dir / name, last_step)
            if later and restored_step is None:
                _log.warning("%s: dropped %d lines of an earlier start", name, later)
            elif later:
                _log.info("%s: dropped %d lines after step %d", name, later, restored_step)
            if broken:
                _log.warning("%s: dropped %d broken lines", name, broken)
        self._events = _rewrite_events(self._run_dir)
        self._metrics = (self._run_dir / METRICS_FILE).open("ab")
        self._samples = (self._run_dir / SAMPLES_FILE).open("ab")
        self._unknown: set[str] = set()
        self._not_finite: dict[str, int] = {}

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write one line of metrics.

        A step may have several lines (training, evaluation) if their tags differ. A number that is
        not finite is written as null, left out of TensorBoard, and named in a warning (the 1st,
        10th, 100th... time for each tag). A tag that the table of tags does not know is written
        all the same and named once.

        Args:
          step: Updates finished.
          values: Tags to numbers; numpy and jax scalars are accepted.

        Raises:
          InputError: If a value is not one number, or a tag is called 'step' or 'time'.
        """
        step = operator.index(step)
        numbers = {tag: _number(tag, value) for tag, value in values.items()}
        self._check(step, numbers)
        now = round(time.time(), 3)
        self._metrics.write(jsonl.encode({"step": step, "time": now} | numbers))
        self._metrics.flush()
        _add_event(self._events, step, now, numbers)
        self._events.flush()

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Write sampled responses, one line each.

        Args:
          step: Updates finished.
          samples: The fields of each: prompt, completion, reward and whatever else helps.
        """
        step = operator.index(step)
        for sample in samples:
            self._samples.write(jsonl.encode({"step": step} | sample | {"step": step}))
        self._samples.flush()

    def close(self) -> None:
        """Close the files; closing twice is allowed."""
        if self._metrics.closed:
            return
        repeated = {tag: count for tag, count in self._not_finite.items() if count > 1}
        if repeated:
            _log.warning(
                "not finite more than once, written as null: %s",
                ", ".join(f"{tag} ({count} times)" for tag, count in repeated.items()),
            )
        self._metrics.close()
        self._samples.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, step: int, numbers: dict[str, float]) -> None:
        for tag in numbers.keys() - self._unknown:
            if find_tag(tag) is None:
                self._unknown.add(tag)
                _log.warning("tag %r is not in the table rljax/monitoring/tags.py", tag)
        named = []
        for tag, number in numbers.items():
            if not math.isfinite(number):
                count = self._not_finite[tag] = self._not_finite.get(tag, 0) + 1
                if count in (1, 10, 100, 1000):
                    named.append(f"{tag}={number}")
        if named:
            _log.warning("step %d: not finite, written as null: %s", step, ", ".join(named))


def _number(tag: str, value: Any) -> float:
    if tag in ("step", "time"):
        raise InputError(f"tag {tag!r} is taken by the line itself; rename it")
    try:
        if isinstance(value, str):  # numpy would read one
            raise TypeError
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"value of {tag!r} must be a number, got {value!r}") from None
    if array.size != 1:
        raise InputError(f"value of {tag!r} must be one number, got shape {array.shape}; reduce it")
    return array.item()


def _rewrite_events(run_dir: Path) -> EventsWriter:
    """A new event file that holds what `metrics.jsonl` holds, in place of the old ones."""
    for stale in run_dir.glob("events.out.tfevents.*"):
        stale.unlink()
    events = EventsWriter(str(run_dir / "events"))
    for record in jsonl.read(run_dir / METRICS_FILE):
        step, now = record.pop("step"), record.pop("time", 0.0)
        _add_event(events, step, now, record)
    events.flush()
    return events


def _add_event(events: EventsWriter, step: int, now: float, values: dict[str, Any]) -> None:
    scalars = [
        Summary.Value(tag=tag, simple_value=value)
        for tag, value in values.items()
        if value is not None and math.isfinite(value)
    ]
    if scalars:
        events.write_event(Event(step=step, wall_time=now, summary=Summary(value=scalars)))
