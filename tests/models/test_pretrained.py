"""Weight files: what is read is what was written, and what does not fit is refused by name."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax import mesh as meshes
from rljax import models
from rljax.models import families
from rljax.models.files import huggingface, tables

sys.path.insert(0, str(Path(__file__).parent))
from golden import GOLDEN, MODELS


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert np.array_equal(np.asarray(x), np.asarray(y)), path


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden model that a test may spoil."""
    return Path(shutil.copytree(GOLDEN / "qwen3", tmp_path / "model"))


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_weights(folder, change):
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


def refusal(folder):
    with pytest.raises(ValueError) as caught:
        models.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_saved_and_read_again_is_bit_equal(name, tmp_path):
    for dtype in (jnp.float32, jnp.bfloat16):
        config, params = models.from_pretrained(GOLDEN / name, dtype=dtype)
        assert all(x.dtype == dtype for x in jax.tree.leaves(params))
        models.check(params, config)
        models.save_pretrained(tmp_path / str(dtype.__name__), config, params)
        again, back = models.from_pretrained(tmp_path / str(dtype.__name__), dtype=dtype)
        assert again == config
        assert_equal_trees(params, back)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]
)
def test_saves_the_weights_that_it_read(name, tmp_path):
    config, params = models.from_pretrained(GOLDEN / name, dtype=jnp.bfloat16)
    models.save_pretrained(tmp_path, config, params)
    want = load_file(GOLDEN / name / "model.safetensors")
    got = load_file(tmp_path / "model.safetensors")
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[k], got[k]) and want[k].dtype == got[k].dtype for k in want)


def test_layers_of_multi_token_prediction_are_left_out_and_said_to_be(tmp_path, caplog):
    folder = Path(shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "model"))
    last, further = "model.layers.2.input_layernorm.weight", "model.layers.3.eh_proj.weight"
    edit_weights(folder, lambda a: a.update({further: a[last]}))
    with caplog.at_level("INFO", logger="rljax"):
        config, params = models.from_pretrained(folder)
    assert "1 weights of multi-token prediction (model.layers.3.*) are left out" in caplog.text
    assert_equal_trees(params, models.from_pretrained(GOLDEN / "deepseek_v3")[1])
    models.save_pretrained(tmp_path / "saved", config, params)
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 0
    # Where the configuration announces none, they are surplus.
    edit_config(folder, num_nextn_predict_layers=0)
    assert f"weight {further!r} (32,) has no place" in refusal(folder)


def test_large_models_are_saved_in_several_files(tmp_path):
    config, params = models.from_pretrained(GOLDEN / "qwen3")
    models.save_pretrained(tmp_path, config, params, shard_bytes=20_000)
    index = json.loads((tmp_path / huggingface.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 4 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / f).stat().st_size < 22_000 for f in files)
    assert_equal_trees(params, models.from_pretrained(tmp_path)[1])

    # Saved over by one that fits into one file: nothing of the old is left to be read.
    models.save_pretrained(tmp_path, config, params)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal_trees(params, models.from_pretrained(tmp_path)[1])


def test_a_broken_off_save_is_refused(tmp_path, monkeypatch):
    config, params = models.from_pretrained(GOLDEN / "qwen3")
    models.save_pretrained(tmp_path, config, params)

    def fails(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(huggingface, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        models.save_pretrained(tmp_path, config, params)
    assert "config.json is not there" in refusal(tmp_path)


def test_extra_fields_are_written(tmp_path):
    config, params = models.from_pretrained(GOLDEN / "qwen3")
    models.save_pretrained(tmp_path, config, params, extra={"eos_token_id": [1, 2]})
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {"data": 2, "fsdp": 4}),
        ("qwen3_moe", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("gpt_oss", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("deepseek_v3", {"expert": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_read_onto_a_mesh(name, sizes):
    mesh = meshes.make(**sizes)
    config, params = models.from_pretrained(GOLDEN / name, mesh=mesh)
    assert_equal_trees(params, models.from_pretrained(GOLDEN / name)[1])
    wanted = models.shardings(config, mesh)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, params, wanted)))


def test_a_process_reads_only_what_it_holds(monkeypatch):
    # As one of four hosts would: three quarters of the devices are not this process's.
    mesh = meshes.make(expert=2, fsdp=4)
    mine = set(mesh.devices[0, 0, 2:, 1].ravel())  # stage, data, fsdp, expert
    read = {}
    plain = huggingface.Folder.read

    def spy(self, name, cut):
        assert name not in read
        read[name] = cut
        return plain(self, name, cut)

    sharding = type(
        models.shardings(models.from_pretrained(GOLDEN / "qwen3_moe")[0], mesh)["embed"]
    )
    every = sharding.addressable_devices_indices_map
    monkeypatch.setattr(huggingface.Folder, "read", spy)
    monkeypatch.setattr(
        sharding,
        "addressable_devices_indices_map",
        lambda self, shape: {d: i for d, i in every(self, shape).items() if d in mine},
    )
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, s, f: jnp.zeros(shape))
    models.from_pretrained(GOLDEN / "qwen3_moe", mesh=mesh)
    experts = {n.split("experts.")[1][0] for n in read if ".experts." in n}
    assert experts == {"2", "3"}
    cut = read["model.layers.0.mlp.experts.2.gate_proj.weight"]
    assert cut == (slice(0, 12), slice(16, 32))


def test_every_weight_is_read_once(monkeypatch):
    read = []
    plain = huggingface.Folder.read
    monkeypatch.setattr(
        huggingface.Folder,
        "read",
        lambda self, name, cut: (read.append(name), plain(self, name, cut))[1],
    )
    models.from_pretrained(GOLDEN / "qwen3_moe", mesh=meshes.make(data=2, fsdp=4))
    assert sorted(read) == sorted(load_file(GOLDEN / "qwen3_moe" / "model.safetensors"))


PROCESS = """
import sys, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from rljax import mesh, models
config, params = models.from_pretrained(sys.argv[3], mesh=mesh.make(expert=2, fsdp=2))
models.save_pretrained(sys.argv[4], config, params, shard_bytes=20_000)
"""


def test_two_processes_read_and_write_one_model(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    source, target = GOLDEN / "qwen3_moe", tmp_path / "saved"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), str(source), str(target)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert_equal_trees(models.from_pretrained(target)[1], models.from_pretrained(source)[1])


def test_compute_dtype():
    for dtype, compute, want in [
        (jnp.float32, None, "float32"),
        (jnp.float32, "bfloat16", "bfloat16"),
        (jnp.bfloat16, None, "bfloat16"),
        (jnp.bfloat16, "float32", "float32"),
    ]:
        config, _ = models.from_pretrained(GOLDEN / "qwen3", dtype=dtype, compute_dtype=compute)
        assert config.dtype == want
    with pytest.raises(ValueError, match="dtype=int32 of parameters must be a float"):
        models.from_pretrained(GOLDEN / "qwen3", dtype=jnp.int32)


# What does not fit.


def test_missing_surplus_and_misshapen_weights_are_refused(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    keep = (folder / "model.safetensors").read_bytes()

    edit_weights(folder, lambda a: a.pop(name))
    assert f"weight {name!r} must be (40, 32)" in (text := refusal(folder))
    assert "got no such weight" in text

    (folder / "model.safetensors").write_bytes(keep)
    edit_weights(folder, lambda a: a.update({name: a[name][:, :-1].copy()}))
    assert f"weight {name!r} must be (40, 32) by the configuration, got (40, 31)" in refusal(folder)

    (folder / "model.safetensors").write_bytes(keep)
    extra = "model.layers.2.mlp.up_proj.weight"
    edit_weights(folder, lambda a: a.update({extra: a[name].copy()}))
    assert f"weight {extra!r} (40, 32) has no place" in refusal(folder)


def test_rotary_buffers_and_a_tied_output_matrix_may_be_there(folder):
    edit_weights(
        folder,
        lambda a: a.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32),
                "lm_head.weight": a["model.embed_tokens.weight"].copy(),
            }
        ),
    )
    assert_equal_trees(
        models.from_pretrained(folder)[1], models.from_pretrained(GOLDEN / "qwen3")[1]
    )
    # transformers would not tie these two, whatever the configuration.
    edit_weights(folder, lambda a: a.update({"lm_head.weight": a["lm_head.weight"] + 1}))
    assert "tie_word_embeddings is true but 'lm_head.weight' differs" in refusal(folder)


def test_folders_that_are_no_models_are_refused(folder, tmp_path):
    assert "is not there; give a folder" in refusal(tmp_path / "nowhere")
    (folder / "config.json").rename(folder / "elsewhere.json")
    assert "config.json is not there" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(folder)
    (folder / "elsewhere.json").rename(folder / "config.json")

    (folder / "model.safetensors").write_bytes(b"12345678 not weights")
    assert "cannot be read as safetensors" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors and no model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "found pytorch_model.bin: save it again as safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").rename(folder / "x.gguf")
    assert "give the path of the .gguf file itself" in refusal(folder)
    (folder / "model-00001-of-00002.safetensors").touch()
    assert (
        "has model-00001-of-00002.safetensors but no model.safetensors.index.json, which names the "
        "file of each weight; fetch it too" in refusal(folder)
    )
    (folder / "model-00001-of-00002.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / huggingface.INDEX).write_text(json.dumps(index))
    assert "names 'model-00001-of-00002.safetensors', which is not there" in refusal(folder)


def test_a_weight_is_read_from_the_file_that_the_index_names(folder):
    _, want = models.from_pretrained(folder)
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stale = {"model.norm.weight": arrays["model.norm.weight"] + 1}
    first = {"model.norm.weight": arrays.pop("model.norm.weight")}
    # The second file, read last, holds an older copy of the first one's weight.
    save_file(first, folder / "a.safetensors")
    save_file({**arrays, **stale}, folder / "b.safetensors")
    weight_map = {**dict.fromkeys(arrays, "b.safetensors"), "model.norm.weight": "a.safetensors"}
    (folder / huggingface.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_equal_trees(models.from_pretrained(folder)[1], want)


def test_weights_that_are_no_floats_are_refused(folder):
    edit_weights(
        folder, lambda a: a.update({"model.norm.weight": a["model.norm.weight"].astype(np.int8)})
    )
    assert "weight 'model.norm.weight' is stored as I8" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3_text"}, "model_type='gemma3_text' is not supported"),
        ({"model_type": None}, "has no field 'model_type'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"use_sliding_window": True}, "has no field 'sliding_window'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds 'sliding_attention', but no sliding window is set",
        ),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types holds 'chunked_attention', which is not supported",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers=2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supp"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type='longrope' is not supported, only 'default', 'llama3' and 'yarn' are",
        ),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 16}}, "rope_type='yarn' needs 'factor'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_mid": 2}},
            "field beta_mid=2 is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported, only 1.0",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config (quant_method='mxfp4') is not supported; save the model deq",
        ),
        ({"logit_scale": 2.0}, "field logit_scale=2.0 is not supported"),
        ({"hidden_size": None}, "has no field 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a positive integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive number"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ],
)
def test_configurations_that_are_not_supported_are_refused_by_name(folder, fields, message):
    edit_config(folder, **fields)
    text = refusal(folder)
    assert message in text and "config.json" in text


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported, only None is"),
        ("olmoe", {"head_dim": 16}, "head_dim=16 is not supported, only 8 is"),
        ("olmoe", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "field router_jitter_noise=0.1 is not supported"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0 must be a positive integer"),
        ("qwen2_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size=-1 must be a positive"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "is not supported, only ['full"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported, only 7.0 is"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported, only 1.702 is"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token=3 is not supported, only 2 is"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported"),
        ("deepseek_v3", {"n_group": 3}, "groups=3 must cut num_experts=8 into equal groups"),
        ("deepseek_v3", {"topk_group": 1}, "top_groups=1 of 4 groups of 2 must hold top_k=3"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config (quant_method='fp8') is not supported; save the model dequant",
        ),
        (
            "smollm3",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers has 2 entries, num_hidden_layers=4",
        ),
        ("olmo2", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("gpt_oss", {"rope_parameters": None}, "has neither rope_parameters nor rope_scaling"),
    ],
)
def test_what_a_mixture_family_lacks_is_refused_by_name(name, fields, message, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "model"))
    edit_config(folder, **fields)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("qwen2", {"max_window_layers": 2}, [None, None, 8, 8]),
        ("qwen3", {"max_window_layers": 4}, [None] * 4),
        ("qwen3", {"use_sliding_window": False}, [None] * 4),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] + ["full_attention"] * 3},
            [8, *[None] * 3],
        ),
        ("qwen3_moe", {"max_window_layers": 2}, [8] * 4),
        ("qwen2_moe", {"max_window_layers": 2}, [8, None, None, None]),
        ("mixtral", {"use_sliding_window": None}, [8] * 4),
        ("mixtral", {"use_sliding_window": None, "sliding_window": None}, [None] * 4),
        ("gpt_oss", {"use_sliding_window": None}, [8, None, 8, None]),
        ("smollm3", {}, [None, None, None, 8]),
        ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}, [8, None, 8, None]),
        ("smollm3", {"use_sliding_window": False}, [None] * 4),
        (
            "gpt_oss",
            {"use_sliding_window": None, "layer_types": ["full_attention"] * 4},
            [None] * 4,
        ),
    ],
)
def test_windows_are_those_that_transformers_sees(family, fields, windows):
    values = {
        "model_type": family,
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "rope_parameters": {"rope_type": "default"},
        "use_sliding_window": True,
        "sliding_window": 8,
        **fields,
    }
    config = families.read_fields(values, "config.json")
    again = families.read_fields(families.write_fields(config), "config.json")
    for found in (config, again):
        assert [block.attention.window for block in found.layers] == windows


def test_fields_that_say_nothing_are_accepted(folder):
    edit_config(folder, something_else=False, _name_or_path="x", auto_map={"AutoModel": "x.Y"})
    models.from_pretrained(folder)


def test_what_a_family_cannot_express_is_not_saved(tmp_path):
    def save(**changes):
        config = models.decoder(
            vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, **changes
        )
        models.save_pretrained(tmp_path, config, models.abstract(config))

    for changes, message in [
        ({"family": "llama"}, "family 'llama' cannot express layer 0"),
        ({"bias": True}, "family 'qwen3' cannot express layer 0"),
        ({"family": "qwen3_moe"}, "needs a layer with experts"),
        ({"family": "qwen3", "num_experts": 2}, "family 'qwen3' cannot express layer 0"),
        ({"family": "mixtral", "num_experts": 2}, "family 'mixtral' cannot express layer 0"),
        ({"family": "gpt_oss", "num_experts": 2}, "family 'gpt_oss' cannot express layer 0"),
        ({"family": "deepseek_v3", "num_experts": 2}, "family 'deepseek_v3' cannot express Att"),
        ({"family": "mamba"}, "model_type='mamba' is not supported"),
    ]:
        with pytest.raises(ValueError, match=message):
            save(**changes)
    latent = dataclasses.replace(models.from_pretrained(GOLDEN / "deepseek_v3")[0], family="qwen3")
    with pytest.raises(ValueError, match="family 'qwen3' cannot express latent attention"):
        models.save_pretrained(tmp_path, latent, models.abstract(latent))
    assert not list(tmp_path.iterdir())


def test_parameters_of_another_model_are_not_saved(tmp_path):
    config, params = models.from_pretrained(GOLDEN / "qwen3")
    params["norm"] = params["norm"][:-1]
    with pytest.raises(ValueError, match=r"norm.*\(32,\).*\(31,\)"):
        models.save_pretrained(tmp_path, config, params)


def test_stored_and_back_for_any_cut():
    rng = np.random.default_rng(0)
    shape = (6, 4, 8)
    array = rng.normal(size=shape)
    boxes = [
        (slice(0, 6), slice(0, 4), slice(0, 8)),
        (slice(2, 5), slice(1, 3), slice(4, 8)),
    ]
    for weight in (tables.to_heads("w"), tables.from_heads("w")):
        stored = weight.to_stored(array)
        assert stored.shape == weight.stored_shape(shape)
        for box in boxes:
            part = stored[weight.stored_slices(shape, box)]
            assert np.array_equal(weight.from_stored(part, shape, box), array[box])
    # Rotary pairs next to each other: all of a head, or its last four numbers.
    for rotary, pairs in ((None, [0, 2, 4, 6, 1, 3, 5, 7]), (4, [0, 1, 2, 3, 4, 6, 5, 7])):
        weight = dataclasses.replace(tables.to_heads("w", interleaved=True), rotary=rotary)
        stored = weight.to_stored(array)
        heads = stored.reshape(4, 8, 6)
        assert np.array_equal(heads[:, pairs].transpose(2, 0, 1), array)
        for box in boxes:
            part = stored[weight.stored_slices(shape, box)]
            assert np.array_equal(weight.from_stored(part, shape, box), array[box])
    # Two that take turns along the last dimension of one array.
    pair = array, -array
    both = [tables.all_experts("w", 3, part=i, parts=2) for i in range(2)]
    stored = np.stack([w.to_stored(x) for w, x in zip(both, pair, strict=True)], -1)
    stored = stored.reshape(both[0].stored_shape(shape))
    for weight, x in zip(both, pair, strict=True):
        for box in boxes:
            part = stored[weight.stored_slices(shape, box)]
            assert np.array_equal(weight.from_stored(part, shape, box), x[box])


def test_transformers_gets_equal_logits_from_what_is_saved(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers")
    for name in MODELS:
        config, params = models.from_pretrained(GOLDEN / name)
        models.save_pretrained(tmp_path / name, config, params, shard_bytes=30_000)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == torch.float32
        tokens = np.random.default_rng(0).integers(0, 48, (2, 9))
        with torch.no_grad():
            want = model(torch.tensor(tokens)).logits.numpy()
        got = np.asarray(models.logits(params, config, jnp.asarray(tokens)))
        print(name, "largest difference of logits to transformers:", np.abs(got - want).max())
        np.testing.assert_allclose(got, want, atol=1e-5)
