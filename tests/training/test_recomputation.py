"""`remat`: what is recomputed never changes a result, and auto follows the memory."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.config import ModelSettings
from rljax.errors import InputError
from rljax.training import recomputation
from tests.training import tiny

CONFIG = models.decoder(
    vocab_size=16, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48
)


@functools.cache
def gradient(remat):
    config = dataclasses.replace(CONFIG, remat=remat, attention_backend="blocked")
    params = models.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 16)

    def loss(params):
        return models.token_logprobs(params, config, tokens)[0].sum()

    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    exponentials = str(jax.make_jaxpr(jax.grad(loss))(params)).count(" exp ")
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes, exponentials


@pytest.mark.parametrize("remat", ["layer", "attention", "offload"])
def test_the_gradient_is_that_of_keeping_everything(remat):
    (expected, most, _), (found, bytes_used, _) = gradient("none"), gradient(remat)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected
    )
    assert bytes_used < most


def test_attention_that_is_kept_is_not_computed_again():
    assert gradient("attention")[2] < gradient("layer")[2]


def test_truths_stand_for_layer_and_none():
    assert dataclasses.replace(CONFIG, remat=True).remat == "layer"
    assert dataclasses.replace(CONFIG, remat=False).remat == "none"
    assert (ModelSettings(remat=True).remat, ModelSettings(remat=False).remat) == ("layer", "none")
    with pytest.raises(InputError, match="remat='some' is unknown; use one of none, layer"):
        dataclasses.replace(CONFIG, remat="some")


@pytest.mark.parametrize("memory,expected", [(1e6, "attention"), (1e9, "none")])
def test_auto_keeps_what_fits(tmp_path, monkeypatch, memory, expected):
    monkeypatch.setattr(recomputation, "device_bytes", lambda device: memory)
    mesh = meshes.make(devices=jax.devices()[:1])
    settings = tiny.config(tmp_path, model=ModelSettings("tiny-moe"))
    model = models.PRESETS["tiny-moe"]()
    # 4 responses of an update, 12 tokens each, in two layers.
    assert recomputation.micro_batch_tokens(settings, 1) == 48
    heads, width = (4 + 2 * 2) * 16, 2 * (112 + 64)
    assert recomputation.activation_bytes(model, 48) == 48 * 2 * 4 * (
        6 * 64 + 4 * heads + 5 * width
    )
    assert recomputation.choose_remat(settings, model, mesh) == expected
    given = dataclasses.replace(settings, model=ModelSettings("tiny-moe", remat="layer"))
    assert recomputation.choose_remat(given, model, mesh) == "layer"


def test_offload_is_refused_where_there_is_no_memory_of_the_host(tmp_path, monkeypatch):
    settings = tiny.config(tmp_path, model=ModelSettings("tiny-moe", remat="offload"))
    mesh = meshes.make(devices=jax.devices()[:1])
    model = models.PRESETS["tiny-moe"]()
    assert recomputation.choose_remat(settings, model, mesh) == "offload"

    def refuse(sharding):
        raise InputError("no pinned_host memory")

    monkeypatch.setattr(meshes, "on_host", refuse)
    with pytest.raises(InputError, match="remat=offload: cpu devices have no pinned_host memory"):
        recomputation.choose_remat(settings, model, mesh)
