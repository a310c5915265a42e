"""What several of these tests start from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import models


@pytest.fixture(scope="session")
def random_params():
    """Config, seed -> parameters drawn by numpy, which compiles nothing, norms and biases too."""

    def draw(config, seed=0, gain=1.0):
        rng = np.random.default_rng(seed)

        def leaf(p):
            noise = rng.standard_normal(p.shape).astype(np.float32)
            value = p.value + 0.2 * noise if p.scale is None else gain * p.scale * noise
            return jnp.asarray(value)

        return jax.tree.map(leaf, models.declare(config))

    return draw
