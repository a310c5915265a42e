"""A run as a library: your own objective, rewards and rows, taken stage by stage."""

import dataclasses
import json
import logging
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import rljax
from rljax import losses as L
from rljax.config import EvalSettings, ObjectiveSettings, RolloutSettings, UpdateSettings
from rljax.errors import InputError
from rljax.monitoring import compilations
from rljax.rollouts import ScoredGroup
from rljax.training.rows import RowPlanner

sys.path.insert(0, str(Path(__file__).parent))
from tiny import ROWS, config, half_right, one_device

MINE = L.Objective(
    advantage=L.group_center(),
    policy=L.chain(L.token_ratio(), L.ppo_clip(low=0.1, high=0.3)),
    weights=L.token_mean(),
)
OWN = {"objective": MINE, "rewards": [half_right], "prompts": ROWS, "eval_prompts": ROWS[:4]}


def logged(directory):
    return [json.loads(x) for x in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run by `train`, and its last state."""
    directory = tmp_path_factory.mktemp("run") / "whole"
    result = rljax.train(config(directory), **OWN, mesh=one_device())
    with rljax.open_run(config(directory), **OWN, mesh=one_device()) as (_, state):
        return directory, result, state


def test_train_takes_your_own_objective_rewards_and_rows(whole):
    directory, result, state = whole
    assert result["steps"] == state.step == 2
    assert 0 <= result["eval_before"] <= 1
    lines = logged(directory)
    assert [x["step"] for x in lines] == [0, 1, 2]
    assert all(x["reward/half_right/mean"] == 0.5 for x in lines[1:])
    assert {"eval/rows/greedy"} <= lines[0].keys()


def test_stage_by_stage_gives_the_bits_of_train(whole, tmp_path):
    *_, expected = whole
    with rljax.open_run(config(tmp_path), **OWN, mesh=one_device()) as (run, state):
        assert not run.restored and state.step == 0
        while not run.finished(state):
            groups, after, metrics = run.sample(state)
            assert all(isinstance(g, ScoredGroup) for g in groups) and len(groups) == 4
            assert metrics["group/kept"] == 4
            assert state.data != after.data  # the old state still says where it was
            shapes = run.plan(groups)
            batch, _ = run.score(after, groups, shapes)
            rows, _ = run.prepare(batch)
            assert rows.advantages.shape == (8, shapes.length)
            state, _ = run.learn(after, rows, shapes)
            state = state.replace(step=state.step + 1)
            run.sync_weights(state)
    jax.tree.map(np.testing.assert_array_equal, state.train.params, expected.train.params)
    assert (state.step, state.data) == (expected.step, expected.data)


def test_sampling_again_from_a_state_gives_the_same_groups(tmp_path):
    """Stages change no argument: the position in the data is the state's."""
    with rljax.open_run(config(tmp_path), **OWN, mesh=one_device()) as (run, state):
        first, _, _ = run.sample(state)
        again, later, _ = run.sample(state)
        third, _, _ = run.sample(later)
    assert [g.texts for g in first] == [g.texts for g in again]
    assert [g.prompt.id for g in first] != [g.prompt.id for g in third]


def test_the_objective_can_be_swapped_and_the_run_goes_on(tmp_path):
    with rljax.open_run(config(tmp_path), **OWN, mesh=one_device()) as (run, state):
        groups, state, _ = run.sample(state)
        shapes = run.plan(groups)
        for objective in (MINE, L.gspo(clip_low=0.1, clip_high=0.1), L.grpo(beta=0.1)):
            run, state = run.with_objective(state, objective)
            batch, _ = run.score(state, groups, shapes)
            rows, _ = run.prepare(batch)
            assert (batch.ref_logp is not None) == ("ref" in objective.needs)
            state, metrics = run.learn(state, rows, shapes)
            assert np.isfinite(L.finish({"loss": metrics["policy/loss"]})["loss"])
        with pytest.raises(InputError, match="a critic cannot be added"):
            run.with_objective(state, L.ppo())


def test_nothing_compiles_after_the_shapes_were_seen_and_first_uses_are_told(tmp_path, caplog):
    settings = config(tmp_path, evals=EvalSettings(eval_every=1, eval_prompts=4))
    settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=4))
    with caplog.at_level(logging.INFO, "rljax"):
        rljax.train(settings, **OWN, mesh=one_device())
    lines = logged(tmp_path)
    counts = [x["perf/compilations"] for x in lines[1:]]
    assert counts[1] == counts[2] == counts[3] <= compilations.count()
    told = [r.getMessage() for r in caplog.records if "compiled the update" in r.getMessage()]
    assert len(told) == 1 and "first run included" in told[0]


def test_the_logged_rate_is_the_one_of_the_last_update_that_was_applied(tmp_path):
    """Updates that were skipped do not count in the schedule, nor in the log of it."""

    def never(completions, **_):
        return [0.0] * len(completions)

    settings = config(
        tmp_path,
        update=UpdateSettings(mini_batch_size=8, max_skipped_updates=9),
        objective=ObjectiveSettings("dapo"),
        optimizer=dataclasses.replace(config(tmp_path).optimizer, warmup_steps=2),
    )
    rljax.train(settings, rewards=[never], prompts=ROWS, mesh=one_device())
    lines = logged(tmp_path)
    assert [x["policy/skipped_updates"] for x in lines[1:]] == [1, 2]  # all groups are degenerate
    assert [x["policy/lr"] for x in lines[1:]] == [pytest.approx(5e-3)] * 2


PLANNER = RowPlanner(max_prompt_length=100, max_completion_length=400, group_size=4)


def fake_groups(*lengths):
    def group(prompt, response):
        fields = {"tokens": np.zeros(prompt)}, [{"tokens": np.zeros(response)}]
        ask, answers = type("P", (), fields[0])(), [type("R", (), f)() for f in fields[1]]
        return type("G", (), {"prompt": ask, "responses": answers})()

    return [group(*pair) for pair in lengths]


@pytest.mark.smoke
def test_rows_have_few_lengths_and_bounded_padding():
    needs = range(2, 501)
    lengths = [PLANNER.plan(fake_groups((1, n - 1))).length for n in needs]
    assert sorted(set(lengths)) == [125, 250, 375, 500]
    assert all(0 <= length - n < 125 for n, length in zip(needs, lengths, strict=True))
    short = RowPlanner(8, 6, 4)
    assert {short.plan(fake_groups((n, 1))).length for n in range(1, 9)} <= {8, 14}
    assert RowPlanner(8, 6, 4, divisor=4).plan(fake_groups((8, 6))).length == 16


@pytest.mark.smoke
def test_reinforce_plus_plus_with_a_penalty_and_one_update_trains(tmp_path):
    """Its shaping needs the trainer's log-probabilities where no other part does."""
    settings = config(
        tmp_path,
        objective=ObjectiveSettings("reinforce_plus_plus", beta=0.1),
        update=UpdateSettings(mini_batch_size=8),
        rollout=dataclasses.replace(config(tmp_path).rollout, top_k=4),
    )
    result = rljax.train(settings, prompts=ROWS, rewards=[half_right], mesh=one_device())
    assert result["steps"] == 2


def test_equal_seeds_of_evaluation_and_training_draw_different_noise(tmp_path):
    """The evaluation of seed 0 does not draw with the keys of training at seed 1."""
    from rljax.evals import seed_for_evaluation as evaluation_seed

    seeds = range(64)
    assert not {evaluation_seed(seed) for seed in seeds} & set(seeds)
    assert len({evaluation_seed(seed) for seed in seeds}) == len(seeds)
    assert isinstance(RolloutSettings().temperature, float)
