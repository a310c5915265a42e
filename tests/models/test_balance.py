"""The load-balancing loss, and biases that follow the load."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import models
from rljax.models import forward
from rljax.models.attention import full_attention
from rljax.models.balance import balance_loss

CONFIG = models.decoder(
    vocab_size=16, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=8, num_experts=4
)


def test_worked_numbers():
    even = jnp.full((3, 4), 0.25)
    np.testing.assert_allclose(balance_loss(even, jnp.asarray([2.0, 2, 2, 2])), 1.0)
    # All tokens at one expert that the router is sure of: as many times too much as experts.
    sure = jnp.asarray([[1.0, 0, 0, 0]])
    np.testing.assert_allclose(balance_loss(sure, jnp.asarray([5.0, 0, 0, 0])), 4.0)
    np.testing.assert_allclose(balance_loss(sure, jnp.asarray([1.0, 3, 0, 0])), 1.0)
    np.testing.assert_allclose(balance_loss(sure, jnp.zeros(4)), 0.0)


def test_its_mean_is_the_auxiliary_loss_of_transformers_over_top_k():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, 6))
    probs = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    chosen = np.argsort(-z, axis=-1)[:, :2]
    # As transformers defines it: E times the sum over experts of the share of tokens that have it
    # among their choices, times its mean probability.
    share = np.stack([(chosen == e).any(-1).mean() for e in range(6)])
    theirs = 6 * np.sum(share * probs.mean(0))
    load = jnp.asarray(np.bincount(chosen.ravel(), minlength=6), jnp.float32)
    np.testing.assert_allclose(balance_loss(jnp.asarray(probs), load).mean(), theirs / 2, rtol=1e-5)


def test_the_model_reports_it_for_every_token_with_its_gradient(random_params):
    params = random_params(CONFIG)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)))
    positions, segments = models.Inputs(tokens).places()
    attend = full_attention(positions, segments)

    def run(params, load):
        inputs = models.RouterInputs(load=load)
        return forward.hidden_states(params, CONFIG, tokens, positions, attend, routers=inputs)[2]

    @jax.jit
    def both(params):
        first = run(params, None)
        grads, given = jax.grad(
            lambda p: (lambda r: (r.auxiliary.sum(), r))(run(p, first.load)), has_aux=True
        )(params)
        return first, given, grads

    first, given, grads = both(params)
    assert first.auxiliary is None and given.auxiliary.shape == (2, 6)
    np.testing.assert_array_equal(first.load, models.routed_load(first.experts, 4))
    # Even shares make the loss 1 whatever the router's scores, and give it no gradient.
    even = jax.jit(lambda p: run(p, jnp.ones((2, 4))).auxiliary)(params)
    np.testing.assert_allclose(even, 1.0, rtol=1e-6)
    assert np.abs(grads["stacks"][0][0]["feed_forward"]["router"]).max() > 1e-4
    assert np.abs(grads["output" if "output" in grads else "norm"]).max() == 0


def test_biases_move_towards_an_even_load():
    attention = models.Attention(num_heads=1, num_kv_heads=1, head_dim=2)
    mixture = models.Experts(3, 1, 4, models.Router(scoring="sigmoid", correction_bias=True))
    plain = models.Experts(4, 1, 4)
    stacks = (
        models.Stack((models.Block(attention, models.Dense(4)),), 1),
        models.Stack((models.Block(attention, mixture), models.Block(attention, plain)), 2),
    )
    config = models.ModelConfig(8, 4, stacks)
    params = jax.tree.map(lambda p: jnp.zeros(p.shape), models.declare(config))
    load = jnp.asarray([[6.0, 0, 3, 0], [9, 9, 9, 9], [4, 4, 4, 0], [0, 0, 0, 1]])
    moved = models.move_corrections(params, config, load, 0.1)
    got = moved["stacks"][1][0]["feed_forward"].pop("correction")
    np.testing.assert_allclose(got, [[-0.1, 0.1, 0], [0, 0, 0]])
    params["stacks"][1][0]["feed_forward"].pop("correction")
    jax.tree.map(np.testing.assert_array_equal, moved, params)
