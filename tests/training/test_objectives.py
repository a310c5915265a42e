"""The flags of an objective reach it, and every objective of the flags can be trained."""

import dataclasses
import typing

import pytest

from experiments.flags import parse
from rljax import losses as L
from rljax.config import PRESETS, Config, ObjectiveName, ObjectiveSettings
from rljax.training.setup import make_objective

GIVEN = {"old", "rollout", "ref", "entropy", "old_entropy", "components", "values"}
GIVEN |= {"teacher", "batch_stats"}


def build(**flags):
    return make_objective(dataclasses.replace(Config(), objective=ObjectiveSettings(**flags)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", typing.get_args(ObjectiveName))
def test_each_needs_only_what_the_trainer_gives(name):
    assert build(objective=name).needs <= GIVEN


def test_flags_are_the_arguments():
    assert build(objective="gspo", clip_low=0.1, clip_high=0.2) == L.gspo(0.1, 0.2)
    assert build(objective="grpo") == L.grpo()
    assert build(objective="cispo", cap=3.0) == L.cispo(cap=3.0)
    assert build(objective="dr_grpo") == L.dr_grpo(length=6)
    assert build(objective="dapo") == L.dapo(overlong_max=6, overlong_cache=1)
    assert build(objective="gdpo") == L.gdpo(reward_weights=(1.0,))
    corrected = build(objective="grpo", truncated_is=2.0)
    assert corrected.corrections == (L.truncated_is(cap=2.0),)


def test_parts_that_any_objective_may_have():
    both = build(objective="grpo", beta=0.0, top_entropy=0.2, clip_cov=1e-3, entropy_coef=0.1)
    assert both.masks == (L.top_entropy(0.2),)
    assert both.regularisers == (L.entropy_bonus(0.1), L.clip_cov(fraction=1e-3))
    adaptive = build(objective="gspo", entropy_target=1.5, entropy_coef=0.1)
    assert adaptive.regularisers == (L.adaptive_entropy(1.5, initial=0.1),)
    covariance = build(objective="dapo", kl_cov=1.0)
    assert covariance.regularisers == (L.kl_cov(coef=1.0),)
    assert covariance.policy == L.chain(L.token_ratio(), L.policy_gradient())


def test_without_flags_a_preset_is_as_it_stands():
    assert parse([], "train") == ("arithmetic", PRESETS["arithmetic"]())


@pytest.mark.parametrize("name", typing.get_args(ObjectiveName))
def test_a_preset_keeps_the_window_of_its_own_objective_to_itself(name):
    _, config = parse([f"--objective={name}"], "train")
    settings = config.objective
    if name == "gspo":
        assert (settings.clip_low, settings.clip_high) == (0.03, 0.04)
    else:
        assert settings == ObjectiveSettings(objective=name)
    _, config = parse(["--objective", name, "--truncated_is=3"], "train")
    assert config.objective == dataclasses.replace(settings, truncated_is=3.0)


def test_a_flag_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match=r"cap=3.0 means nothing to objective=gspo"):
        build(objective="gspo", cap=3.0)
