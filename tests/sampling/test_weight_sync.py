"""Weights of a trainer on four devices come to a sampler on four others."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.monitoring import compilations
from rljax.sampling import Engine, SamplingParams, weight_sync


@pytest.fixture(scope="module")
def apart():
    trains = meshes.make(devices=jax.devices()[:4], fsdp=2, expert=2)
    samples = meshes.make(devices=jax.devices()[4:], expert=2, tensor=2)
    return trains, samples


@pytest.mark.parametrize("chunk", [weight_sync.CHUNK, 20_000])
def test_values_arrive_as_they_were_cast(mixture, apart, monkeypatch, chunk):
    monkeypatch.setattr(weight_sync, "CHUNK", chunk)  # two layers of experts have 49,152 bytes
    config, params = mixture
    trains, samples = apart
    config = dataclasses.replace(config, dtype="bfloat16")
    cast = models.cast_for_compute(params, config)
    wanted = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        cast,
        models.shardings(config, samples, meshes.ROLLOUT_RULES),
    )
    sent = jax.device_put(params, models.shardings(config, trains))
    got = weight_sync.move(sent, wanted)
    for x, want, value in zip(*map(jax.tree.leaves, (got, wanted, cast)), strict=True):
        assert (x.dtype, x.sharding) == (want.dtype, want.sharding)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(value))


def test_a_sampler_on_other_devices_draws_the_same(mixture, apart, prompts, caplog):
    config, params = mixture
    trains, samples = apart
    engine = Engine(config, samples, slots=8, page_size=4, max_length=32, chunk=4, least_rows=8)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)  # the same, however often asked

    def responses():
        groups = sorted(engine.generate(prompts, 2, sampling), key=lambda g: g[0].prompt_index)
        return [r for group in groups for r in group]

    here = jax.device_put(params, models.shardings(config, samples, meshes.ROLLOUT_RULES))
    with caplog.at_level(logging.DEBUG, "rljax.sampling.weight_sync"):
        engine.load(here, version=0)
        expected = responses()
        assert engine.moved == 0 and not caplog.records  # they lay as they should
        engine.load(jax.device_put(params, models.shardings(config, trains)), version=1)
        (record,) = caplog.records
    size = 4 * models.count(config)
    assert engine.moved == size
    assert f"version 1: {size} bytes of weights brought from other devices" in record.message
    for got, want in zip(responses(), expected, strict=True):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.logp, want.logp)
        assert set(got.version) == {1}


def test_weights_of_other_devices_come_again_without_a_compilation(mixture, apart, monkeypatch):
    monkeypatch.setattr(weight_sync, "CHUNK", 20_000)
    config, params = mixture
    trains, samples = apart
    sent = jax.device_put(params, models.shardings(config, trains))
    engine = Engine(config, samples, slots=8, page_size=4, max_length=32)
    engine.load(sent, version=0)
    before = compilations.count()
    engine.load(sent, version=1)
    assert engine.moved > 0
    assert compilations.count() == before
