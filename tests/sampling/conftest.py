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


@pytest.fixture(scope="session")
def latent():
    """Latent attention; a dense layer, then experts in groups that corrections choose among."""
    attention = models.LatentAttention(
        num_heads=4, q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=10,
        rope_scaling=models.Yarn(4.0, 16, magnitude=0.9), scale_weight=0.8,
    )  # fmt: skip
    mixture = models.Experts(
        num_experts=8, top_k=2, intermediate_size=24, shared_size=24, router=models.Router(
            scoring="sigmoid", groups=4, top_groups=2, scale=2.5, correction_bias=True
        ),
    )  # fmt: skip
    layers = (models.Block(attention, models.Dense(48)), models.Block(attention, mixture))
    config = models.ModelConfig(32, 32, tuple(models.Stack((b,), 1) for b in layers))
    params = models.init(jax.random.key(2), config)
    correction = 0.2 * jax.random.normal(jax.random.key(3), (1, 8))
    params["stacks"][1][0]["feed_forward"]["correction"] = correction
    return config, params
