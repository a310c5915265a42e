"""Routers: scores, choices and weights by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.models import Experts, Router, mixture

N, D, F, E, K = 96, 8, 6, 8, 2


def test_router():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(D, E)), jnp.float32)
    z = np.asarray(x, np.float64) @ np.asarray(router)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    best = np.argsort(-p, axis=1)[:, :K]
    for norm in (True, False):
        probs, own, used, weights = mixture.route(router, x, Experts(E, K, F, Router(norm)))
        np.testing.assert_allclose(probs, p, atol=1e-6)
        assert np.array_equal(own, best) and np.array_equal(used, best)
        want = np.take_along_axis(p, best, 1)
        np.testing.assert_allclose(
            weights, want / want.sum(1, keepdims=True) if norm else want, atol=1e-6
        )
    # A bias takes part in the choice and in the weights.
    bias = jnp.asarray(rng.normal(size=E), jnp.float32)
    probs, own, _, weights = mixture.route(router, x, Experts(E, K, F), bias=bias)
    p = np.exp(z + np.asarray(bias))
    best = np.argsort(-p, axis=1)[:, :K]
    want = np.take_along_axis(p, best, 1)
    assert np.array_equal(own, best)
    np.testing.assert_allclose(probs, p / p.sum(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(weights, want / want.sum(1, keepdims=True), atol=1e-6)
    # In float32 whatever the hidden states are.
    half = mixture.route(router.astype(jnp.bfloat16), x.astype(jnp.bfloat16), Experts(E, K, F))
    assert half[0].dtype == half[3].dtype == jnp.float32


def test_replayed_experts_use_live_probabilities():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(D, E)), jnp.float32)
    replay = jnp.asarray(rng.integers(0, E, (N, K)), jnp.int32).at[::2].set(-1)
    probs, own, used, weights = mixture.route(router, x, Experts(E, K, F, Router(False)), replay)
    assert np.array_equal(used[::2], own[::2]) and np.array_equal(used[1::2], replay[1::2])
    np.testing.assert_allclose(weights, np.take_along_axis(np.asarray(probs), used, 1), atol=1e-7)


def test_sigmoid_router_by_hand():
    # The logits of one token are the router's rows; sigmoid(ln 3) = 3/4 and so on.
    scores = np.array([0.75, 0.5, 0.8, 0.1, 0.6, 0.7, 0.2, 0.25])
    router = jnp.asarray(np.log(scores / (1 - scores))[None], jnp.float32)
    x = jnp.ones((1, 1))

    def check(config, chosen, weights, correction=None, replay=None):
        correction = None if correction is None else jnp.asarray(correction, jnp.float32)
        replay = None if replay is None else jnp.asarray([replay])
        probs, own, used, got = mixture.route(router, x, config, replay, None, correction)
        np.testing.assert_allclose(probs[0], scores / scores.sum(), rtol=1e-5)
        assert used[0].tolist() == chosen
        np.testing.assert_allclose(got[0], weights, rtol=1e-5)
        return own[0].tolist()

    def mixture_of(**router):
        return Experts(8, 3, 4, Router(scoring="sigmoid", **router))

    plain = mixture_of()
    check(plain, [2, 0, 5], np.array([0.8, 0.75, 0.7]) / 2.25)
    check(mixture_of(norm_topk_prob=False, scale=2.0), [2, 0, 5], [1.6, 1.5, 1.4])
    # Groups of two are worth 1.25, 0.9, 1.3 and 0.45: expert 2, the best of all, is left behind.
    grouped = mixture_of(groups=4, top_groups=2, scale=2.5)
    check(grouped, [0, 5, 4], 2.5 * np.array([0.75, 0.7, 0.6]) / 2.05)
    # Groups of four are worth their two best, 1.55 and 1.45, not their sums, 2.15 and 2.75.
    halves = mixture_of(groups=2)
    check(halves, [2, 0, 1], np.array([0.8, 0.75, 0.5]) / 2.05, [0, 0, 0, 0, 0, 0, 0.5, 0.5])
    # A correction chooses, among groups and experts, and leaves the weights alone.
    lifted = [0, 0, 0, 0, 0, 0, 1, 0]
    check(grouped, [6, 5, 4], 2.5 * np.array([0.2, 0.7, 0.6]) / 1.5, lifted)
    # Replayed experts get the live scores' weights, wherever groups and corrections point.
    own = check(grouped, [3, 1, 4], 2.5 * np.array([0.1, 0.5, 0.6]) / 1.2, lifted, [3, 1, -1])
    assert own == [6, 5, 4]


def test_a_correction_has_no_gradient_and_routers_do():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(D, E)), jnp.float32)
    config = Experts(E, K, F, Router(scoring="sigmoid", correction_bias=True))

    def loss(router, correction, replay=None):
        weights = mixture.route(router, x, config, replay, None, correction)[3]
        return jnp.sum(weights**2)

    towards_router, towards_correction = jax.grad(loss, (0, 1))(router, jnp.zeros(E))
    assert np.abs(towards_router).max() > 1e-3 and not towards_correction.any()
    # Replayed experts whose scores have all but gone get finite weights and gradients.
    x = jnp.ones((N, D))
    gone = jax.value_and_grad(loss)(router - 50, jnp.zeros(E), jnp.zeros((N, K), jnp.int32))
    assert all(np.isfinite(y).all() for y in gone)
