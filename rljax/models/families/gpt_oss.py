"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

from rljax.errors import InputError
from rljax.models.config import Experts, ModelConfig, Router
from rljax.models.experts import CLAMP, GAIN
from rljax.models.families.common import (
    Family,
    attentions,
    count_experts,
    read_attention,
    read_decoder,
)
from rljax.models.families.mixtral import write_mixtral
from rljax.models.families.names import ATTENTION, BIASES, DECODER, MLP
from rljax.models.families.windows import read_windows, write_windows
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, all_experts, linear, vector


def _read_gpt_oss(f: Fields) -> ModelConfig:
    if "rope_scaling" not in f and "rope_parameters" not in f:
        raise InputError(f"{f.where} has neither rope_parameters nor rope_scaling; give one")
    f.assume(num_key_value_heads=8, head_dim=64, rope_theta=150_000.0, rms_norm_eps=1e-5)
    f.must("swiglu_limit", CLAMP)
    f.must("swiglu_alpha", GAIN)
    f.get("initial_context_length", None)  # the rotary parameters repeat it
    top_k = f.size("num_experts_per_tok", 4)
    f.must("experts_per_token", top_k)
    mixture = Experts(
        num_experts=count_experts(f, 128),
        top_k=top_k,
        intermediate_size=f.size("intermediate_size", 2880),
        router=Router(bias=True),
        bias=True,
        activation="clamped",
    )
    bias = bool(f.get("attention_bias", True))
    window = f.size("sliding_window", 128)
    return read_decoder(
        f,
        "gpt_oss",
        read_attention(f, bias=bias, output_bias=bias, sinks=True),
        lambda layer: mixture,
        windows=read_windows(f, window, lambda layer: layer % 2 == 0),
    )


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    fields = {**write_mixtral(config), **write_windows(config)}
    fields["sliding_window"] = fields["sliding_window"] or 128  # it must be a number
    if fields["rope_scaling"] is None:  # an absent field means YaRN here
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    fields["attention_bias"] = attentions(config)[0].output_bias
    return fields


_TABLE: Table = {
    **DECODER,
    **BIASES,
    "attention/o_bias": vector(ATTENTION + "o_proj.bias"),
    "attention/sinks": vector(ATTENTION + "sinks"),
    "experts/router": linear(MLP + "router.weight"),
    "experts/router_bias": vector(MLP + "router.bias"),
    "experts/gate": all_experts(MLP + "experts.gate_up_proj", 3, part=0, parts=2),
    "experts/up": all_experts(MLP + "experts.gate_up_proj", 3, part=1, parts=2),
    "experts/down": all_experts(MLP + "experts.down_proj", 3),
    "experts/gate_bias": all_experts(MLP + "experts.gate_up_proj_bias", 2, part=0, parts=2),
    "experts/up_bias": all_experts(MLP + "experts.gate_up_proj_bias", 2, part=1, parts=2),
    "experts/down_bias": all_experts(MLP + "experts.down_proj_bias", 2),
}

FAMILY = Family(_read_gpt_oss, _write_gpt_oss, _TABLE, "GptOssForCausalLM")
