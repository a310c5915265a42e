"""Plain functions as trust regions and advantages, and what is found out about them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L


@pytest.fixture(scope="module")
def batch(make_batch):
    old = -np.array([[1.0, 2, 0.5], [0.7, 0.1, 3]], np.float32)
    return make_batch([1, 0], [3, 2], old_logp=old, rollout_logp=old * 0.9)


LOGP = -jnp.array([[1.1, 1.7, 0.6], [0.9, 0.2, 2.0]])
TOKEN, SEQUENCE = L.token_ratio(), L.sequence_ratio()


def squared(step):
    """J = r·A - (log r)²."""
    return step.ratio * step.advantages - step.log_ratio**2


def clipped(step):
    r, a = step.ratio, step.advantages
    return jnp.where(r * a <= jnp.clip(r, 0.8, 1.2) * a, r * a, jnp.clip(r, 0.8, 1.2) * a)


def smoothed(step):
    """Half of each token's gradient goes to the token before it."""
    before = jnp.pad(step.ratio, ((0, 0), (1, 0)))[:, :-1]
    return 0.5 * (step.ratio + before) * step.advantages


def with_region(function, ratio=TOKEN):
    return L.Objective(
        advantage=L.group_center(),
        policy=L.chain(ratio, L.trust_region(function)),
        weights=L.sequence_mean(),
    )


def test_a_function_of_a_step_is_a_trust_region(batch):
    mine, theirs = with_region(clipped), L.dr_grpo(3)
    theirs = L.Objective(theirs.advantage, theirs.policy, L.sequence_mean())
    rows, _ = mine.prepare(batch)
    found = jax.jit(jax.value_and_grad(lambda x: mine.loss(x, rows)[0]))(LOGP)
    expected = jax.value_and_grad(lambda x: theirs.loss(x, rows)[0])(LOGP)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert hash(with_region(clipped)) == hash(mine)
    assert with_region(clipped) == mine != with_region(squared)
    assert "trust_region(clipped)" in L.describe(mine)


def test_a_function_that_gives_truth_values_is_a_gate(batch):
    def near(step):
        return jnp.abs(step.log_ratio) < 0.25

    policy = L.chain(TOKEN, L.policy_gradient(), L.trust_region(near))
    objective = L.Objective(L.group_center(), policy, L.sequence_mean())
    rows, _ = objective.prepare(batch)
    gradient = jax.grad(lambda x: objective.loss(x, rows)[0])(LOGP)
    moved = np.abs(LOGP - batch.old_logp)
    np.testing.assert_array_equal(gradient != 0, (moved < 0.25) & np.asarray(batch.mask))
    assert not objective.couples_tokens
    by_token = L.trust_region(lambda step: step.logp < -1)
    with pytest.raises(ValueError, match="a gate judges single tokens"):
        L.Objective(
            L.group_center(), L.chain(SEQUENCE, L.policy_gradient(), by_token), L.sequence_mean()
        )


def test_coupling_is_found_out():
    assert not with_region(clipped).couples_tokens
    assert not with_region(squared).couples_tokens
    assert with_region(smoothed).couples_tokens
    assert with_region(squared, SEQUENCE).couples_tokens
    assert not with_region(squared, L.sequence_token_ratio()).couples_tokens
    masked = L.top_entropy(0.5)
    assert with_region(smoothed).adding(masked).masks == (masked.for_sequences(),)
    assert with_region(squared).adding(masked).masks == (masked,)


@pytest.mark.parametrize("name", ["gspo", "rloo", "gmpo"])
def test_named_objectives_that_couple_tokens(name):
    assert getattr(L, name)().couples_tokens


@pytest.mark.parametrize(
    "name", ["grpo", "gspo_token", "cispo", "sapo", "minirl", "dppo", "deepseek_v32", "vespo"]
)
def test_named_objectives_that_do_not(name):
    assert not getattr(L, name)().couples_tokens


def test_coupling_is_found_inside_jit(batch):
    @jax.jit
    def loss(logp):
        objective = with_region(lambda step: step.ratio * step.advantages)
        return objective.loss(logp, objective.prepare(batch)[0])[0]

    assert np.isfinite(loss(LOGP))


def test_a_region_of_the_wrong_shape_or_kind_is_refused():
    with pytest.raises(ValueError, match=r"must give J of shape \[R, T\] or \[R, 1\]"):
        with_region(lambda step: step.ratio[:, :2])
    with pytest.raises(ValueError, match="takes a function of a step"):
        L.trust_region(0.2)


def test_what_a_function_reads_is_needed():
    region = L.trust_region(lambda s: s.field("ref_logp", "mine") * s.logp, reads=("ref",))
    objective = L.Objective(L.group_center(), region, L.token_mean())
    assert objective.loss_needs == {"ref"} and objective.prepare_needs == set()


def test_a_function_of_a_draft_is_an_advantage(batch, make_batch):
    def centered(draft):
        return L.group_statistics(draft.advantages, draft.valid, draft.group).centered

    mine = L.Objective(L.advantage(centered), TOKEN, L.token_mean())
    theirs = L.Objective(L.group_center(), TOKEN, L.token_mean())
    four = make_batch([1, 0, np.nan, 0.5], [2, 3, 1, 2], [0, 0, 1, 1], old_logp=-np.ones((4, 3)))
    for given in (batch, four):
        found, wanted = (o.prepare(given)[0].advantages for o in (mine, theirs))
        np.testing.assert_array_equal(found, wanted)
    assert hash(mine) == hash(mine) and "advantage(centered)" in L.describe(mine)
    per_token = L.Objective(L.advantage(lambda d: d.mask * 2.0), TOKEN, L.token_mean())
    np.testing.assert_array_equal(per_token.prepare(batch)[0].advantages, batch.mask * 2.0)
    short = L.Objective(L.advantage(lambda d: d.rewards[:1]), TOKEN, L.token_mean())
    with pytest.raises(ValueError, match="must give one advantage a response"):
        short.prepare(batch)


def test_where_nothing_but_a_kl_has_a_gradient():
    """only_kl: with all advantages 0 and the policy at the reference the gradient is 0."""
    yes = (L.grpo(), L.gspo(), L.cispo(), L.deepseek_v32(beta=0.1), L.grpo().adding(L.clip_cov()))
    assert all(objective.only_kl for objective in yes)
    no = (
        L.ppo(),
        L.distillation(),
        L.grpo(kl_estimator="k1"),
        L.grpo().adding(L.entropy_bonus(0.1)),
        L.grpo().adding(L.kl_cov()),
        with_region(squared),
    )
    assert not any(objective.only_kl for objective in no)
    assert with_region(clipped).only_kl
