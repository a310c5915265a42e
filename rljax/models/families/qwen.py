"""Qwen 2 and 3, dense and mixtures of experts (arXiv:2407.10671, arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljax.models.config import Dense, Experts, ModelConfig, Router
from rljax.models.families.common import (
    Family,
    attentions,
    count_experts,
    dense_layers,
    mixture_of,
    read_attention,
    read_decoder,
    write_decoder,
)
from rljax.models.families.names import ATTENTION, BIASES, DECODER, EXPERTS, MLP
from rljax.models.families.windows import (
    FULL,
    SLIDING,
    read_windows,
    switchable_window,
    write_windows,
)
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, linear, vector


def _late(f: Fields) -> Callable[[int], bool]:
    first = f.get("max_window_layers", 28)
    return lambda layer: layer >= first


def _sparse(f: Fields, mixture: Experts) -> Callable[[int], Dense | Experts]:
    """Which layers are mixtures, in the families of Qwen."""
    plain = dense_layers(f)
    step, dense = f.size("decoder_sparse_step", 1), set(f.get("mlp_only_layers", []))

    def feed_forward(layer: int) -> Dense | Experts:
        sparse = layer not in dense and (layer + 1) % step == 0
        return mixture if sparse else plain(layer)

    return feed_forward


def _read_qwen2(f: Fields) -> ModelConfig:
    return read_decoder(
        f,
        "qwen2",
        read_attention(f, bias=True),
        dense_layers(f),
        windows=read_windows(f, switchable_window(f), _late(f)),
    )


def _read_qwen3(f: Fields) -> ModelConfig:
    f.assume(head_dim=128)
    return read_decoder(
        f,
        "qwen3",
        read_attention(f, qk_norm="head"),
        dense_layers(f),
        windows=read_windows(f, switchable_window(f), _late(f)),
    )


def _read_qwen2_moe(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=16, intermediate_size=5632, moe_intermediate_size=1408)
    first = f.get("max_window_layers", 28)
    mixture = Experts(
        num_experts=count_experts(f, 60),
        top_k=f.size("num_experts_per_tok", 4),
        intermediate_size=f.size("moe_intermediate_size"),
        router=Router(norm_topk_prob=bool(f.get("norm_topk_prob", False))),
        shared_size=f.size("shared_expert_intermediate_size", 5632),
        shared_gated=True,
    )
    return read_decoder(
        f,
        "qwen2_moe",
        read_attention(f, bias=bool(f.get("qkv_bias", True))),
        _sparse(f, mixture),
        windows=read_windows(
            f, switchable_window(f), lambda layer: layer % 2 == 0 and layer < first
        ),
    )


def _read_qwen3_moe(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768)
    # Here all layers slide or none does, and max_window_layers has no effect.
    window, count = switchable_window(f), f.size("num_hidden_layers")
    f.get("max_window_layers", None)
    f.must("layer_types", [SLIDING if window else FULL] * count)
    mixture = Experts(
        num_experts=count_experts(f, 128),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=f.size("moe_intermediate_size"),
        router=Router(norm_topk_prob=bool(f.get("norm_topk_prob", False))),
    )
    return read_decoder(
        f,
        "qwen3_moe",
        read_attention(f, qk_norm="head"),
        _sparse(f, mixture),
        windows=[window] * count,
    )


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    windows = write_windows(config)
    used = windows["sliding_window"] is not None
    return {**write_decoder(config), "use_sliding_window": used, **windows}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    fields = _write_qwen(config)
    del fields["attention_bias"]  # it has no such field
    return fields


def _write_sparse(config: ModelConfig) -> dict[str, Any]:
    mixture = mixture_of(config)
    dense = [i for i in range(config.num_layers) if i not in config.mixture_layers]
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": mixture.intermediate_size,
        "norm_topk_prob": mixture.router.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_qwen2(config),
        **_write_sparse(config),
        "qkv_bias": attentions(config)[0].bias,
        "shared_expert_intermediate_size": mixture_of(config).shared_size or None,
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(config), **_write_sparse(config)}


_QWEN2: Table = {**DECODER, **BIASES}

_QWEN3: Table = {
    **DECODER,
    "attention/q_norm": vector(ATTENTION + "q_norm.weight"),
    "attention/k_norm": vector(ATTENTION + "k_norm.weight"),
}

_QWEN2_MOE: Table = {
    **_QWEN2,
    **EXPERTS,
    "experts/shared/gate": linear(MLP + "shared_expert.gate_proj.weight"),
    "experts/shared/up": linear(MLP + "shared_expert.up_proj.weight"),
    "experts/shared/down": linear(MLP + "shared_expert.down_proj.weight"),
    "experts/shared_gate": linear(MLP + "shared_expert_gate.weight"),
}

QWEN2 = Family(_read_qwen2, _write_qwen2, _QWEN2, "Qwen2ForCausalLM")
QWEN2_MOE = Family(_read_qwen2_moe, _write_qwen2_moe, _QWEN2_MOE, "Qwen2MoeForCausalLM")
QWEN3 = Family(_read_qwen3, _write_qwen, _QWEN3, "Qwen3ForCausalLM")
QWEN3_MOE = Family(_read_qwen3_moe, _write_qwen3_moe, {**_QWEN3, **EXPERTS}, "Qwen3MoeForCausalLM")
