"""The critic's loss and what it explains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

RETURNS = np.array([0.961090, 0.985050, 1.0], np.float32)
VALUES = np.array([[0.6, 0.7, 0.9]], np.float32)


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch(
        [0],
        mask=[[1, 1, 1]],
        token_rewards=[[0.0, 0, 1]],
        values=VALUES,
        old_logp=-np.ones((1, 3)),
    )


def critic(batch, values, loss):
    objective = L.Objective(L.gae(0.99, 0.95), L.token_ratio(), L.token_mean(), critic=loss)
    plain = L.Objective(L.gae(0.99, 0.95), L.token_ratio(), L.token_mean())
    rows, _ = objective.prepare(batch)

    def value(values):
        outputs = L.PolicyOutputs(batch.old_logp, values=values)
        return objective.loss(outputs, rows)[0] - plain.loss(outputs, rows)[0]

    stats = objective.loss(L.PolicyOutputs(batch.old_logp, values=values), rows)[1]
    loss, gradient = jax.value_and_grad(value)(jnp.asarray(values, jnp.float32))
    return loss, gradient, L.finish(stats)


def test_worked(batch):
    """Half of the mean squared error .073880."""
    loss, gradient, stats = critic(batch, VALUES, L.value_loss())
    assert loss == pytest.approx(0.036940, abs=1e-6)
    assert stats["critic/loss"] == pytest.approx(0.036940, abs=1e-6)
    np.testing.assert_allclose(gradient, (VALUES - RETURNS) / 3, atol=1e-6)


def test_the_clipped_error_counts_where_it_is_larger(batch):
    values = VALUES + np.array([[0.3, 0.3, -0.5]])
    loss, gradient, _ = critic(batch, values, L.value_loss(0.2))
    held = VALUES + np.array([[0.2, 0.2, -0.2]])
    free_error, held_error = (values - RETURNS) ** 2, (held - RETURNS) ** 2
    expected = 0.5 * np.maximum(free_error, held_error).mean()
    assert loss == pytest.approx(expected, rel=1e-5)
    taken = free_error >= held_error
    np.testing.assert_allclose(gradient, np.where(taken, values - RETURNS, 0) / 3, atol=1e-6)
    unclipped = critic(batch, values, L.value_loss(None))[0]
    assert unclipped == pytest.approx(0.5 * free_error.mean(), rel=1e-5)
    halved = critic(batch, values, L.value_loss(None, coef=0.5))[0]
    assert halved == pytest.approx(0.25 * free_error.mean(), rel=1e-5)


def test_explained_variance(batch):
    stats = critic(batch, VALUES, L.value_loss())[2]
    expected = 1 - np.var(RETURNS - VALUES[0]) / np.var(RETURNS)
    assert stats["critic/explained_var"] == pytest.approx(expected, rel=1e-3)
    assert critic(batch, RETURNS[None], L.value_loss(None))[2][
        "critic/explained_var"
    ] == pytest.approx(1, abs=1e-5)


def test_the_critic_takes_a_token_mean_or_the_policy_weights(make_batch):
    batch = make_batch(
        [0, 0],
        [1, 3],
        values=np.zeros((2, 3)),
        token_rewards=np.zeros((2, 3)),
        old_logp=np.zeros((2, 3)),
    )
    for weights, each in (("token", 0.25), ("policy", 0.5)):
        objective = L.Objective(
            L.gae(),
            L.token_ratio(),
            L.sequence_mean(),
            critic=L.value_loss(weights=weights),
        )
        rows, _ = objective.prepare(batch)
        outputs = L.PolicyOutputs(batch.old_logp, values=jnp.ones((2, 3)))
        gradient = jax.grad(lambda o: objective.loss(o, rows)[0])(outputs)  # noqa: B023
        np.testing.assert_allclose(gradient.values[0], [each, 0, 0], rtol=1e-6)


def test_returns_and_old_values_carry_no_gradient(batch):
    objective = L.ppo()
    rows, _ = objective.prepare(batch)
    outputs = L.PolicyOutputs(batch.old_logp, values=jnp.asarray(VALUES + 0.3))

    def loss(returns, values):
        return objective.loss(outputs, rows.replace(returns=returns, values=values))[0]

    for gradient in jax.grad(loss, (0, 1))(rows.returns, rows.values):
        np.testing.assert_array_equal(gradient, 0)


def test_ppo_says_what_it_needs(batch):
    assert L.ppo().needs == {"old", "values"}
    with pytest.raises(ValueError, match=r"gae.* needs values, got None: set Batch\.values"):
        L.ppo().prepare(batch.replace(values=None))
    rows, _ = L.ppo().prepare(batch)
    with pytest.raises(ValueError, match=r"needs values, got None: set PolicyOutputs\.values"):
        L.ppo().loss(batch.old_logp, rows)
