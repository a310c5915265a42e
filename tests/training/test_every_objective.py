"""Every objective of the flags trains, with one and several updates a step, with every setting."""

import dataclasses
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax import losses as L
from rljax import models
from rljax.config import ObjectiveSettings, TermSettings, UpdateSettings
from rljax.errors import InputError
from rljax.training.objective_flags import NAMES, make_objective

sys.path.insert(0, str(Path(__file__).parent))
from tiny import ROWS, config, half_right, one_device

SETTINGS = {
    "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "beta": 0.1, "kl_estimator": "k2",
    "kl_unbiased": True, "cap": 3.0, "tau_pos": 0.9, "tau_neg": 1.1, "delta": 0.1, "gamma": 0.9,
    "lam": 0.9, "value_clip": 0.1, "overlong_max": 4, "overlong_cache": 2, "mask_truncated": False,
}  # fmt: skip
TERMS = {
    "truncated_is": 2.0, "top_entropy": 0.8, "entropy_coef": 0.01, "entropy_target": 1.0,
    "router_aux_loss_coef": 0.01, "clip_cov": 0.1, "kl_cov": 0.1,
}  # fmt: skip
QUICK = {("grpo", "every setting"), ("gspo", "every setting"), ("ppo", "every setting")}


def build(name, full, directory):
    """The configuration and objective; with `full`, every setting that goes with it."""
    settings, terms = ObjectiveSettings(name), TermSettings()
    base = config(directory)
    if full:
        taken = inspect.signature(getattr(L, name)).parameters.keys() & SETTINGS.keys()
        settings = ObjectiveSettings(name, **{k: SETTINGS[k] for k in taken})
        plain = make_objective(dataclasses.replace(base, objective=settings))
        terms = TermSettings(**{k: v for k, v in TERMS.items() if accepts(plain, k, v)})
    base = dataclasses.replace(base, objective=settings, terms=terms)
    return base, make_objective(base)


def accepts(objective, name, value):
    try:
        objective.adding(*L.additional(**{name: value}))
    except InputError:
        return False
    return True


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run with a critic, one without, and the groups that each has sampled."""
    base = tmp_path_factory.mktemp("objectives")
    own = {"rewards": [half_right], "prompts": ROWS, "mesh": one_device()}
    model = models.PRESETS["tiny-moe"]()
    found = {}
    for critic in (True, False):
        start = config(base / str(critic), objective=ObjectiveSettings("ppo" if critic else "grpo"))
        with rljax.open_run(start, **own) as (run, state):
            groups, state, _ = run.sample(state)
            found[critic] = run, state, groups
            teacher = dataclasses.replace(model, vocab_size=run.policy.model.vocab_size)
            models.save_pretrained(base / "teacher", teacher, run.weights(state))
    return base, found


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    "name,settings",
    [
        pytest.param(name, settings, marks=() if (name, settings) in QUICK else pytest.mark.slow)
        for name in NAMES
        for settings in ("its defaults", "every setting")
    ],
)
def test_it_trains(opened, name, settings, updates):
    base, found = opened
    settings, objective = build(name, settings == "every setting", base)
    run, state, groups = found[objective.critic is not None]
    settings = dataclasses.replace(
        settings,
        update=UpdateSettings(mini_batch_size=8 // updates, micro_batch_size=0),
        model=dataclasses.replace(
            settings.model, teacher=str(base / "teacher") if name == "distillation" else ""
        ),
    )
    state = state.replace(train=jax.tree.map(jnp.copy, state.train))
    before = jax.device_get(state.train.params)
    with jax.set_mesh(run.policy.mesh):
        run, state = dataclasses.replace(run, config=settings).with_objective(state, objective)
        shapes = run.plan(groups)
        batch, _ = run.score(state, groups, shapes)
        rows, _ = run.prepare(batch)
        state, metrics = run.learn(state, rows, shapes)
    assert int(state.train.applied) == updates
    assert np.isfinite(L.finish({"policy/loss": metrics["policy/loss"]})["policy/loss"])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, state.train.params)
    assert 0 < max(jax.tree.leaves(moved)) < 1
