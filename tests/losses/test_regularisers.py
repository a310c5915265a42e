"""KL estimators and their expected gradients, entropy terms, and terms of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.batch import Rows

LOGITS = jnp.array([0.3, -0.5, 1.1, 0.0])
REFERENCE = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.3, 0.5]))
BEHAVIOUR = jax.nn.log_softmax(jnp.array([-0.2, 0.4, 0.6, -0.1]))


def worked(estimator):
    return L.kl_estimate(jnp.log(0.07), jnp.log(0.04), estimator)


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", 0.559616), ("k2", 0.156585), ("k3", 0.131044)]
)
def test_estimators_worked(estimator, value):
    np.testing.assert_allclose(worked(estimator), value, atol=1e-6)
    same = jax.value_and_grad(lambda x: L.kl_estimate(x, jnp.float32(-1.3), estimator))
    value, gradient = same(jnp.float32(-1.3))
    assert value == 0 and gradient == (1 if estimator == "k1" else 0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_stay_finite(estimator):
    for side in (-120.0, 120.0):
        value, gradient = jax.value_and_grad(L.kl_estimate)(side - 120.0, -120.0, estimator)
        assert np.isfinite(value) and np.isfinite(gradient)
        if estimator == "k3":
            assert gradient == 0


def every_token(old=None, **fields):
    """Every outcome of a categorical over 4 tokens as a response of its own."""
    ones = jnp.ones((4, 1))
    index = jnp.arange(4)[:, None]
    return Rows(
        tokens=index,
        mask=ones > 0,
        positions=index * 0,
        segments=index * 0 + 1,
        sequence=index,
        group=index * 0,
        keep=ones > 0,
        advantages=ones * 0,
        weights=ones,
        token_weights=ones,
        correction=ones,
        ref_logp=REFERENCE[:, None],
        old_logp=None if old is None else old[:, None],
        **fields,
    )


def expected_gradient(sampler, regulariser=None, rows=None, policy=None):
    """Σ over outcomes of probability × gradient of the loss, with respect to the logits."""
    objective = L.Objective(
        L.uniform(),
        policy or L.chain(L.token_ratio("self"), L.policy_gradient()),
        L.token_sum(),
        regularisers=() if regulariser is None else regulariser,
    )
    rows = rows.replace(weights=jnp.exp(sampler)[:, None])

    def loss(logits):
        return objective.loss(jax.nn.log_softmax(logits)[:, None], rows)[0]

    return jax.grad(loss)(LOGITS)


def kl_gradient(forward):
    """∇ KL(π‖ref), or ∇ KL(ref‖π)."""

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        if forward:
            return jnp.sum(jnp.exp(logp) * (logp - REFERENCE))
        return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - logp))

    return jax.grad(divergence)(LOGITS)


LIVE = jax.nn.log_softmax(LOGITS)


@pytest.mark.parametrize(
    ("estimator", "truth"),
    [("k2", kl_gradient(True)), ("k3", kl_gradient(False)), ("k1", jnp.zeros(4))],
)
def test_expected_gradients_on_policy(estimator, truth):
    """k2 as a loss is KL(π‖ref), k3 is KL(ref‖π), k1 is nothing."""
    found = expected_gradient(LIVE, L.kl(1.0, estimator), every_token())
    np.testing.assert_allclose(found, truth, atol=1e-6)


def test_k1_in_the_reward_is_exact(make_batch):
    batch = make_batch(
        [0.0] * 4, group=[0] * 4, old_logp=LIVE[:, None], ref_logp=REFERENCE[:, None]
    )
    objective = L.Objective(
        L.returns_to_go(),
        L.chain(L.token_ratio(), L.policy_gradient()),
        L.token_sum(),
        shaping=L.kl_in_reward(1.0, "k1"),
    )
    advantages = objective.prepare(batch)[0].advantages
    found = expected_gradient(LIVE, None, every_token(LIVE).replace(advantages=advantages))
    np.testing.assert_allclose(found, kl_gradient(True), atol=1e-6)


def test_expected_gradients_off_policy():
    """The live ratio makes k3 exact; a stopped one does not, yet does for k2."""
    truth = kl_gradient(True)
    live = expected_gradient(BEHAVIOUR, L.kl(1.0, "k3", unbiased=True), every_token(BEHAVIOUR))
    np.testing.assert_allclose(live, truth, atol=1e-6)
    plain = expected_gradient(BEHAVIOUR, L.kl(1.0, "k3"), every_token(BEHAVIOUR))
    assert np.abs(plain - truth).max() > 0.01
    # A stopped ratio π/μ under sampling from μ weighs every outcome by π.
    stopped = BEHAVIOUR + jax.lax.stop_gradient(LIVE - BEHAVIOUR)
    k3 = expected_gradient(stopped, L.kl(1.0, "k3"), every_token(BEHAVIOUR))
    k2 = expected_gradient(stopped, L.kl(1.0, "k2"), every_token(BEHAVIOUR))
    assert np.abs(k3 - truth).max() > 0.01
    np.testing.assert_allclose(k2, truth, atol=1e-6)


def test_the_unbiased_kl_takes_the_token_ratio_under_a_sequence_objective(make_batch):
    old = np.array([[-1.0, -2.0], [-1.0, -1.0]], np.float32)
    batch = make_batch([1, 0], [2, 2], old_logp=old, ref_logp=old * 0.9)
    new = jnp.asarray(old + np.array([[0.3, -0.3], [0.1, 0.0]], np.float32))
    plain, unbiased = (L.gspo(0.5, 0.5, beta=1.0, kl_unbiased=u) for u in (False, True))
    none = L.gspo(0.5, 0.5)
    rows, _ = unbiased.prepare(batch)
    k3 = L.kl_estimate(new, batch.ref_logp)
    base = none.loss(new, rows)[0]
    np.testing.assert_allclose(plain.loss(new, rows)[0] - base, k3.mean(), rtol=1e-4)
    weighed = (jnp.exp(new - old) * k3).mean()
    np.testing.assert_allclose(unbiased.loss(new, rows)[0] - base, weighed, rtol=1e-4)
    gradient = jax.grad(lambda x: unbiased.loss(x, rows)[0] - none.loss(x, rows)[0])(new)
    assert np.abs(gradient[0]).min() > 0.05  # a KL under stop-gradient would give none


def test_distillation_is_the_reverse_kl_to_the_teacher():
    """Its expected gradient is that of KL(π‖teacher)."""
    objective = L.distillation()
    rows = every_token(LIVE, teacher_logp=REFERENCE[:, None])
    rows = rows.replace(weights=jnp.exp(LIVE)[:, None])

    def loss(logits):
        return objective.loss(jax.nn.log_softmax(logits)[:, None], rows)[0]

    np.testing.assert_allclose(jax.grad(loss)(LOGITS), kl_gradient(True), atol=1e-6)


# Entropy


@pytest.fixture
def pair(make_batch):
    old = -np.ones((2, 3), np.float32)
    return make_batch([1, 0], [1, 3], old_logp=old, ref_logp=old)


def with_entropy(regulariser, pair):
    objective = L.Objective(
        L.group_center(), L.token_ratio(), L.sequence_mean(), regularisers=regulariser
    )
    rows, _ = objective.prepare(pair)
    entropy = jnp.array([[0.5, 9.0, 9.0], [1.0, 2.0, 3.0]])

    def loss(entropy, state):
        return objective.loss(L.PolicyOutputs(pair.old_logp, entropy=entropy), rows, state)

    return objective, jax.value_and_grad(loss, has_aux=True), entropy


@pytest.mark.parametrize(
    ("weights", "each"),
    [("token", [[0.25, 0, 0], [0.25] * 3]), ("policy", [[0.5, 0, 0], [1 / 6] * 3])],
)
def test_entropy_bonus_has_weights_of_its_own(pair, weights, each):
    _, value, entropy = with_entropy(L.entropy_bonus(0.1, weights), pair)
    (_, stats), gradient = value(entropy, None)
    np.testing.assert_allclose(gradient, -0.1 * np.array(each), rtol=1e-6)
    assert L.finish(stats)["policy/entropy"] == pytest.approx(6.5 / 4)


def test_adaptive_entropy_moves_towards_its_target(pair):
    term = L.adaptive_entropy(target=2.0, initial=0.01, step=0.004, largest=0.015)
    objective, value, entropy = with_entropy(term, pair)
    state = objective.init_state()
    (_, stats), gradient = value(entropy, state)
    np.testing.assert_allclose(gradient[1], -0.01 / 4, rtol=1e-5)
    state = objective.update_state(state, stats)  # entropy 1.625 < 2: rises
    assert state["adaptive_entropy/entropy_coef"] == pytest.approx(0.014)
    state = objective.update_state(state, stats)
    assert state["adaptive_entropy/entropy_coef"] == pytest.approx(0.015)  # held by its bound
    (_, stats), _ = value(entropy + 5, state)
    state = jax.jit(objective.update_state)(state, stats)  # above: falls, and rests
    assert state["adaptive_entropy/entropy_coef"] == pytest.approx(0.011)
    np.testing.assert_array_equal(value(entropy, state)[1], 0)


def test_state_is_asked_for_by_name(pair):
    _, value, entropy = with_entropy(L.adaptive_entropy(target=2.0), pair)
    with pytest.raises(ValueError, match=r"pass state=objective\.init_state"):
        value(entropy, None)
    assert L.grpo().init_state() == {}


def test_several_terms_keep_state(pair):
    terms = (L.adaptive_entropy(2.0, initial=0.01), L.adaptive_entropy(1.0, initial=0.5))
    objective, value, entropy = with_entropy(terms, pair)
    state = objective.init_state()
    assert state["adaptive_entropy/entropy_coef"] == pytest.approx(0.01)
    assert state["adaptive_entropy_2/entropy_coef"] == pytest.approx(0.5)
    (_, stats), gradient = value(entropy, state)
    np.testing.assert_allclose(gradient[1], -0.51 / 4, rtol=1e-5)
    state = jax.jit(objective.update_state)(state, stats)  # entropy 1.625
    assert state["adaptive_entropy/entropy_coef"] == pytest.approx(0.015)
    assert state["adaptive_entropy_2/entropy_coef"] == pytest.approx(0.495)


def test_a_missing_entropy_is_named(pair):
    objective = L.Objective(
        L.group_center(), L.token_ratio(), L.token_mean(), regularisers=L.entropy_bonus(0.1)
    )
    assert objective.needs == {"old", "entropy"}
    with pytest.raises(ValueError, match=r"entropy_bonus.* needs entropy, got None"):
        objective.loss(pair.old_logp, objective.prepare(pair)[0])


def test_router_balance_is_a_mean_over_tokens(pair):
    objective = L.Objective(
        L.group_center(), L.token_ratio(), L.sequence_mean(), regularisers=L.router_balance(0.5)
    )
    rows, _ = objective.prepare(pair)
    router = jnp.array([[1.0, 9, 9], [1, 2, 3]])
    with_router = objective.loss(L.PolicyOutputs(pair.old_logp, router=router), rows)[0]
    without = objective.loss(L.PolicyOutputs(pair.old_logp, router=router * 0), rows)[0]
    assert with_router - without == pytest.approx(0.5 * 7 / 4)


# Terms of the whole optimizer batch


@pytest.fixture(scope="module")
def whole(make_batch):
    rng = np.random.default_rng(5)
    old = -rng.gamma(1.0, 1.0, (6, 5)).astype(np.float32)
    batch = make_batch([1, 0, 0, 1, 1, 0], [5, 3, 4, 5, 2, 5], [0] * 3 + [1] * 3, old_logp=old)
    new = jnp.asarray(old + rng.normal(0, 0.3, old.shape), jnp.float32)
    return batch, L.PolicyOutputs(new, entropy=jnp.asarray(rng.random(old.shape), jnp.float32))


def covariance(rows, logp):
    mask = np.asarray(rows.mask)
    a, x = np.asarray(rows.advantages), np.asarray(logp)
    return np.where(mask, (a - a[mask].mean()) * (x - x[mask].mean()), -np.inf)


def batch_objective(term, policy=None):
    policy = policy or L.chain(L.token_ratio(), L.policy_gradient())
    return L.Objective(L.group_normalize(), policy, L.token_mean(), regularisers=term)


def test_kl_cov_penalises_the_tokens_of_highest_covariance(whole):
    batch, outputs = whole
    objective = batch_objective(L.kl_cov(coef=2.0, fraction=0.1))
    rows = objective.with_batch_stats(outputs, objective.prepare(batch)[0])
    cov = covariance(rows, outputs.logp)
    chosen = cov >= np.sort(cov.reshape(-1))[-2]  # 10% of 24 tokens
    np.testing.assert_array_equal(rows.batch_stats[0], chosen)
    plain = batch_objective(())
    moved = np.abs(np.asarray(outputs.logp - rows.old_logp))
    penalty = objective.loss(outputs, rows)[0] - plain.loss(outputs, rows)[0]
    assert penalty == pytest.approx(2.0 * moved[chosen].sum() / 24, rel=1e-4)


def test_clip_cov_takes_unclipped_tokens_within_the_bounds(whole):
    batch, outputs = whole
    policy = L.chain(L.token_ratio(), L.ppo_clip())
    objective = batch_objective(L.clip_cov(fraction=0.1, low=0.05, high=0.8), policy)
    ready = objective.prepare(batch)[0]
    _, gradient, _ = plain_gradient(batch_objective((), policy), outputs, ready)
    cov = covariance(ready, outputs.logp)
    eligible = (cov > 0.05) & (cov < 0.8) & (gradient != 0)
    assert eligible.sum() > 2
    seen = np.zeros_like(eligible)
    for seed in range(20):
        rows = objective.with_batch_stats(outputs, ready, jax.random.key(seed))
        chosen = np.asarray(rows.batch_stats[0])
        assert chosen.sum() == 2 and not (chosen & ~eligible).any()
        seen |= chosen
    assert seen.sum() > 2  # the key decides
    _, found, _ = plain_gradient(objective, outputs, rows)
    np.testing.assert_allclose(found, np.where(chosen, 0, gradient), atol=1e-7)
    with pytest.raises(ValueError, match="got no key"):
        objective.with_batch_stats(outputs, ready)


def plain_gradient(objective, outputs, rows):
    value = jax.value_and_grad(
        lambda x: objective.loss(outputs.replace(logp=x), rows), has_aux=True
    )
    (loss, stats), gradient = value(outputs.logp)
    return loss, np.asarray(gradient), stats


@pytest.mark.parametrize(
    "term",
    [L.kl_cov(fraction=0.1), L.clip_cov(0.1, 0.05, 2.0), L.live_top_entropy(0.3)],
)
def test_batch_terms_do_not_depend_on_the_cut(whole, term):
    batch, outputs = whole
    objective = batch_objective(term)
    ready = objective.prepare(batch)[0]
    assert "batch_stats" in objective.needs
    with pytest.raises(ValueError, match="got no batch_stats"):
        objective.loss(outputs, ready)
    key = jax.random.key(1)
    rows = objective.with_batch_stats(outputs, ready, key)
    loss, gradient, _ = plain_gradient(objective, outputs, rows)

    cuts = [jnp.arange(2), jnp.arange(2, 6)]
    pieces = [
        plain_gradient(objective, jax.tree.map(lambda x: x[i], outputs), rows.take(i))  # noqa: B023
        for i in cuts
    ]
    np.testing.assert_allclose(sum(p[0] for p in pieces), loss, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([p[1] for p in pieces]), gradient, atol=1e-6)

    order = jnp.array([4, 2, 0, 5, 1, 3])
    turned = jax.tree.map(lambda x: x[order], (outputs, ready))
    again = objective.with_batch_stats(*turned, key)
    np.testing.assert_array_equal(again.batch_stats[0], rows.batch_stats[0][order])

    packed = ready.replace(values=outputs.logp, returns=outputs.entropy).pack(9)
    laid_out = L.PolicyOutputs(packed.values, entropy=packed.returns)
    packed = objective.with_batch_stats(laid_out, packed, key)
    np.testing.assert_allclose(objective.loss(laid_out, packed)[0], loss, atol=1e-6)


def test_live_top_entropy_trains_the_top_share(whole):
    batch, outputs = whole
    objective = batch_objective(L.live_top_entropy(0.3))
    rows = objective.with_batch_stats(outputs, objective.prepare(batch)[0])
    entropy = np.where(rows.mask, outputs.entropy, -1)
    chosen = entropy >= np.sort(entropy.reshape(-1))[-7]  # 30% of 24 tokens
    _, gradient, _ = plain_gradient(objective, outputs, rows)
    np.testing.assert_array_equal(gradient != 0, chosen)
