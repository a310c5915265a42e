"""Values of a batch: equal scores, rewards on any scale, and what is refused on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax import losses as L
from rljax.losses import groups

HUGE = 3e38  # close to float32's largest


def in_loss(values):
    """What the loss takes for equal."""
    values = jnp.asarray(values, jnp.float32)
    everyone = jnp.ones(values.shape, bool)
    return bool(groups.statistics(values, everyone, jnp.zeros(values.shape, jnp.int32)).equal[0])


@pytest.mark.parametrize(
    ("scores", "equal"),
    [
        ([0.7] * 8, True),
        ([0.7, 0.7000004, 0.7], True),
        ([1e-6, 0, 0], False),
        ([1e-6, 1.001e-6, 1e-6], False),
        ([1e-30, 0], False),
        ([0, 0], True),
        ([1.0], True),
        ([1e6, 1e6 + 1], True),
        ([1e6, 1e6 + 100], False),
        ([HUGE, -HUGE], False),
        ([-1, 1], False),
    ],
)
def test_equal_scores_are_equal_for_sampler_and_loss(scores, equal):
    assert L.equal_scores(np.array(scores, np.float32)) is equal
    assert in_loss(scores) is equal


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0, 1, 1 + 9e-6, 1 + 1e-5, 1 + 1.1e-5, -1]), min_size=3, max_size=3),
    st.integers(-30, 30),
)
def test_the_rule_is_one_on_every_scale(scores, exponent):
    scores = (np.array(scores) * 10.0**exponent).astype(np.float32)
    assert L.equal_scores(scores) == in_loss(scores)


def test_scores_that_do_not_count():
    assert L.equal_scores([1.0, np.nan, 1.0])
    assert L.equal_scores([1.0, 0.0, 1.0], [True, False, True])
    assert not L.equal_scores([1.0, 0.0, np.nan], [True, True, True])
    assert L.equal_scores([np.nan, np.nan])


def advantages(objective, batch):
    rows, stats = jax.jit(objective.prepare)(batch)
    return np.asarray(rows.advantages)[:, 0], L.finish(stats)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e20, HUGE])
def test_advantages_on_any_scale(make_batch, scale):
    batch = make_batch(np.array([1.0, 0.5, -1.0, 0.0]) * np.float32(scale))
    objective = L.Objective(L.group_normalize(eps=0.0), L.token_ratio(), L.token_mean())
    found, stats = advantages(objective, batch)
    values = np.array([1.0, 0.5, -1.0, 0.0])
    wanted = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert stats["reward/overflow_frac"] == 0
    whitened = L.Objective(L.batch_whiten(eps=0.0), L.token_ratio(), L.token_mean())
    np.testing.assert_allclose(advantages(whitened, batch)[0], wanted, rtol=1e-5)


def test_advantages_that_overflow_are_counted_and_train_nothing(make_batch):
    objective = L.Objective(L.leave_one_out(), L.token_ratio(), L.token_mean())
    batch = make_batch([HUGE, -HUGE, 1, 0], group=[0, 0, 1, 1])
    found, stats = advantages(objective, batch)
    np.testing.assert_allclose(found, [0, 0, 1, -1])
    assert stats["reward/overflow_frac"] == 0.5
    (remark,) = objective.remarks(stats)
    assert "50.0% of the responses train on nothing" in remark
    assert objective.remarks({"reward/overflow_frac": 0.0}) == []


def test_rounding_of_the_reference_makes_no_advantages(make_batch):
    """All rewards 0 and the policy at the reference, whose pass rounds otherwise."""
    old = -np.random.default_rng(0).gamma(1.0, 1.0, (4, 6)).astype(np.float32)
    batch = make_batch([0] * 4, [6] * 4, old_logp=old, ref_logp=old * np.float32(1 + 2e-7))
    assert not L.reinforce_plus_plus(beta=0.1).prepare(batch)[0].advantages.any()


def test_values_are_refused_where_training_really_runs(make_batch):
    """Under jit nothing can be refused: `check_values` is what a training loop calls before."""
    negative = make_batch([1, -1, 0, 0], group=[0, 0, 1, 1], old_logp=-np.ones((4, 1)))
    jax.jit(L.maxrl().prepare)(negative)
    for check in (L.maxrl().check_values, L.maxrl().prepare):
        with pytest.raises(ValueError, match=r"needs rewards of at least 0, got -1\.0"):
            check(negative)
    L.grpo().check_values(negative)
    L.maxrl().check_values(negative.replace(valid=jnp.array([True, False, True, True])))


def test_rewards_are_judged_as_shaped(make_batch):
    objective = L.maxrl().adding(L.soft_overlong(4, 2))
    lengths = {"completion_length": jnp.array([2, 4])}
    batch = make_batch([1, 0.5], [1, 1], old_logp=-np.ones((2, 1)), **lengths)
    with pytest.raises(ValueError, match=r"needs rewards of at least 0, got -0\.5"):
        objective.check_values(batch)
    objective.check_values(batch.replace(completion_length=jnp.array([2, 2])))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "gdpo", "scalerl"])
def test_a_prompt_with_one_response_is_refused(make_batch, name):
    objective = L.dr_grpo(4) if name == "dr_grpo" else getattr(L, name)()
    with pytest.raises(ValueError, match="needs at least 2 responses a prompt"):
        objective.check_values(make_batch([1, 0, 1], group=[0, 0, 1]))
    objective.check_values(make_batch([1, 0, np.nan], group=[0, 0, 1]))
    L.reinforce_plus_plus().check_values(make_batch([1, 0], group=[0, 1]))


def test_mini_batches_that_part_a_group():
    group, index = np.array([3, 3, 8, 8]), np.array([0, 1, 2])
    with pytest.raises(ValueError, match="needs whole groups in a mini-batch, got parts of 1"):
        L.scalerl().check_minibatch(group, index)
    L.scalerl().check_minibatch(group, index[:2])
    L.grpo().check_minibatch(group, index)
