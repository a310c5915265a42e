"""GGUF files: what llama.cpp's converter would write is read back as it was."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.models import families
from rljax.models.files import weights

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


def configuration(family, **fields):
    shared = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 64,
        "rope_theta": 5e4,
        "norm_eps": 1e-5,
        "qk_norm": None,
        "tie_embeddings": False,
        "max_positions": 256,
    }
    return models.decoder(**(shared | fields), family=family)


CONFIG = configuration("llama")
QWEN2 = configuration("qwen2", bias=True)
QWEN3 = configuration("qwen3", qk_norm="head", head_dim=16)


def write(file, params, config=CONFIG, kind=None, **fields):
    """Writes a GGUF file as the converter does, by the package's own names for weights."""
    attention, family = config.layers[0].attention, config.family
    out = gguf.GGUFWriter(file, family)
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 64,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
    }
    if family == "llama":
        values |= {"rope.dimension_count": attention.head_dim, "vocab_size": config.vocab_size}
    if family == "qwen3":
        values |= {"attention.key_length": 16, "attention.value_length": 16}
    for name, value in (values | {k: v for k, v in fields.items() if isinstance(v, int)}).items():
        out.add_uint32(f"{family}.{name}", value)
    out.add_float32(f"{family}.rope.freq_base", attention.rope_theta)
    out.add_float32(f"{family}.attention.layer_norm_rms_epsilon", config.norm_eps)
    out.add_string("tokenizer.ggml.model", "gpt2")
    for name, value in fields.items():
        if isinstance(value, str):
            out.add_string(f"{family}.{name}", value)
    there = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_layers)
    for name, array in weights.stored(
        weights.entries(config, families.FAMILIES[family].table), params
    ):
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Of llama alone the converter lets rotary pairs stand side by side.
            d = attention.head_dim
            array = (
                array.reshape(-1, 2, d // 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
            )
        name = there.get_name(name, (".weight", ".bias"))
        if kind is None or array.ndim == 1:
            out.add_tensor(name, array)
        else:
            out.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
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
    assert (config.vocab_size, config.hidden_size, config.max_positions) == (48, 32, 256)
    assert config.family == "llama"
    assert_equal_trees(params, found)


def test_reads_onto_a_mesh(file, params):
    mesh = meshes.make(fsdp=4, tensor=2)
    assert_equal_trees(params, models.from_pretrained(file, mesh=mesh)[1])


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_reads_what_a_hugging_face_folder_says(config, tmp_path, random_params):
    params = random_params(config)
    models.save_pretrained(tmp_path / "folder", config, params)
    want, expected = models.from_pretrained(tmp_path / "folder")
    got, found = models.from_pretrained(write(tmp_path / "model.gguf", params, config))
    assert dataclasses.replace(got, norm_eps=want.norm_eps) == want
    assert got.norm_eps == pytest.approx(want.norm_eps)  # float32 in the file
    assert_equal_trees(expected, found)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        *((CONFIG, kind) for kind in ("F16", "BF16", "Q8_0", "Q4_1")),
        *((config, kind) for config in (QWEN2, QWEN3) for kind in ("F16", "BF16", "Q8_0")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_dequantises(tmp_path, random_params, config, kind):
    params = random_params(config)
    kind = gguf.GGMLQuantizationType[kind]
    _, found = models.from_pretrained(
        write(tmp_path / "model.gguf", params, config, kind), mesh=meshes.make(fsdp=8)
    )
    for name in ("gate", "down"):
        want = params["stacks"][0][0]["feed_forward"][name]
        got = found["stacks"][0][0]["feed_forward"][name]
        stored = np.ascontiguousarray(np.asarray(want).swapaxes(1, 2))
        exact = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind).swapaxes(1, 2)
        assert np.array_equal(got, exact)
        assert 0 < np.abs(np.asarray(got) - want).max() < 0.05
    for name, got in found["stacks"][0][0]["attention"].items():
        want = params["stacks"][0][0]["attention"][name]
        matrix = name in ("q", "k", "v", "o")  # biases and norms are never quantised
        assert matrix != np.array_equal(got, want)
        np.testing.assert_allclose(got, want, atol=0.05)


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
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = "general.architecture='qwen3moe' is not supported in GGUF files, only llama, qwen2, "
    assert message + "qwen3 are" in refusal(file)


def test_says_how_to_install_the_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'rljax[gguf]'" in refusal(file)
