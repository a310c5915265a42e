"""The live display: a panel in a terminal, plain lines elsewhere, the terminal given back."""

import io
import logging
import sys
import time

import pytest
from rich.console import Console

from rljax.monitoring import LiveDisplay, shown_metrics
from rljax.monitoring import display as display_module

pytestmark = pytest.mark.smoke

VALUES = {
    "reward/mean": 0.734,
    "completion/length_mean": 5.24,
    "policy/entropy": 0.4123,
    "policy/clip_frac_low": 0.02,
    "policy/clip_frac_high": 0.103,
    "perf/tokens_per_s": 24312.0,
    "policy/loss": -0.01,
}
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    return now


def _plain():
    return Console(file=io.StringIO(), width=40)


def _terminal(width=100, **options):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, **options)


def _drawn(display):
    """The panel as text."""
    console = Console(file=io.StringIO(), width=display._console.width)
    console.print(display._panel())
    return console.file.getvalue()


def test_plain_lines_hold_every_number_unwrapped(clock):
    console = _plain()
    with LiveDisplay(300, "gspo on addition", console=console) as display:
        display.update(100, VALUES)
        clock[0] += 10
        display.update(120, {**VALUES, "eval/addition/greedy": 0.81})
        display.message("saved [step 120]")
    assert console.file.getvalue().splitlines() == [
        "gspo on addition",
        "step 100/300  reward 0.734  length 5.2  entropy 0.412  clipped 12.3%  tokens/s 24.3k",
        "step 120/300  reward 0.734  held-out 0.810  length 5.2  entropy 0.412  clipped 12.3%  "
        "tokens/s 24.3k  left 1:30",
        "saved [step 120]",
    ]


def test_plain_lines_come_every_few_seconds_and_at_the_end(clock):
    console = _plain()
    with LiveDisplay(100, console=console) as display:
        for step in range(1, 101):
            clock[0] += 0.5
            display.update(step, {"reward/mean": 0.0})
    steps = [int(line.split()[1].split("/")[0]) for line in console.file.getvalue().splitlines()]
    assert steps == [*range(1, 101, 10), 100]


def test_a_redirected_stderr_gets_plain_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    with LiveDisplay(10) as display:
        display.update(1, VALUES)
    assert HIDE_CURSOR not in sys.stderr.getvalue()
    assert "step 1/10" in sys.stderr.getvalue()


@pytest.mark.parametrize("width", [120, 80, 76, 60, 44])
def test_the_panel_shows_every_number_within_its_width(width, clock):
    display = LiveDisplay(300, "gspo on addition", console=_terminal(width))
    display.update(0, {"eval/addition/greedy": 0.3})
    for step in range(1, 121):
        clock[0] += 0.25
        display.update(step, {**VALUES, "reward/mean": step / 120})
    display.message("saved step 120\nand more")
    drawn = _drawn(display)
    for text in (
        "gspo on addition",
        "step 120/300",
        "40%",
        "0:30  left 0:45",
        "1.000  ▁",
        "0.300  at 0",
        "12.3%",
        "24.3k",
        "saved step 120",
        *("reward ", "held-out ", "length ", "entropy ", "clipped ", "tokens/s "),
    ):
        assert text in drawn
    assert "and more" not in drawn
    assert max(map(len, drawn.splitlines())) <= width


def test_the_panel_keeps_its_height(clock):
    display = LiveDisplay(3, console=_terminal())
    heights = {len(_drawn(display).splitlines())}
    display.update(1, VALUES)
    heights.add(len(_drawn(display).splitlines()))
    display.message("a message that is longer than the panel is wide " * 4)
    display.update(3, {**VALUES, "reward/mean": float("nan"), "eval/a/avg@4": 0.5})
    heights.add(len(_drawn(display).splitlines()))
    assert heights == {9}
    assert "nan" in _drawn(display) and "done" in _drawn(display)


def test_the_held_out_score_is_greedy_or_the_mean_over_tasks(clock):
    console = _plain()
    with LiveDisplay(9, console=console) as display:
        display.update(1, {"eval/a/avg@4": 0.2, "eval/b/avg@4": 0.4, "eval/a/pass@4": 1.0})
        display.update(2, {"eval/a/avg@4": 0.2, "eval/a/greedy": 0.7, "eval/a/greedy_length": 9.0})
    first, second = console.file.getvalue().splitlines()
    assert "held-out 0.300" in first and "held-out 0.700" in second


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_error_gives_the_terminal_back(error):
    console = _terminal()
    stdout, stderr = sys.stdout, sys.stderr
    with pytest.raises(type(error)), LiveDisplay(10, console=console) as display:
        display.update(1, VALUES)
        raise error
    text = console.file.getvalue()
    assert text.count(HIDE_CURSOR) == 1 and text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert f"stopped by {type(error).__name__}" in text
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


def test_log_records_appear_above_the_panel():
    console = _terminal()
    stream = sys.stderr
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("rljax")
    logger.addHandler(handler)
    try:
        with LiveDisplay(10, console=console):
            logger.warning("policy/loss was not finite")
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)
    assert "policy/loss was not finite" in console.file.getvalue()


def test_the_history_of_a_long_run_stays_small():
    history = shown_metrics.History()
    for step in range(10_000):
        history.add(step, step)
    history.add(10_000, float("nan"))
    assert len(history._points) < shown_metrics.MAX_POINTS
    assert history.sparkline(8) == "▁▂▃▄▅▆▇█"


def test_no_steps_is_refused():
    with pytest.raises(ValueError, match="total_steps must be at least 1, got 0"):
        LiveDisplay(0)


def test_a_long_stage_is_told_in_plain_lines_and_a_short_one_is_not(clock):
    console = _plain()
    with LiveDisplay(10, console=console) as display:
        with display.stage("saving"):
            clock[0] += 1
        with display.stage("evaluating") as report:
            clock[0] += 1
            report(1, 8)
            clock[0] += 2
            report(2, 8)
            clock[0] += 1
            report(3, 8)
            clock[0] += 5
            report(8, 8)
    assert console.file.getvalue().splitlines() == [
        "evaluating 2/8 ...",
        "evaluating 8/8 ...",
        "evaluating: took 9.0 s",
    ]


def test_a_stage_that_reports_nothing_is_told_as_well(monkeypatch):
    monkeypatch.setattr(display_module, "_SILENT_SECONDS", 0.01)
    console = _plain()
    with LiveDisplay(10, console=console) as display, display.stage("loading"):
        for _ in range(100):
            if console.file.getvalue():
                break
            time.sleep(0.02)
    assert console.file.getvalue().startswith("loading ...\nloading: took 0.")


def test_the_panel_shows_the_stage_and_then_the_message_again(clock):
    display = LiveDisplay(10, console=_terminal(), live=True)
    display.message("saved")
    with display.stage("evaluating") as report:
        report(3, 8)
        clock[0] += 65
        assert "1:05  evaluating 3/8 ..." in _drawn(display)
        with display.stage("compiling"):
            assert "0:00  compiling ..." in _drawn(display)
    assert "saved" in _drawn(display) and "evaluating" not in _drawn(display)


def test_a_stage_that_fails_is_over(clock):
    display = LiveDisplay(10, console=_terminal(), live=True)
    with pytest.raises(KeyError), display.stage("loading"):
        raise KeyError
    assert "loading" not in _drawn(display)
