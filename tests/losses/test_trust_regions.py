"""Surrogates, gates and their gradients against worked values."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

LOG_175 = 0.559616  # log(0.07 / 0.04)


def clip(low=0.2, high=0.2, dual=None):
    return L.chain(L.token_ratio(), L.ppo_clip(low, high, dual))


def test_ppo_worked(surrogate):
    new, old = np.log(0.07), np.log(0.04)
    assert new - old == pytest.approx(LOG_175, abs=1e-6)
    j, gradient, _ = surrogate(clip(), [[new, new]], [[old, old]], [[1.0, -1.0]])
    np.testing.assert_allclose(j, [[1.2, -1.75]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0, -1.75]], rtol=1e-5)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage(surrogate):
    j, gradient, stats = surrogate(clip(dual=3.0), [np.log([5.0, 2.0])], [[0.0, 0.0]], -1.0)
    np.testing.assert_allclose(j, [[-3, -2]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0, -2]], rtol=1e-5)
    assert stats["policy/clip_frac_dual"] == 0.5
    j, _, _ = surrogate(clip(dual=3.0), [np.log([5.0])], [[0.0]], 1.0)
    np.testing.assert_allclose(j, [[1.2]], rtol=1e-5)


def test_a_window_of_zero_and_none_at_all(surrogate):
    log_ratio = [[-0.3, 0.0, 0.3]]
    zero = [[0.0] * 3]
    j, gradient, _ = surrogate(clip(0.0, 0.0), log_ratio, zero)
    np.testing.assert_allclose(j, [[np.exp(-0.3), 1, 1]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[np.exp(-0.3), 1, 0]], rtol=1e-5)
    for advantage in (1.0, -1.0):
        wide = surrogate(clip(math.inf, math.inf), log_ratio, zero, advantage)
        plain = surrogate(L.chain(L.token_ratio(), L.policy_gradient()), log_ratio, zero, advantage)
        np.testing.assert_array_equal(wide[0], plain[0])
        np.testing.assert_array_equal(wide[1], plain[1])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_at_a_tie_is_the_unclipped_one(surrogate, advantage):
    """JAX's minimum and clip would give half of it."""
    edges = np.float32([1.25, 0.75])
    j, gradient, stats = surrogate(clip(0.25, 0.25), [np.log(edges)], [[0.0, 0.0]], advantage)
    np.testing.assert_allclose(j, [edges * advantage], rtol=1e-6)
    window = clip(0.0, 0.0)
    _, gradient, stats = surrogate(window, [[0.0, 0.0]], [[0.0, 0.0]], advantage)
    np.testing.assert_allclose(gradient, advantage)
    assert stats["policy/clip_frac_low"] == stats["policy/clip_frac_high"] == 0


def test_clip_fractions_are_one_sided(surrogate):
    new = np.log([[1.5, 1.5, 0.5, 0.5]])
    stats = surrogate(clip(), new, [[0.0] * 4], [[1.0, -1.0, 1.0, -1.0]])[2]
    assert stats["policy/clip_frac_high"] == stats["policy/clip_frac_low"] == 0.25
    assert stats["policy/clipped_high_prob"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("probability", "low", "high"),
    [(0.01, 0.002, 0.0028), (0.1, 0.02, 0.028), (0.5, 0.1, 0.14), (0.9, 0.18, 0.252)],
)
def test_headroom(surrogate, probability, low, high):
    """The largest rise of probability that still has a gradient is p·ε, 1 - p at most."""
    for eps, headroom in ((0.2, low), (0.28, high)):
        inside, outside = (probability + headroom * f for f in (0.99, 1.01))
        new = np.log([[inside, outside]])
        gradient = surrogate(clip(0.2, eps), new, np.log([[probability] * 2]))[1]
        assert gradient[0, 0] > 0 and gradient[0, 1] == 0
        if probability == 0.9:
            assert headroom > 1 - probability  # the probability itself caps it at 0.1


@pytest.mark.parametrize(
    ("probability", "eps", "ceiling"), [(0.01, 0.2, 0.012), (0.9, 0.2, 1.08), (0.01, 0.28, 0.0128)]
)
def test_ceilings(surrogate, probability, eps, ceiling):
    j, _, _ = surrogate(clip(0.2, eps), [[0.5]], np.log([[probability]]))
    assert j[0, 0] * probability == pytest.approx(ceiling, rel=1e-5)


GSPO_LOGS = [[0.1, -0.2, 0.05, 0.4]]


def test_sequence_ratio_worked(surrogate):
    zero = [[0.0] * 4]
    mean = surrogate(L.sequence_ratio(), GSPO_LOGS, zero)
    np.testing.assert_allclose(mean[0], 1.091442, rtol=1e-6)
    np.testing.assert_allclose(mean[1], 1.091442, rtol=1e-6)
    product = surrogate(L.sequence_ratio(normalize=False), GSPO_LOGS, zero)
    np.testing.assert_allclose(product[0], 1.419068, rtol=1e-6)


def test_sequence_ratio_counts_sequences(surrogate):
    policy = L.chain(L.sequence_ratio(), L.ppo_clip(0.05, 0.05))
    logs = np.array([[0.1] * 8, [0.0] * 8])
    stats = surrogate(policy, logs, np.zeros((2, 8)))[2]
    assert stats["policy/clip_frac_high"] == 0.5
    assert stats["policy/ratio_mean"] == pytest.approx((1 + np.exp(0.1)) / 2)


def test_sequence_token_ratio_has_the_sequence_value_and_the_token_gradient(surrogate):
    whole = surrogate(L.sequence_ratio(), GSPO_LOGS, [[0.0] * 4])
    token = surrogate(L.sequence_token_ratio(), GSPO_LOGS, [[0.0] * 4])
    np.testing.assert_allclose(token[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(token[1], whole[1], rtol=1e-6)
    apart = surrogate(L.sequence_token_ratio(), GSPO_LOGS, [[0.0] * 4], [[1.0, 0, 0, 0]])
    np.testing.assert_allclose(apart[1], [[1.091442, 0, 0, 0]], rtol=1e-6)


def test_sapo_gate_worked(surrogate):
    policy = L.chain(L.token_ratio(), L.sapo_gate(1.0, 1.0))
    j, gradient, _ = surrogate(policy, [[LOG_175, 0.0]], [[0.0, 0.0]])
    np.testing.assert_allclose(j, [[2.716715, 2.0]], rtol=1e-5)
    slopes = gradient / np.array([[1.75, 1.0]])  # d/dr = d/dlogp / r
    np.testing.assert_allclose(slopes, [[0.871580, 1.0]], rtol=1e-5)


def test_sapo_gate_takes_the_temperature_of_the_sign(surrogate):
    policy = L.chain(L.token_ratio(), L.sapo_gate(1.0, 2.0))
    j, _, _ = surrogate(policy, [[0.5, 0.5]], [[0.0, 0.0]], [[1.0, -1.0]])
    x = np.exp(0.5) - 1
    expected = [4 / (1 + np.exp(-x)), -2 / (1 + np.exp(-2 * x))]
    np.testing.assert_allclose(j, [expected], rtol=1e-5)


def test_cispo_caps_the_weight_and_never_the_gradient(surrogate):
    policy = L.chain(L.token_ratio(), L.cispo_weight(2.0))
    new, old = np.array([[-1.0, -1.0, -3.0]]), np.array([[-3.0, -1.5, -1.0]])
    j, gradient, stats = surrogate(policy, new, old, -1.0)
    weight = np.minimum(np.exp(new - old), 2.0)
    np.testing.assert_allclose(j, -weight * new, rtol=1e-5)
    np.testing.assert_allclose(gradient, -weight, rtol=1e-5)
    assert stats["policy/clip_frac_high"] == pytest.approx(1 / 3)


def test_gmpo_clips_before_the_mean_gspo_after(surrogate):
    logs, zero = [[1.0, 0.0]], [[0.0, 0.0]]
    for advantage, held in ((1.0, [0.4, 0.0]), (-1.0, [1.0, 0.0])):
        policy = L.chain(L.token_ratio(), L.gmpo_clip(0.4, 0.4))
        j, gradient, _ = surrogate(policy, logs, zero, advantage)
        value = np.exp(np.mean(held)) * advantage
        np.testing.assert_allclose(j, value, rtol=1e-5)
        expected = [[0 if advantage > 0 else value, value]]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    after = L.chain(L.sequence_ratio(), L.ppo_clip(0.4, np.expm1(0.4)))
    np.testing.assert_allclose(surrogate(after, logs, zero)[0], np.exp(0.4), rtol=1e-5)


def test_dppo_drops_by_the_difference_of_probabilities(surrogate):
    policy = L.chain(L.token_ratio("rollout"), L.cispo_weight(20.0), L.dppo_tv(0.15, 0.15))
    new, rollout = np.log([[0.3, 0.26, 0.1, 0.3]]), np.log([[0.1, 0.12, 0.26, 0.1]])
    advantages = [[1.0, 1.0, -1.0, -1.0]]
    _, gradient, stats = surrogate(policy, new, None, advantages, rollout_logp=rollout)
    expected = np.exp(new - rollout) * np.array(advantages) * [[0, 1, 0, 1]]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert stats["policy/clip_frac_high"] == stats["policy/clip_frac_low"] == 0.25


def test_clip_mask_drops_what_is_past_the_window(surrogate):
    policy = L.chain(L.token_ratio("rollout"), L.cispo_weight(5.0), L.clip_mask(0.2, 0.27))
    new, old = np.array([[-1.0, -1.0, -1.0]]), np.array([[-1.3, -1.2, -0.7]])
    rollout = np.array([[-1.1, -1.1, -3.0]])
    for advantage, kept in ((1.0, [0, 1, 1]), (-1.0, [1, 1, 0])):
        gradient = surrogate(policy, new, old, advantage, rollout_logp=rollout)[1]
        weight = np.minimum(np.exp(new - rollout), 5.0) * advantage * kept
        np.testing.assert_allclose(gradient, weight, rtol=1e-5)


def test_off_policy_mask_is_live_and_spares_good_responses(surrogate):
    policy = L.chain(L.token_ratio(), L.policy_gradient(), L.off_policy_mask(0.1))
    rollout = np.array([[-1.0, -1.0], [-1.0, -1.0]])
    new = np.array([[-1.3, -1.0], [-1.1, -1.0]])  # mean gaps .15 and .05
    bad = surrogate(policy, new, new, -1.0, rollout_logp=rollout)
    np.testing.assert_allclose(bad[1], [[0, 0], [-1, -1]], atol=1e-6)
    assert bad[2]["policy/off_policy_frac"] == 0.5
    good = surrogate(policy, new, new, 1.0, rollout_logp=rollout)
    np.testing.assert_allclose(good[1], 1.0, atol=1e-6)


def test_vespo_weight(surrogate):
    policy = L.chain(L.sequence_ratio("rollout", normalize=False), L.vespo_weight())
    logs = np.array([[0.1, -0.3, 0.5], [0.1, -0.3, 0.5]])
    advantages = [[2.0] * 3, [-1.0] * 3]
    j, gradient, _ = surrogate(policy, logs - 1, None, advantages, rollout_logp=np.full((2, 3), -1))
    w = np.exp(0.3)
    weights = np.array([[2 * w**2 * np.exp(3 * (1 - w))], [-(w**3) * np.exp(2 * (1 - w))]])
    np.testing.assert_allclose(gradient, np.broadcast_to(weights, (2, 3)), rtol=1e-5)
    np.testing.assert_allclose(j, weights * (logs - 1), rtol=1e-5)


def test_anchors(surrogate):
    new, old, rollout = [[-1.0]], [[-1.5]], [[-2.0]]
    for anchor, expected in (("old", np.exp(0.5)), ("rollout", np.e), ("self", 1.0)):
        policy = L.chain(L.token_ratio(anchor), L.policy_gradient())
        j, gradient, _ = surrogate(policy, new, old, rollout_logp=rollout)
        np.testing.assert_allclose([j, gradient], expected, rtol=1e-6)


def test_without_a_ratio_the_policy_gradient_is_of_log_pi(surrogate):
    j, gradient, _ = surrogate(L.policy_gradient(), [[-2.0]], None, 3.0)
    np.testing.assert_allclose(j, -6)
    np.testing.assert_allclose(gradient, 3)


@pytest.mark.parametrize("side", [120.0, -120.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_large_log_ratios_stay_finite_without_gradient(surrogate, side, advantage):
    plain = L.chain(L.token_ratio(), L.policy_gradient())
    j, gradient, _ = surrogate(plain, [[side - 121.0]], [[-121.0]], advantage)
    np.testing.assert_allclose(j, np.exp(np.sign(side) * 20) * advantage, rtol=1e-5)
    assert gradient == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: L.ppo_clip(low=-0.1), "low must be at least 0, got -0.1"),
        (lambda: L.ppo_clip(dual=0.5), "dual must be more than 1, got 0.5"),
        (lambda: L.token_ratio("behaviour"), "anchor must be 'old', 'rollout' or 'self'"),
        (lambda: L.sapo_gate(tau_pos=0.0), "must be positive"),
        (lambda: L.constant(0), "length must be positive, got 0"),
        (lambda: L.top_entropy(20), "quantile must be in"),
        (lambda: L.kl(0.1, "k4"), "estimator must be 'k1', 'k2' or 'k3', got 'k4'"),
        (lambda: L.soft_overlong(10, 20), "cache must be in 1 .. max_length"),
        (lambda: L.dapo(overlong_max=10), "go together"),
        (lambda: L.truncated_is(level="word"), "level must be 'token' or 'sequence'"),
        (lambda: L.gae(truncated="cut"), "truncated must be"),
        (lambda: L.batch_whiten(per="batch"), "per must be"),
    ],
)
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(".", r"\.")):
        make()


def test_two_surrogates_are_refused(surrogate):
    with pytest.raises(ValueError, match="takes one transform that sets the surrogate"):
        surrogate(L.chain(L.token_ratio(), L.ppo_clip(), L.cispo_weight()), [[0.0]], [[0.0]])


@pytest.mark.parametrize("transform", [L.gmpo_clip(), L.vespo_weight()])
def test_a_missing_ratio_is_refused(surrogate, transform):
    with pytest.raises(ValueError, match="needs a ratio before it"):
        surrogate(transform, [[0.0]], [[0.0]])


def test_zero_advantage_is_never_clipped(surrogate):
    stats = surrogate(clip(), [[2.0, -2.0]], [[0.0, 0.0]], 0.0)[2]
    assert stats["policy/clip_frac_low"] == stats["policy/clip_frac_high"] == 0
    assert jnp.isfinite(stats["policy/ratio_max"])
