"""Two tiny models and a few prompts that cross page and bucket borders."""

import jax
import numpy as np
import pytest

from rljax import models


def tiny(num_experts: int) -> models.ModelConfig:
    return models.decoder(
        vocab_size=32, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        intermediate_size=48, num_experts=num_experts,
    )  # fmt: skip


@pytest.fixture(scope="session")
def dense():
    config = tiny(0)
    # Larger than at initialisation, so that distributions are far from uniform.
    params = jax.tree.map(lambda x: 2 * x, models.init(jax.random.key(0), config))
    return config, params


@pytest.fixture(scope="session")
def mixture():
    config = tiny(4)
    params = jax.tree.map(lambda x: 2 * x, models.init(jax.random.key(1), config))
    return config, params


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(2, 32, n).astype(np.int32) for n in (1, 3, 8, 9, 17, 5)]
