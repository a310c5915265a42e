"""Every family against transformers: logits and gradients of tiny random models."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import models
from rljax.models import families
from rljax.models.files import weights
from rljax.models.rope import rope_frequencies

sys.path.insert(0, str(Path(__file__).parent))
from golden import GOLDEN, MODELS

# Those whose gradients are compared too: one kind each of attention and of feed-forward.
GRADIENTS = [
    "smollm3_window",
    "olmo2",
    "qwen2",
    "qwen3_moe_mixed",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
]
WIDTH = 24


def lay_out(rows, side):
    """One row each, padded on a side with ids that are anything but neutral."""
    tokens = np.random.default_rng(1).integers(0, 48, (len(rows), WIDTH))
    positions, segments = np.full_like(tokens, 7), np.zeros_like(tokens)
    for i, row in enumerate(rows):
        n = len(row["tokens"])
        at = slice(0, n) if side == "right" else slice(WIDTH - n, WIDTH)
        tokens[i, at], positions[i, at], segments[i, at] = row["tokens"], row["positions"], 1
    return tokens, positions, segments


def pack(rows):
    """The first three fill a row, the fourth stands in another after two of padding."""
    tokens, positions, segments = lay_out([{"tokens": [], "positions": []}] * 2, "right")
    at = 0
    for s, row in enumerate(rows[:3], start=1):
        part = slice(at, at + len(row["tokens"]))
        tokens[0, part], positions[0, part], segments[0, part] = (
            row["tokens"],
            row["positions"],
            s,
        )
        at = part.stop
    part = slice(2, 2 + len(rows[3]["tokens"]))
    tokens[1, part], positions[1, part], segments[1, part] = (
        rows[3]["tokens"],
        rows[3]["positions"],
        4,
    )
    return tokens, positions, segments


@functools.cache
def run(name):
    """The model's expected values and ours, from one compilation; it is what costs time."""
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    config, params = models.from_pretrained(folder)
    rows = expected["rows"]
    layouts = [lay_out(rows, "right"), lay_out(rows, "left"), pack(rows)]
    tokens, positions, segments = (
        jnp.asarray(np.concatenate(x)) for x in zip(*layouts, strict=True)
    )

    def loss(params):
        # Eight rows of single sequences, then the two packed ones, which alone are scored.
        logp, _ = models.token_logprobs(params, config, tokens[8:], positions[8:], segments[8:])
        return -logp.sum(), models.logits(params, config, tokens, positions, segments)

    gradients = None
    if name in GRADIENTS:
        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    else:
        logits = jax.jit(lambda p: models.logits(p, config, tokens, positions, segments))(params)
    return config, expected, np.asarray(logits), gradients, np.asarray(segments)


def worst(expected, found):
    return max(np.abs(np.asarray(e) - f).max() for e, f in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_with_padding_on_either_side(name):
    _, expected, logits, _, segments = run(name)
    for rows in (slice(0, 4), slice(4, 8)):
        found = [x[s > 0] for x, s in zip(logits[rows], segments[rows], strict=True)]
        assert worst(expected["logits"], found) < 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_packed_rows_equal_transformers(name):
    _, expected, logits, _, segments = run(name)
    found = [logits[8:][segments[8:] == s] for s in (1, 2, 3, 4)]
    assert worst(expected["logits"], found) < 2e-5


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_torch(name):
    config, expected, _, gradients, _ = run(name)
    entries = weights.entries(config, families.FAMILIES[config.family].table)
    found = {
        stored: [np.linalg.norm(g.ravel()), g.ravel() @ np.cos(np.arange(g.size))]
        for stored, g in weights.stored(entries, jax.tree.map(np.float64, gradients))
    }
    assert found.keys() == expected["gradients"].keys()
    for stored, want in expected["gradients"].items():
        assert found[stored] == pytest.approx(want, abs=2e-5 * max(want[0], 1)), stored


@pytest.mark.parametrize("family", json.loads((GOLDEN / "names.json").read_text()))
def test_names_and_shapes_are_those_transformers_saves(family):
    fields = {
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
    }
    if family in ("qwen2_moe", "qwen3_moe"):
        fields["moe_intermediate_size"] = 16
    if family == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = 16
    if family in ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss"):
        fields |= {"num_experts": 4, "num_experts_per_tok": 2}
    if family == "deepseek_v3":
        fields |= {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        }
    config = families.read_fields(fields, "config.json")
    found = {
        entry.name(i).replace("experts.3.", "experts.{e}."): entry.weight.stored_shape(entry.inner)
        for entry in weights.entries(config, families.FAMILIES[family].table)
        for i in entry.pieces()
        if entry.experts is None or i[1] == 3
    }
    saved = json.loads((GOLDEN / "names.json").read_text())[family]
    assert found == {name: tuple(shape) for name, shape in saved.items()}


@pytest.mark.parametrize("case", json.loads((GOLDEN / "yarn.json").read_text()))
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_yarn_is_read_and_written_as_transformers_computes_it(case, field):
    fields = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    fields |= {"head_dim": 32, "max_position_embeddings": 256, "rope_parameters": None}
    rope = dict(case["fields"])
    if field == "rope_scaling":  # as transformers 4 wrote it
        fields["rope_theta"], rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    config = families.read_fields({**fields, field: rope}, "config.json")
    for found in (config, families.read_fields(families.write_fields(config), "config.json")):
        attention = found.layers[0].attention
        scaling = attention.rope_scaling
        got = rope_frequencies(32, attention.rope_theta, scaling)
        np.testing.assert_allclose(got, case["frequencies"], rtol=2e-6)
        assert scaling.magnitude == pytest.approx(case["magnitude"], rel=1e-7)
