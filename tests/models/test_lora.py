"""Low-rank adapters: which matrices, what they add, what learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.models import lora as loras

CONFIG = models.decoder(
    vocab_size=16, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24,
    num_experts=4,
)  # fmt: skip
LORA = models.Lora(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def drawn(random_params):
    """Parameters, and adapters of which neither half is 0."""
    params = random_params(CONFIG)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32),
        loras.declare_adapters(CONFIG, LORA),
    )
    return params, adapters


def test_fresh_adapters_change_nothing(random_params):
    params = random_params(CONFIG)
    adapters = models.init_adapters(jax.random.key(0), CONFIG, LORA)
    merged = models.merge_adapters(params, adapters, LORA)
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    assert all(np.abs(pair["a"]).max() > 0 for pair in adapters.values())


def test_merged_weights_are_the_sum(drawn):
    params, adapters = drawn
    merged = jax.jit(lambda p, a: models.merge_adapters(p, a, LORA))(params, adapters)
    layer, old = merged["stacks"][0][0], params["stacks"][0][0]
    scale = LORA.alpha / LORA.rank
    for part, name, subscripts in (
        ("attention", "q", "ldr,lrhe->ldhe"),
        ("attention", "o", "lher,lrd->lhed"),
        ("feed_forward", "gate", "ledr,lerf->ledf"),
        ("feed_forward", "down", "lefr,lerd->lefd"),
    ):
        pair = adapters[f"stacks/0/0/{part}/{name}"]
        want = old[part][name] + scale * np.einsum(subscripts, pair["a"], pair["b"])
        np.testing.assert_allclose(layer[part][name], want, rtol=1e-5, atol=1e-5)
    for name in ("router",):
        np.testing.assert_array_equal(layer["feed_forward"][name], old["feed_forward"][name])
    np.testing.assert_array_equal(merged["embed"], params["embed"])


def test_gradients_are_those_of_the_matrix_projected(drawn):
    params, adapters = drawn
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 16, (2, 6)))
    small = jax.tree.map(lambda x: 0.1 * x, adapters)

    def loss(params):
        return models.token_logprobs(params, CONFIG, tokens)[0].sum()

    @jax.jit
    def both(adapters):
        merged, pull = jax.vjp(lambda a: models.merge_adapters(params, a, LORA), adapters)
        whole = jax.grad(loss)(merged)
        return whole, pull(whole)[0]

    whole, found = both(small)
    name = "stacks/0/0/attention/q"
    dense = whole["stacks"][0][0]["attention"]["q"]
    scale = LORA.alpha / LORA.rank
    want_b = scale * jnp.einsum("ldr,ldhe->lrhe", small[name]["a"], dense)
    want_a = scale * jnp.einsum("lrhe,ldhe->ldr", small[name]["b"], dense)
    np.testing.assert_allclose(found[name]["b"], want_b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[name]["a"], want_a, rtol=1e-4, atol=1e-5)


def test_targets_are_ends_of_names():
    def names(*targets):
        return [n.split("/", 3)[-1] for n in loras.adapted(CONFIG, models.Lora(2, 4.0, targets))]

    assert names("attention/q", "down") == ["attention/q", "feed_forward/down"]
    assert names("attention/*") == [f"attention/{n}" for n in "koqv"]
    with pytest.raises(ValueError, match="'attention/w' names no matrix of the model; there are"):
        names("attention/w")
    with pytest.raises(ValueError, match="names no matrix"):
        names("q_norm")  # a vector
    with pytest.raises(ValueError, match="rank=0"):
        models.Lora(0, 1.0)
    with pytest.raises(ValueError, match="adapts nothing"):
        models.Lora(1, 1.0, ())


def test_adapters_are_laid_out_like_their_matrices():
    mesh = meshes.make(fsdp=4, tensor=2)
    found = models.init_adapters(jax.random.key(0), CONFIG, LORA, mesh)
    gate = found["stacks/0/0/feed_forward/gate"]
    assert gate["a"].addressable_shards[0].data.shape == (2, 4, 4, 3)  # embed over fsdp
    assert gate["b"].addressable_shards[0].data.shape == (2, 4, 3, 12)  # mlp over tensor
    alone = models.init_adapters(jax.random.key(0), CONFIG, LORA)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, alone)
