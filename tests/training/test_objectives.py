"""The flags of an objective reach it, and every objective of the flags can be trained."""

import dataclasses

import pytest

from experiments.flags import parse
from rljax import losses as L
from rljax.config import Config, ObjectiveSettings, RewardSettings, RolloutSettings, TermSettings
from rljax.errors import InputError
from rljax.presets import PRESETS
from rljax.training.objective_flags import NAMES, make_objective

GIVEN = {"old", "rollout", "ref", "entropy", "old_entropy", "components", "values"}
GIVEN |= {"teacher", "batch_stats"}


TERMS = {f.name for f in dataclasses.fields(TermSettings)}


def build(given=None, **flags):
    terms = {name: flags.pop(name) for name in TERMS & flags.keys()}
    config = Config(
        objective=ObjectiveSettings(**flags),
        terms=TermSettings(**terms),
        rewards=RewardSettings(("exact_match",)),
        rollout=RolloutSettings(max_completion_length=6),
    )
    return make_objective(config, given)


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
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
    parsed = parse([], "train")
    assert (parsed.name, parsed.config) == ("arithmetic", PRESETS["arithmetic"]())
    assert not parsed.given and not parsed.print_config


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_the_window_of_its_own_objective_to_itself(name):
    settings = parse([f"--objective={name}"], "train").config.objective
    if name == "gspo":
        assert (settings.clip_low, settings.clip_high) == (0.03, 0.04)
    else:
        assert settings == ObjectiveSettings(objective=name)
    config = parse(["--objective", name, "--truncated_is=3"], "train").config
    assert (config.objective, config.terms) == (settings, TermSettings(truncated_is=3.0))


def test_a_flag_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match=r"cap=3.0 means nothing to objective=gspo"):
        build(objective="gspo", cap=3.0)


FILE = """
from rljax import losses as L

ready = L.Objective(L.group_center(), L.chain(L.token_ratio(), L.policy_gradient()), L.token_mean())

def mine(clip_low=0.2):
    return L.grpo(clip_low=clip_low, beta=0.0)

def wrong():
    return 3
"""


def test_an_objective_of_your_own_comes_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    assert build(objective=f"{path}:mine", clip_low=0.1) == L.grpo(clip_low=0.1, beta=0.0)
    found = build(objective=f"{path}:ready", entropy_coef=0.1)
    assert found.advantage == L.group_center()
    assert found.regularisers == (L.entropy_bonus(0.1),)
    # One that is given as an object replaces the named one and that one's settings.
    assert build(L.gspo(), objective="grpo", clip_low=0.3) == L.gspo()


@pytest.mark.parametrize(
    "name,flags,line",
    [
        ("grop", {}, "objective='grop' is unknown; did you mean grpo?"),
        ("nowhere.py:mine", {}, "'nowhere.py' does not exist"),
        ("{path}:absent", {}, "no Objective or function 'absent'"),
        ("{path}:wrong", {}, "returned int; return an Objective"),
        ("{path}:mine", {"cap": 2.0}, "cap=2.0 means nothing to objective="),
        ("{path}:ready", {"clip_low": 0.1}, "clip_low=0.1 has no effect"),
    ],
)
def test_an_objective_that_cannot_be_had_is_refused_in_one_line(tmp_path, name, flags, line):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    with pytest.raises(InputError) as refusal:
        build(objective=name.format(path=path), **flags)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
