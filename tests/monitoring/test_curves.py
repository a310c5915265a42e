"""The picture of a run's curves."""

import matplotlib.image
import numpy as np
import pytest

from rljax.monitoring import MetricsLog, curves, plot_curves


def _run(run_dir, steps, tags):
    with MetricsLog(run_dir) as log:
        for step in steps:
            log.log(step, {tag: (step + 1) * scale for tag, scale in tags.items()})
    return run_dir


def test_a_run_gives_one_picture(tmp_path):
    tags = {
        "reward/mean": 0.01,
        "eval/addition/greedy": 0.01,
        "eval/addition/avg@4": 0.009,
        "completion/length_mean": 1.0,
        "policy/entropy": 0.1,
        "policy/clip_frac_low": 0.001,
        "policy/clip_frac_high": 0.002,
        "mismatch/kl": -1e-7,
        "policy/loss": float("nan"),
    }
    path = plot_curves(_run(tmp_path, range(60), tags))
    assert path == tmp_path / "curves.png"
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > height > 600
    assert [entry.name for entry in tmp_path.glob("*curves*")] == ["curves.png"]


def test_one_step_of_one_tag_is_enough(tmp_path):
    assert plot_curves(_run(tmp_path, [1], {"reward/mean": 0.5})).exists()


@pytest.mark.parametrize("tags", [{}, {"policy/loss": 1.0}])
def test_a_run_without_anything_to_draw_is_refused(tmp_path, tags):
    with pytest.raises(ValueError, match=r"nothing to draw in .*metrics\.jsonl"):
        plot_curves(_run(tmp_path, [1], tags))


def test_smoothing_neither_lags_nor_pulls_the_ends():
    constant = curves._smoothed(np.full(50, 3.0))
    np.testing.assert_allclose(constant, 3.0)
    line = curves._smoothed(np.arange(100.0))
    np.testing.assert_allclose(line[10:-10], np.arange(100.0)[10:-10])


def test_lines_are_named_by_what_tells_them_apart():
    assert curves._short_names(["eval/a/avg@4", "eval/a/greedy"]) == {
        "eval/a/avg@4": "avg@4",
        "eval/a/greedy": "greedy",
    }
    assert curves._short_names(["eval/a/greedy", "eval/b/greedy"]) == {
        "eval/a/greedy": "a greedy",
        "eval/b/greedy": "b greedy",
    }
    assert curves._short_names(["policy/clip_frac_low", "policy/clip_frac_high"]) == {
        "policy/clip_frac_low": "low",
        "policy/clip_frac_high": "high",
    }
    assert curves._short_names(["reward/mean"]) == {"reward/mean": "mean"}
