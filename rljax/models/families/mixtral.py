"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from rljax.models.config import Experts, ModelConfig
from rljax.models.families.common import (
    Family,
    attentions,
    count_experts,
    mixture_of,
    read_attention,
    read_decoder,
    write_decoder,
)
from rljax.models.families.names import DECODER
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, linear


def _read_mixtral(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
    window = f.size("sliding_window") if "sliding_window" in f else None
    mixture = Experts(
        num_experts=count_experts(f, 8),
        top_k=f.size("num_experts_per_tok", 2),
        intermediate_size=f.size("intermediate_size", 14_336),
    )
    return read_decoder(
        f,
        "mixtral",
        read_attention(f),
        lambda layer: mixture,
        windows=[window] * f.size("num_hidden_layers"),
    )


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration; gpt-oss has the same names."""
    mixture = mixture_of(config)
    return {
        **write_decoder(config),
        "intermediate_size": mixture.intermediate_size,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "sliding_window": attentions(config)[0].window,
    }


_BLOCK_SPARSE = "model.layers.{layer}.block_sparse_moe."

_TABLE: Table = {
    **DECODER,
    "experts/router": linear(_BLOCK_SPARSE + "gate.weight"),
    "experts/gate": linear(_BLOCK_SPARSE + "experts.{expert}.w1.weight"),
    "experts/up": linear(_BLOCK_SPARSE + "experts.{expert}.w3.weight"),
    "experts/down": linear(_BLOCK_SPARSE + "experts.{expert}.w2.weight"),
}

FAMILY = Family(_read_mixtral, write_mixtral, _TABLE, "MixtralForCausalLM")
