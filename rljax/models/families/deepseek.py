"""DeepSeek-V3 (arXiv:2412.19437), without its layers of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljax.errors import InputError
from rljax.models.config import Block, Experts, LatentAttention, ModelConfig, Router
from rljax.models.families.common import (
    Family,
    assemble,
    count_experts,
    dense_layers,
    mixture_of,
    write_any,
)
from rljax.models.families.names import ATTENTION, DECODER, EXPERTS, MLP
from rljax.models.families.rope import read_rope, rope_fields
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, linear, to_heads, vector

# How many layers follow the model's own to predict further tokens, in either of two names.
_PREDICTIONS = "num_nextn_predict_layers", "num_mtp_layers"


def _read_deepseek_v3(f: Fields) -> ModelConfig:
    f.assume(intermediate_size=18_432, max_position_embeddings=4096)
    heads, rope_dim = f.size("num_attention_heads"), f.size("qk_rope_head_dim", 64)
    theta, scaling = read_rope(f)
    attention = LatentAttention(
        num_heads=heads,
        q_rank=None if f.is_null("q_lora_rank") else f.size("q_lora_rank", 1536),
        kv_rank=f.size("kv_lora_rank", 512),
        nope_dim=f.size("qk_nope_head_dim", 128),
        rope_dim=rope_dim,
        value_dim=f.size("v_head_dim", 128),
        rope_theta=theta,
        rope_scaling=scaling,
        scale_weight=float(rope_fields(f).get("mscale_all_dim", 0.0)),
    )
    size = f.size("moe_intermediate_size", 2048)
    mixture = Experts(
        num_experts=count_experts(f, 256, "n_routed_experts"),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=size,
        router=Router(
            norm_topk_prob=bool(f.get("norm_topk_prob", True)),
            scoring="sigmoid",
            groups=f.size("n_group", 8),
            top_groups=f.size("topk_group", 4),
            scale=f.number("routed_scaling_factor", 2.5),
            correction_bias=True,
        ),
        shared_size=size * f.size("n_shared_experts", 1),
    )
    for name, value in {
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "qk_head_dim": attention.nope_dim + rope_dim,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }.items():
        f.must(name, value)
    for name in (*_PREDICTIONS, "ep_size", "aux_loss_alpha", "seq_aux"):
        f.get(name, None)  # of training and of layers that are left out
    plain, dense = dense_layers(f), f.get("first_k_dense_replace", 3)
    layers = [
        Block(attention, plain(i) if i < dense else mixture)
        for i in range(f.size("num_hidden_layers"))
    ]
    return assemble(f, "deepseek_v3", layers)


def _unused(values: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """How the names of weights of layers for multi-token prediction begin."""
    count = next((values[name] for name in _PREDICTIONS if values.get(name)), 0)
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(count))


def _write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    attention, mixture = config.layers[0].attention, mixture_of(config)
    if not isinstance(attention, LatentAttention):
        raise InputError(f"family 'deepseek_v3' cannot express {attention}; use another family")
    fields = write_any(config)
    if attention.scale_weight:
        fields["rope_scaling"]["mscale_all_dim"] = attention.scale_weight
    return {
        **fields,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": True,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": mixture.intermediate_size,
        "norm_topk_prob": mixture.router.norm_topk_prob,
        "n_group": mixture.router.groups,
        "topk_group": mixture.router.top_groups,
        "routed_scaling_factor": mixture.router.scale,
        "n_shared_experts": mixture.shared_size // mixture.intermediate_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": config.mixture_layers[0],
        "num_nextn_predict_layers": 0,
    }


_TABLE: Table = {
    **DECODER,
    **EXPERTS,
    "attention/q": to_heads(ATTENTION + "q_proj.weight", interleaved=True),
    "attention/q_up": to_heads(ATTENTION + "q_b_proj.weight", interleaved=True),
    "attention/q_down": linear(ATTENTION + "q_a_proj.weight"),
    "attention/q_norm": vector(ATTENTION + "q_a_layernorm.weight"),
    "attention/kv_down": linear(ATTENTION + "kv_a_proj_with_mqa.weight", interleaved=True),
    "attention/kv_norm": vector(ATTENTION + "kv_a_layernorm.weight"),
    "attention/kv_up": to_heads(ATTENTION + "kv_b_proj.weight"),
    "experts/correction": vector(MLP + "gate.e_score_correction_bias"),
    "experts/shared/gate": linear(MLP + "shared_experts.gate_proj.weight"),
    "experts/shared/up": linear(MLP + "shared_experts.up_proj.weight"),
    "experts/shared/down": linear(MLP + "shared_experts.down_proj.weight"),
}

FAMILY = Family(_read_deepseek_v3, _write_deepseek_v3, _TABLE, "DeepseekV3ForCausalLM", _unused)
