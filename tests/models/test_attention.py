"""Attention: what a query sees, and what must not leak into it."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import models
from rljax.models import attention


def test_attention_keeps_what_is_not_finite_where_it_is():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 6, h, 4)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    attend = attention.full_attention(jnp.arange(6)[None], segments)

    @jax.jit
    def step(q, k, v):
        def f(q, k, v):
            out = attend(q, k, v, jnp.int32(0), None, scale=0.5)[0]
            # A cotangent that is not finite, as of the loss of a broken sequence.
            return jnp.sum(out[:, :2] ** 2) + jnp.sum(out[:, 2:]), out

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(q, k, v)

    (_, want), want_gradients = step(q, k, v)
    for i in range(3):
        parts = [q, k, v]
        parts[i] = parts[i].at[0, 3, 0].set(jnp.nan)
        (_, got), gradients = step(*parts)
        assert np.array_equal(got[:, [0, 1, 2, 5]], want[:, [0, 1, 2, 5]])
        assert np.isnan(got[0, 3]).any()
        assert np.isnan(got[0, 4]).any() == (i > 0)  # a later query of the same sequence
        for g, w in zip(gradients, want_gradients, strict=True):
            assert np.array_equal(g[:, :2], w[:, :2])


def test_attention_without_rotation_does_not_know_distances(random_params):
    attend = models.Attention(2, 2, 4, rope_theta=None)
    block = models.Block(attend, models.Dense(8))
    config = models.ModelConfig(7, 8, (models.Stack((block,), 1),))
    params, tokens = random_params(config), jnp.asarray([[1, 2, 3, 4]])
    logits = jax.jit(lambda positions: models.logits(params, config, tokens, positions))
    near, far = logits(jnp.asarray([[0, 1, 2, 3]])), logits(jnp.asarray([[0, 10, 20, 90]]))
    np.testing.assert_array_equal(near, far)
