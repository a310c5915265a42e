"""GGUF files of llama: what llama.cpp's converter would write is read back as it was."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.models import families, weights
from rljax.models.gguf import TABLE

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

CONFIG = models.decoder(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
    qk_norm=None,
    rope_theta=5e4,
    norm_eps=1e-5,
    tie_embeddings=False,
    family="llama",
    max_position=256,
)


def write(file, params, config=CONFIG, kind=None, **fields):
    """Writes a GGUF file, with q and k permuted as the converter does."""
    attention = config.layers[0].attention
    out = gguf.GGUFWriter(file, "llama")
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 64,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "rope.dimension_count": attention.head_dim,
        "vocab_size": config.vocab_size,
    } | {k: v for k, v in fields.items() if isinstance(v, int)}
    for name, value in values.items():
        out.add_uint32(f"llama.{name}", value)
    out.add_float32("llama.rope.freq_base", attention.rope_theta)
    out.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    out.add_string("tokenizer.ggml.model", "gpt2")
    for name, value in fields.items():
        if isinstance(value, str):
            out.add_string(f"llama.{name}", value)
    names = families.FAMILIES["llama"].table
    there = {
        entry.name(i): other.name(i)
        for entry, other in zip(
            weights.entries(config, names), weights.entries(config, TABLE), strict=True
        )
        for i in entry.pieces()
    }
    for name, array in weights.stored(weights.entries(config, names), params):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            d = attention.head_dim
            array = (
                array.reshape(-1, 2, d // 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
            )
        if kind is None or array.ndim == 1:
            out.add_tensor(there[name], array)
        else:
            packed = gguf.quants.quantize(array, kind)
            out.add_tensor(there[name], packed, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


@pytest.fixture(scope="module")
def params(random_params):
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def file(params, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", params)


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.smoke
def test_reads_configuration_and_weights(file, params):
    config, found = models.from_pretrained(file)
    assert config.norm_eps == pytest.approx(1e-5)  # float32 in the file
    assert config.stacks == CONFIG.stacks and not config.tie_embeddings
    assert (config.vocab_size, config.hidden_size, config.max_position) == (48, 32, 256)
    assert config.family == "llama"
    assert_equal_trees(params, found)


def test_reads_onto_a_mesh(file, params):
    mesh = meshes.make(fsdp=4, tensor=2)
    assert_equal_trees(params, models.from_pretrained(file, mesh=mesh)[1])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_dequantises(params, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    _, found = models.from_pretrained(
        write(tmp_path / "model.gguf", params, kind=kind), mesh=meshes.make(fsdp=8)
    )
    for name in ("gate", "down"):
        want = params["stacks"][0][0]["feed_forward"][name]
        got = found["stacks"][0][0]["feed_forward"][name]
        stored = np.ascontiguousarray(np.asarray(want).swapaxes(1, 2))
        exact = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind).swapaxes(1, 2)
        assert np.array_equal(got, exact)
        assert 0 < np.abs(np.asarray(got) - want).max() < 0.05


def test_embedding_is_tied_where_there_is_no_output_matrix(tmp_path, random_params):
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = random_params(tied)
    config, found = models.from_pretrained(write(tmp_path / "m.gguf", params, tied))
    assert config.tie_embeddings
    assert_equal_trees(params, found)


def refusal(file):
    with pytest.raises(ValueError) as caught:
        models.from_pretrained(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn' is not supported"),
        ({"expert_count": 8}, "field llama.expert_count=8 is not supported"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count=4 is not supported, only 8 is"),
        ({"vocab_size": 47}, "llama.vocab_size=47 is not supported, only 48 is"),
        ({"feed_forward_length": 63}, "weight 'blk.0.ffn_down.weight' must be (32, 63)"),
        ({"block_count": 3}, "weight 'blk.2.attn_k.weight' must be (16, 32)"),
        ({"block_count": 1}, "weight 'blk.1.attn_k.weight' (16, 32) has no place"),
    ],
)
def test_what_does_not_fit_is_refused(params, tmp_path, fields, message):
    assert message in refusal(write(tmp_path / "model.gguf", params, **fields))


def test_files_that_are_none_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    assert "model.gguf is not there" in refusal(file)
    file.write_bytes(b"no such thing")
    assert "cannot be read as GGUF" in refusal(file)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "general.architecture='qwen2' is not supported in GGUF files" in refusal(file)


def test_says_how_to_install_the_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'rljax[gguf]'" in refusal(file)
