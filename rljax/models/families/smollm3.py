"""SmolLM3: llama, with every fourth layer's attention not rotated (transformers `smollm3`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from rljax.errors import InputError
from rljax.models.config import Block, ModelConfig
from rljax.models.families.common import (
    Family,
    assemble,
    attentions,
    dense_layers,
    read_attention,
    write_decoder,
)
from rljax.models.families.names import ATTENTION, BIASES, DECODER
from rljax.models.families.rope import write_scaling
from rljax.models.families.windows import read_windows, switchable_window, write_windows
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, vector


def _read(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True)
    count, interval = f.size("num_hidden_layers"), f.size("no_rope_layer_interval", 4)
    rotated = f.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)])
    if len(rotated) < count:
        raise InputError(
            f"{f.where}: no_rope_layers has {len(rotated)} entries, num_hidden_layers={count}; "
            "give 1 or 0 for each layer"
        )
    bias = bool(f.get("attention_bias", False))
    plain = read_attention(f, bias=bias, output_bias=bias)
    unrotated = dataclasses.replace(plain, rope_theta=None, rope_scaling=None)
    windows = read_windows(f, switchable_window(f), lambda layer: not rotated[layer])
    dense = dense_layers(f)
    layers = [
        Block(dataclasses.replace(plain if rotated[i] else unrotated, window=window), dense(i))
        for i, window in enumerate(windows)
    ]
    return assemble(f, "smollm3", layers, attention_bias=bias)


def _write(config: ModelConfig) -> dict[str, Any]:
    layers, windows = attentions(config), write_windows(config)
    rotated = next((a for a in layers if a.rope_theta is not None), layers[0])
    return {
        **write_decoder(config),
        "attention_bias": layers[0].output_bias,
        "rope_theta": rotated.rope_theta,
        "rope_scaling": write_scaling(rotated.rope_scaling),
        "no_rope_layers": [int(a.rope_theta is not None) for a in layers],
        "use_sliding_window": windows["sliding_window"] is not None,
        **windows,
    }


_TABLE: Table = {**DECODER, **BIASES, "attention/o_bias": vector(ATTENTION + "o_proj.bias")}

FAMILY = Family(_read, _write, _TABLE, "SmolLM3ForCausalLM")
