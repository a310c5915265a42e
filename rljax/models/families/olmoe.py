"""OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any

from rljax.models.config import Experts, ModelConfig, Router
from rljax.models.families.common import (
    Family,
    count_experts,
    mixture_of,
    read_attention,
    read_decoder,
    write_decoder,
)
from rljax.models.families.names import ATTENTION, DECODER, EXPERTS
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, heads_vector


def _read_olmoe(f: Fields) -> ModelConfig:
    f.assume(rms_norm_eps=1e-5, max_position_embeddings=4096)
    f.must("clip_qkv", None)
    f.must("head_dim", f.size("hidden_size") // f.size("num_attention_heads"))
    mixture = Experts(
        num_experts=count_experts(f, 64),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=f.size("intermediate_size", 2048),
        router=Router(norm_topk_prob=bool(f.get("norm_topk_prob", False))),
    )
    return read_decoder(f, "olmoe", read_attention(f, qk_norm="full"), lambda layer: mixture)


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    mixture = mixture_of(config)
    return {
        **write_decoder(config),
        "intermediate_size": mixture.intermediate_size,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": mixture.router.norm_topk_prob,
    }


_TABLE: Table = {
    **DECODER,
    **EXPERTS,
    "attention/q_norm": heads_vector(ATTENTION + "q_norm.weight"),
    "attention/k_norm": heads_vector(ATTENTION + "k_norm.weight"),
}

FAMILY = Family(_read_olmoe, _write_olmoe, _TABLE, "OlmoeForCausalLM")
