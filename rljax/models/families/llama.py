"""Llama 3 (arXiv:2407.21783)."""

from __future__ import annotations

from typing import Any

from rljax.models.config import ModelConfig
from rljax.models.families.common import (
    Family,
    dense_layers,
    read_attention,
    read_decoder,
    write_decoder,
)
from rljax.models.families.names import DECODER
from rljax.models.files.fields import Fields


def _read_llama(f: Fields) -> ModelConfig:
    return read_decoder(f, "llama", read_attention(f), dense_layers(f))


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**write_decoder(config), "mlp_bias": False}


FAMILY = Family(_read_llama, _write_llama, DECODER, "LlamaForCausalLM")
