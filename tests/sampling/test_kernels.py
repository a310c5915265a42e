"""Kernels where they are possible, and a word in the log on what was chosen."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from rljax_kernels import cpu

from rljax import mesh as meshes
from rljax.errors import InputError, MissingDependencyError
from rljax.sampling import Engine, SamplingParams


def engine(model, **options):
    sizes = {"slots": 4, "page_size": 4, "max_length": 24}
    return Engine(model[0], **sizes | options)


@pytest.mark.compiler
def test_one_cpu_device_in_float32_takes_the_kernels_by_itself(dense, prompts, caplog):
    with caplog.at_level(logging.INFO, "rljax.sampling"):
        auto = engine(dense)
    assert "kernels=auto: decoding with the C++ kernels" in caplog.text
    assert auto.runner.attention == "native"
    mesh = meshes.make(devices=jax.devices()[:1])
    assert engine(dense, mesh=mesh).runner.attention == "native"
    sampling = SamplingParams(max_tokens=8, temperature=0.7)
    found = []
    for each in (auto, engine(dense, kernels="off")):
        each.load(dense[1], version=0)
        groups = each.generate(prompts[:3], 2, sampling)
        found.append({(r.prompt_index, r.sample_index): r for g in groups for r in g})
    for key, response in found[0].items():
        np.testing.assert_array_equal(response.tokens, found[1][key].tokens)
        np.testing.assert_allclose(response.logp, found[1][key].logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change,options,reason",
    [
        ({"dtype": "bfloat16"}, {}, "got 1 cpu in bfloat16"),
        ({}, {"mesh": 2}, "got 2 cpu in float32"),
        ({}, {"gathered": False}, "gathered=False was requested"),
        ({"expert_backend": "ragged"}, {}, "expert_backend='ragged' was requested"),
    ],
)
def test_elsewhere_it_does_without_and_says_why(dense, caplog, change, options, reason):
    config = dataclasses.replace(dense[0], **change)
    if "mesh" in options:
        options = {"mesh": meshes.make(data=2, devices=jax.devices()[:2])}
    with caplog.at_level(logging.INFO, "rljax.sampling"):
        made = engine((config, None), **options)
    assert made.runner.attention == ("blocked" if "gathered" in options else "gathered")
    assert "kernels=auto: decoding without the C++ kernels" in caplog.text
    assert reason in caplog.text


def test_without_a_compiler_auto_does_without_and_native_is_refused(dense, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "compiler", lambda: None)
    with caplog.at_level(logging.INFO, "rljax.sampling"):
        assert engine(dense).runner.attention == "gathered"
    assert "none of $CXX" in caplog.text
    with pytest.raises(MissingDependencyError, match=r"cannot be built: .* none of \$CXX") as error:
        engine(dense, kernels="native")
    assert "\n" not in str(error.value)


def test_off_is_off_and_other_words_are_refused(dense):
    assert engine(dense, kernels="off").runner.attention == "gathered"
    with pytest.raises(InputError, match=r"kernels='on' must be one of auto, off, .*native"):
        engine(dense, kernels="on")
    with pytest.raises(InputError, match="option native of the engine is unknown; it is kernels="):
        engine(dense, native=True)
    with pytest.raises(InputError, match="option chunks of the engine is unknown; did you mean"):
        engine(dense, chunks=3)
    with pytest.raises(InputError, match="chunk=0 must be at least 1"):
        engine(dense, chunk=0)
