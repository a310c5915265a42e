"""The log of a run: whole lines, each standing once, also after a kill and a resume."""

import json
import logging
import os
import signal
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rljax.errors import InputError
from rljax.monitoring import METRICS_FILE, SAMPLES_FILE, MetricsLog, read

pytestmark = pytest.mark.smoke


def _metrics(run_dir):
    return list(read(run_dir / METRICS_FILE))


def _steps(run_dir, name=METRICS_FILE):
    return [record["step"] for record in read(run_dir / name)]


def _scalars(run_dir):
    """(tag, step, value) of every scalar in the event files of a run directory."""
    found = []
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + length
    return found


def _write(run_dir, steps, restored_step=None):
    with MetricsLog(run_dir, restored_step) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 4})
            log.samples(step, [{"prompt": "1+1=", "completion": str(step)}])


def test_a_line_is_step_time_and_tags(tmp_path):
    _write(tmp_path / "runs" / "a", [1])
    (line,) = (tmp_path / "runs" / "a" / METRICS_FILE).read_text().splitlines()
    record = json.loads(line)
    assert list(record) == ["step", "time", "reward/mean"]
    assert record["step"] == 1 and record["reward/mean"] == 0.25 and record["time"] > 1.7e9


def test_samples_keep_text_and_arrays(tmp_path):
    sample = {
        "prompt": "2×3=\n",
        "completion": "\ud800 六\u2028",
        "tokens": np.arange(3),
        "reward": np.float32(0.5),
        "logp": float("nan"),
        "right": np.bool_(True),
        "columns": {"answer": "6", 1: None},
    }
    with MetricsLog(tmp_path) as log:
        log.samples(7, [sample])
    (record,) = read(tmp_path / SAMPLES_FILE)
    assert record == {
        "step": 7,
        "prompt": "2×3=\n",
        "completion": "\ud800 六\u2028",
        "tokens": [0, 1, 2],
        "reward": 0.5,
        "logp": None,
        "right": True,
        "columns": {"answer": "6", "1": None},
    }


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.array([0.5]), jnp.float32(0.5), jnp.bfloat16(0.5)]
)
def test_scalars_of_every_kind_are_numbers(tmp_path, value):
    with MetricsLog(tmp_path) as log:
        log.log(np.int64(1), {"reward/mean": value})
    assert _metrics(tmp_path)[0]["reward/mean"] == 0.5
    assert _scalars(tmp_path) == [("reward/mean", 1, 0.5)]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"reward/mean": np.zeros(3)}, r"'reward/mean' must be one number, got shape \(3,\)"),
        ({"reward/mean": "0.5"}, "'reward/mean' must be a number, got '0.5'"),
        ({"time": 1.0}, "'time' is taken"),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path, values, says):
    with MetricsLog(tmp_path) as log:
        with pytest.raises(ValueError, match=says):
            log.log(1, values)
        log.log(1, {"reward/mean": 1})
    assert _steps(tmp_path) == [1]


def test_not_finite_is_null_and_named(tmp_path, caplog):
    with MetricsLog(tmp_path) as log:
        for step in range(12):
            log.log(step, {"policy/loss": np.nan, "policy/ratio_max": np.inf, "reward/mean": 1.0})
    assert {record["policy/loss"] for record in _metrics(tmp_path)} == {None}
    assert {tag for tag, _, _ in _scalars(tmp_path)} == {"reward/mean"}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"step {step}: not finite, written as null: policy/loss=nan, policy/ratio_max=inf"
        for step in (0, 9)
    ] + [
        "not finite more than once, written as null: "
        "policy/loss (12 times), policy/ratio_max (12 times)"
    ]


def test_an_unknown_tag_is_written_and_named_once(tmp_path, caplog):
    with MetricsLog(tmp_path) as log:
        for step in range(3):
            log.log(step, {"reward/mena": 1.0, "reward/length_penalty/mean": 1.0})
    assert [record["reward/mena"] for record in _metrics(tmp_path)] == [1.0] * 3
    assert len(caplog.records) == 1 and "'reward/mena'" in caplog.text


def test_resume_cuts_back_to_the_restored_step(tmp_path):
    _write(tmp_path, range(1, 8))
    _write(tmp_path, [5, 6], restored_step=4)
    assert _steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert _steps(tmp_path, SAMPLES_FILE) == [1, 2, 3, 4, 5, 6]
    assert _scalars(tmp_path) == [("reward/mean", step, step / 4) for step in range(1, 7)]


def test_resume_keeps_every_line_of_the_restored_step_and_its_time(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(4, {"reward/mean": 1.0})
        log.log(4, {"eval/addition/greedy": 0.5})
        log.log(5, {"reward/mean": 2.0})
    before = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)
    MetricsLog(tmp_path, restored_step=4).close()
    assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(before[:2])


def test_a_run_that_restored_nothing_starts_anew(tmp_path, caplog):
    _write(tmp_path, range(3))
    _write(tmp_path, [0])
    assert "metrics.jsonl: dropped 3 lines of an earlier start" in caplog.text
    assert _steps(tmp_path) == _steps(tmp_path, SAMPLES_FILE) == [0]
    assert _scalars(tmp_path) == [("reward/mean", 0, 0.0)]


def test_half_written_and_broken_lines_are_cut(tmp_path, caplog):
    _write(tmp_path, [1, 2])
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes() + b'not json\n{"step": 3, "reward/me')
    assert _steps(tmp_path) == [1, 2]  # a reader passes over them too
    _write(tmp_path, [3], restored_step=2)
    assert _steps(tmp_path) == [1, 2, 3]
    assert "metrics.jsonl: dropped 2 broken lines" in caplog.text


def test_a_whole_line_without_its_newline_stays(tmp_path):
    _write(tmp_path, [1, 2])
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    _write(tmp_path, [3], restored_step=2)
    assert _steps(tmp_path) == [1, 2, 3]


def test_reading_a_file_that_is_not_there_gives_nothing(tmp_path):
    assert list(read(tmp_path / METRICS_FILE)) == []


def test_other_files_in_the_run_directory_stay(tmp_path):
    (tmp_path / "events.txt").write_text("mine")
    _write(tmp_path, [1])
    assert (tmp_path / "events.txt").read_text() == "mine"
    assert not list(tmp_path.glob("*.tmp"))


def test_closing_twice_and_an_error_inside_are_fine(tmp_path):
    with pytest.raises(KeyError), MetricsLog(tmp_path) as log:
        log.log(1, {"reward/mean": 1.0})
        raise KeyError
    log.close()
    assert _steps(tmp_path) == [1]


def test_a_killed_process_loses_no_logged_step(tmp_path):
    script = (
        "import sys\n"
        "from rljax.monitoring import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for step in range(10**6):\n"
        "    log.log(step, {'reward/mean': 1.0})\n"
        "    log.samples(step, [{'completion': 'x' * 1000}])\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    seen = [int(process.stdout.readline()) for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert _steps(tmp_path)[:30] == _steps(tmp_path, SAMPLES_FILE)[:30] == seen
    _write(tmp_path, [21], restored_step=20)
    assert _steps(tmp_path) == _steps(tmp_path, SAMPLES_FILE) == list(range(22))
    assert [step for _, step, _ in _scalars(tmp_path)] == list(range(22))


def test_cutting_back_is_logged_at_info(tmp_path, caplog):
    _write(tmp_path, range(4))
    with caplog.at_level(logging.INFO):
        _write(tmp_path, [], restored_step=1)
    assert "metrics.jsonl: dropped 2 lines after step 1" in caplog.text


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"run directory '.*' cannot be made .*: choose another"):
        MetricsLog(tmp_path / "file" / "run")
