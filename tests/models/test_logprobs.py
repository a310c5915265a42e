"""Log-probabilities and entropies by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.models import logprobs


def test_entropy_is_in_nats_of_the_distribution_at_that_temperature():
    config = models.decoder(
        vocab_size=3, hidden_size=3, num_layers=1, num_heads=1, head_dim=2, intermediate_size=2,
        tie_embeddings=False,
    )  # fmt: skip
    probabilities = jnp.asarray([[[1 / 3] * 3, [0.97, 0.02, 0.01]]])
    params = {"output": jnp.eye(3)}
    for temperature in (1.0, 0.5):
        hidden = temperature * jnp.log(probabilities)
        targets = jnp.asarray([[0, 2]])
        logp, entropy = logprobs._score(params, config, hidden, targets, temperature, 8, None)
        np.testing.assert_allclose(entropy[0] / np.log(2), [1.584963, 0.221941], atol=1e-6)
        np.testing.assert_allclose(logp[0], np.log([1 / 3, 0.01]), rtol=1e-5)


def test_a_replayed_support_renormalises_what_was_kept():
    params = {"output": jnp.eye(4)}
    config = models.decoder(
        vocab_size=4, hidden_size=4, num_layers=1, num_heads=1, head_dim=2, intermediate_size=2,
        tie_embeddings=False,
    )  # fmt: skip
    hidden = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05]] * 3]))
    targets = jnp.asarray([[1, 1, 2]])
    support = jnp.asarray([[[1, 0, -1], [-1, -1, -1], [2, -1, -1]]])

    @functools.partial(jax.value_and_grad, has_aux=True)
    def score(hidden, chunk=8):
        found = logprobs._score(params, config, hidden, targets, 1.0, chunk, support)
        return found[0].sum(), found

    (_, (logp, entropy)), gradient = jax.jit(score)(hidden)
    np.testing.assert_allclose(logp[0], np.log([0.3 / 0.8, 0.3, 1.0]), atol=1e-6)
    binary = -(0.375 * np.log(0.375) + 0.625 * np.log(0.625))
    whole = -sum(p * np.log(p) for p in (0.5, 0.3, 0.15, 0.05))
    np.testing.assert_allclose(entropy[0], [binary, whole, 0.0], atol=1e-6)
    # Only what was kept can move it, and one token alone cannot.
    np.testing.assert_allclose(gradient[0, 0], [-0.625, 0.625, 0, 0], atol=1e-6)
    np.testing.assert_allclose(gradient[0, 2], 0, atol=1e-6)
    chunked = functools.partial(score, chunk=1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        jax.jit(chunked)(hidden),
        ((logp.sum(), (logp, entropy)), gradient),
    )


@pytest.mark.parametrize("tied", [False, True])
def test_ids_without_a_token_are_never_predicted(random_params, tied):
    padded = models.decoder(
        vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8,
        tie_embeddings=tied,
    )  # fmt: skip
    config = dataclasses.replace(padded, num_tokens=11)
    params = random_params(padded)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 6)))

    @functools.partial(jax.jit, static_argnums=1)
    def score(params, config):
        return models.token_logprobs(params, config, tokens, chunk=4)

    plain = models.logits(params, padded, tokens)[:, :-1, :11]
    masked = models.logits(params, config, tokens)[:, :-1]
    np.testing.assert_array_equal(masked[..., :11], plain)
    assert (masked[..., 11:] < -1e29).all()
    each = jax.nn.log_softmax(plain, axis=-1)
    logp, entropy = score(params, config)
    want = jnp.take_along_axis(each, tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], want, atol=1e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(jnp.exp(each) * each).sum(-1), atol=1e-5)
    # Over `tensor`, each device masks its own slice of the vocabulary.
    mesh = meshes.make(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        laid = jax.device_put(params, models.shardings(config, mesh))
        for got, one in zip(score(laid, config), (logp, entropy), strict=True):
            np.testing.assert_allclose(got, one, atol=1e-5)


def test_more_tokens_than_embeddings_are_refused():
    with pytest.raises(ValueError, match="num_tokens=9 must lie between 1 and vocab_size=8: "):
        models.ModelConfig(8, 8, (), num_tokens=9)
