"""The critic: values before each token, whatever the layout."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import models


def test_values_are_those_of_the_hidden_state_before_each_token():
    config = models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24
    )
    params = models.init(jax.random.key(0), config)
    critic = models.init_critic(params, config)
    tokens = jnp.arange(2, 14)[None]
    np.testing.assert_array_equal(models.token_values(critic, config, tokens), 0)  # a head of zeros

    critic["value"] = jax.random.normal(jax.random.key(1), (16,))
    segments = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]])
    values = np.asarray(models.token_values(critic, config, tokens, None, segments))
    for start, end in ((0, 5), (5, 9)):
        alone = np.asarray(models.token_values(critic, config, tokens[:, start:end]))
        np.testing.assert_allclose(values[:, start:end], alone, atol=1e-5)
        assert alone[0, 0] == 0
    np.testing.assert_array_equal(values[:, 9:], 0)
    # The value before a token does not depend on the token itself.
    other = tokens.at[0, 4].set(15)
    changed = np.asarray(models.token_values(critic, config, other, None, segments))
    np.testing.assert_allclose(changed[0, 4], values[0, 4], atol=1e-6)


def test_the_copy_is_a_copy():
    config = models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24
    )
    params = models.init(jax.random.key(0), config)
    critic = models.init_critic(params, config)
    mine, theirs = jax.tree.leaves(params), jax.tree.leaves(critic["model"])
    assert not {x.unsafe_buffer_pointer() for x in mine} & {
        x.unsafe_buffer_pointer() for x in theirs
    }
