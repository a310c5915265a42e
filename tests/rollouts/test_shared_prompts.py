"""Rows that share a prompt give the log-probabilities, loss and gradient of separate rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax import models
from rljax.batch import Batch
from rljax.rollouts import plan_sharing, share_batch, share_rows, unshare

G, T = 3, 14
PROMPTS, LENGTHS = [4, 6], [5, 1, 8, 3, 4, 2]


def make_batch(config):
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 16, (2 * G, T)).astype(np.int32)
    mask, segments = np.zeros((2 * G, T), bool), np.zeros((2 * G, T), np.int32)
    for b, length in enumerate(LENGTHS):
        n = PROMPTS[b // G]
        tokens[b, :n] = tokens[b // G * G, :n]
        mask[b, n : n + length], segments[b, : n + length] = True, 1
    layers = len(config.mixture_layers)
    return Batch(
        tokens=tokens, mask=mask, segments=segments,
        positions=np.tile(np.arange(T, dtype=np.int32), (2 * G, 1)),
        group=np.repeat(np.arange(2, dtype=np.int32), G),
        rewards=np.array([1, 0, 0, 1, 1, 0], np.float32),
        old_logp=np.where(mask, rng.normal(-2.7, 0.3, (2 * G, T)), 0).astype(np.float32),
        rollout_logp=np.where(mask, -2.7, 0).astype(np.float32),
        routing=np.full((2 * G, T, layers, 2), -1, np.int32) if layers else None,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[0, 4])
def case(request):
    config = models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24,
        num_experts=request.param,
    )  # fmt: skip
    return config, models.init(jax.random.key(0), config), make_batch(config)


def test_log_probabilities_and_entropy_are_equal(case):
    config, params, batch = case
    plan = plan_sharing(batch.mask, batch.segments, G, 7, 8)
    shared = share_batch(plan, batch)
    assert shared.tokens.size < batch.tokens.size
    expected = models.score_tokens(
        params,
        config,
        models.Inputs(batch.tokens, batch.positions, batch.segments),
        score_mask=batch.mask,
    )
    found = models.score_tokens(
        params,
        config,
        models.Inputs(shared.tokens, shared.positions, shared.segments, plan.prefix),
        score_mask=shared.mask,
    )
    for one, other in zip(expected[:2], found[:2], strict=True):
        np.testing.assert_allclose(one, unshare(plan, other, T), atol=2e-6)
    assert np.asarray(expected[0])[batch.mask].max() < 0  # every own token was scored


@pytest.mark.parametrize("objective", [L.gspo(0.2, 0.3), L.dapo(), L.grpo(beta=0.0)])
def test_loss_gradient_and_metrics_are_equal(case, objective):
    config, params, batch = case
    rows, _ = objective.prepare(batch)
    plan = plan_sharing(rows.mask, rows.segments, G, 7, 8)

    @jax.jit
    def evaluate(params, rows):
        def loss(params):
            logp, _, _ = models.score_tokens(
                params,
                config,
                models.Inputs(
                    rows.tokens, rows.positions, rows.segments, rows.prefix, rows.routing
                ),
                score_mask=rows.mask,
            )
            return objective.loss(logp, rows)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, stats), gradient = evaluate(params, rows)
    (shared_value, shared_stats), shared_gradient = evaluate(params, share_rows(plan, rows))
    np.testing.assert_allclose(shared_value, value, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        shared_gradient, gradient,
    )  # fmt: skip
    one, other = L.finish(stats), L.finish(shared_stats)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_routing_goes_there_and_back_with_its_tokens():
    config = models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24,
        num_experts=4,
    )  # fmt: skip
    batch = make_batch(config)
    marks = np.arange(2 * G * T).reshape(2 * G, T, 1, 1).repeat(2, 3).astype(np.int32)
    for b in range(2 * G):
        marks[b, : PROMPTS[b // G]] = marks[b // G * G, : PROMPTS[b // G]]
    plan = plan_sharing(batch.mask, batch.segments, G, 6, 8)
    shared = share_batch(plan, batch.replace(routing=jnp.asarray(marks)))
    back = np.asarray(unshare(plan, shared.routing, T, empty=-1, prompt_too=True))
    live = batch.segments > 0
    np.testing.assert_array_equal(back[live], marks[live])
    assert (back[~live] == -1).all()
