"""Decode programs with kernels for other devices: in their interpreters, and compiled for them."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import registry, triton_tools
from rljax_kernels.paged_attention import OPERATION

from rljax import mesh as meshes
from rljax import models
from rljax.errors import InputError, MissingDependencyError
from rljax.planning import Topology
from rljax.sampling import Engine, SamplingParams, kernels
from rljax.sampling.decode import DecodeOptions, decode_chunk, prefill
from rljax.sampling.decode_inputs import blank_inputs
from rljax.sampling.decode_rows import Shapes
from rljax.sampling.pool import make_pool, put_rows, put_tokens

SIZES = {"slots": 4, "max_length": 300, "chunk": 4, "least_rows": 2, "share": 2}


def responses(model, prompts, **options):
    engine = Engine(model[0], **SIZES | options)
    engine.load(model[1], version=0)
    sampling = SamplingParams(max_tokens=3, temperature=0.7)
    groups = engine.generate(prompts, 2, sampling)
    found = {(r.prompt_index, r.sample_index): r for group in groups for r in group}
    return engine.runner.attention, found


def compare(found, expected):
    assert found.keys() == expected.keys()
    for key, response in found.items():
        np.testing.assert_array_equal(response.tokens, expected[key].tokens)
        np.testing.assert_allclose(response.logp, expected[key].logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["blocked", "reference"])
def test_pages_are_read_in_place_by_plain_jax_too(dense, prompts, name):
    longest = [prompts[4], prompts[2]]
    _, expected = responses(dense, longest, kernels="off")
    attention, found = responses(dense, longest, kernels=name, page_size=4)
    assert attention == name
    compare(found, expected)


@pytest.mark.targets
@pytest.mark.parametrize("platform,name", [("gpu", "triton"), ("tpu", "pallas")])
def test_an_engine_takes_the_kernels_of_its_devices(dense, latent, monkeypatch, platform, name):
    """Rows share the first pages of a prompt."""
    model = latent if name == "pallas" else dense
    prompt = np.random.default_rng(0).integers(2, 32, 133).astype(np.int32)
    _, expected = responses(model, [prompt], kernels="off", page_size=16)
    monkeypatch.setattr(kernels, "platform_of", lambda mesh: platform)
    if name == "triton":
        if reason := OPERATION.named(name).missing():
            pytest.skip(reason)
        pytest.importorskip("torch", exc_type=ImportError)
        from tests.kernels import interpreter

        with interpreter.interpreting():
            attention, found = responses(model, [prompt], page_size=16)
    else:
        attention, found = responses(model, [prompt], page_size=128)
    assert attention == name
    compare(found, expected)


def test_what_is_named_and_cannot_be_used_is_refused_in_one_line(dense, monkeypatch):
    with pytest.raises(InputError, match=r"kernels='pallas': it is for tpu, not for cpu; use"):
        Engine(dense[0], kernels="pallas")
    with pytest.raises(InputError, match="gathered=True and kernels='blocked' exclude each other"):
        Engine(dense[0], kernels="blocked", gathered=True)
    monkeypatch.setattr(kernels, "platform_of", lambda mesh: "tpu")
    with pytest.raises(InputError, match=r"kernels='pallas': it needs pages of a multiple of 128"):
        Engine(dense[0], kernels="pallas", page_size=16)
    assert Engine(dense[0], page_size=16).runner.attention == "blocked"
    monkeypatch.setattr(kernels, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(triton_tools, "missing", lambda: "jax_triton is not installed")
    broken = dataclasses.replace(OPERATION.named("triton"), missing=triton_tools.missing)
    monkeypatch.setattr(kernels.OPERATION.__class__, "named", lambda self, name: broken)
    with pytest.raises(MissingDependencyError, match="kernels='triton': jax_triton is not"):
        Engine(dense[0], kernels="triton")


def test_pages_written_one_by_one_hold_what_tokens_written_at_once_are():
    rng = np.random.default_rng(0)
    pool = {"k": jnp.asarray(rng.normal(size=(2, 16, 2, 3, 4)), jnp.float32)}
    pool["v"] = jnp.asarray(rng.normal(size=(2, 16, 2, 4, 3)), jnp.float32)
    new = {n: jnp.asarray(rng.normal(size=(3, 6, 2, 3)), jnp.float32) for n in pool}
    table = jnp.asarray([[3, 9, 1, 0], [3, 9, 1, 0], [5, 6, 7, 0]], jnp.int32)
    # The second row goes on in the page in which the first one ends; the third has no whole row.
    start, count = jnp.asarray([0, 6, 7]), jnp.asarray([6, 6, 2])
    positions = start[:, None] + jnp.arange(6)
    page = jnp.take_along_axis(table, positions // 4, axis=1, mode="clip")
    page = jnp.where(jnp.arange(6) < count[:, None], page, 16)
    expected = put_tokens(pool, 1, new, page, positions % 4)
    found = jax.jit(put_rows)(pool, 1, new, table, start, count)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def decode_arguments(config, page_size, rows=8, shared=2):
    shapes = Shapes(rows, 4, share=4, page_size=page_size, most_pages=8, exact=True)
    inputs = blank_inputs(shapes, rows, 2, [0], (8, shared))
    params = jax.eval_shape(lambda: models.init(jax.random.key(0), config))
    pool = jax.eval_shape(lambda: make_pool(config, 32, page_size))
    return params, pool, inputs


@pytest.mark.targets
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_are_exported_for_cuda_with_triton(dense, dtype, monkeypatch):
    if reason := OPERATION.named("triton").missing():
        pytest.skip(reason)
    monkeypatch.setattr(registry, "platform_here", lambda: "gpu")
    config = dataclasses.replace(dense[0], dtype=dtype)
    chunk = functools.partial(
        decode_chunk, config=config, options=DecodeOptions(4, "triton"), filtered=False
    )
    exported = triton_tools.export(chunk, *decode_arguments(config, 16))
    # The kernels for a row's own pages and for shared ones, and what puts both together.
    assert exported.mlir_module().count("triton_kernel_call") >= 3
    rows = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((4, 32), (4,), (4,), (4, 8))]
    params, pool, _ = decode_arguments(config, 16)
    fill = functools.partial(prefill, config=config)
    assert "cuda" in triton_tools.export(fill, params, pool, *rows).platforms


@pytest.mark.targets
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra tpu)")
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_programs_are_compiled_for_tpu_and_decoding_copies_no_pool(sizes):
    mesh = meshes.make(devices=Topology.parse("v5p:2x2x1").devices(), **sizes)
    config = models.decoder(
        vocab_size=512, hidden_size=256, num_layers=9, num_heads=4, num_kv_heads=2, head_dim=128,
        intermediate_size=256,
    )  # fmt: skip
    config = dataclasses.replace(config, dtype="bfloat16")
    options = {"num_pages": 8192, "prefill_tokens": 512, "chunk": 4}
    engine = Engine(config, mesh, slots=8, max_length=2048, **options)
    assert engine.runner.attention == "pallas"
    pool = 2 * 9 * 8192 * 2 * 128 * 128 * 2 // mesh.size
    few = dataclasses.replace(config, stacks=(dataclasses.replace(config.stacks[0], repeats=3),))
    unrolled = Engine(few, mesh, slots=8, max_length=2048, **options)
    assert unrolled.runner.attention == ("blocked" if "tensor" in sizes else "pallas")
    decode = engine.lower_decode().compile().memory_analysis()
    assert decode.alias_size_in_bytes >= pool > 20 * decode.temp_size_in_bytes
    prefill = engine.lower_prefill(1024).compile().memory_analysis()
    # Where XLA splits heads over `tensor`, it copies keys or values, half of the pool.
    least = 4 if "tensor" not in sizes else 1.5
    assert prefill.alias_size_in_bytes >= pool > least * prefill.temp_size_in_bytes
