"""A run killed with SIGKILL and started again by the same command goes on as one never killed."""

import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import command, last_state, lines, wait_for_step


def start(run_dir, *extra, **options):
    """With an objective that remembers something from step to step."""
    return command(run_dir, "--entropy_target=9", *extra, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An unbroken run, and one killed twice."""
    base = tmp_path_factory.mktemp("runs")
    whole = start(base / "whole")
    out, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err
    for step in (1, 4):
        broken = start(base / "broken")
        wait_for_step(broken, base / "broken", step)
        broken.send_signal(signal.SIGKILL)
        broken.wait()
    ended = start(base / "broken")
    out_again, err = ended.communicate(timeout=600)
    assert ended.returncode == 0, err
    return base, json.loads(out.splitlines()[-1]), json.loads(out_again.splitlines()[-1]), err


def test_final_parameters_are_equal_bit_for_bit(runs):
    base, *_ = runs
    (step, one), (step_again, other) = (last_state(base / n) for n in ("whole", "broken"))
    assert step == step_again == 6
    # What the objective remembers is there too.
    assert one["objective"]["adaptive_entropy/entropy_coef"] > 5e-3
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_every_step_stands_once_in_the_log_with_the_same_numbers(runs):
    base, *_ = runs
    one, other = lines(base / "whole"), lines(base / "broken")
    assert [x["step"] for x in one] == [0, 1, 2, 3, 4, 5, 6]
    assert one == other
    samples = [(base / n / "samples.jsonl").read_text() for n in ("whole", "broken")]
    assert samples[0] == samples[1]


def test_the_result_is_the_same_and_says_what_it_must(runs):
    _, one, other, err = runs
    assert set(one) == {"eval_before", "eval_after", "steps", "seconds", "run_dir"}
    for key in ("eval_before", "eval_after", "steps"):
        assert one[key] == other[key]
    assert "continuing" in err


def test_mismatch_is_reported_at_every_step_and_is_rounding(runs):
    base, *_ = runs
    for line in lines(base / "whole")[1:]:
        assert line["mismatch/logp_diff_max"] < 1e-5
        assert line["mismatch/routing_flip_frac"] < 0.01
        assert {"mismatch/kl", "mismatch/k3", "mismatch/ess", "mismatch/pearson"} <= set(line)


def test_eight_devices_by_one_flag_give_the_same_curve(runs, tmp_path):
    base, *_ = runs
    sharded = start(tmp_path / "run", "--mesh=data=2,fsdp=4", "--steps=2", devices=8)
    _, err = sharded.communicate(timeout=600)
    assert sharded.returncode == 0, err
    for one, other in zip(lines(base / "whole")[:3], lines(tmp_path / "run"), strict=True):
        for tag in ("reward/mean", "policy/loss", "policy/entropy", "policy/grad_norm"):
            if tag in one:
                assert other[tag] == pytest.approx(one[tag], rel=1e-3, abs=1e-5), tag
        assert other.get("mismatch/logp_diff_max", 0) < 1e-5


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(runs):
    base, *_ = runs
    place = base / "broken" / "checkpoints" / "6" / "state"
    for file in place.rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    again = start(base / "broken")
    _, err = again.communicate(timeout=600)
    assert again.returncode == 0, err
    assert "checkpoint of step 6 cannot be read" in err
    one, other = last_state(base / "whole"), last_state(base / "broken")
    jax.tree.map(np.testing.assert_array_equal, one, other)
