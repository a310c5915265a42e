"""Names of weights that several families share."""

from __future__ import annotations

from rljax.models.files.tables import (
    Table,
    from_heads,
    heads_vector,
    linear,
    rows,
    to_heads,
    vector,
)

ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."

DECODER: Table = {
    "embed": rows("model.embed_tokens.weight"),
    "norm": vector("model.norm.weight"),
    "output": linear("lm_head.weight"),
    "attention_norm": vector("model.layers.{layer}.input_layernorm.weight"),
    "attention/q": to_heads(ATTENTION + "q_proj.weight"),
    "attention/k": to_heads(ATTENTION + "k_proj.weight"),
    "attention/v": to_heads(ATTENTION + "v_proj.weight"),
    "attention/o": from_heads(ATTENTION + "o_proj.weight"),
    "feed_forward_norm": vector("model.layers.{layer}.post_attention_layernorm.weight"),
    "dense/gate": linear(MLP + "gate_proj.weight"),
    "dense/up": linear(MLP + "up_proj.weight"),
    "dense/down": linear(MLP + "down_proj.weight"),
}

BIASES: Table = {
    "attention/q_bias": heads_vector(ATTENTION + "q_proj.bias"),
    "attention/k_bias": heads_vector(ATTENTION + "k_proj.bias"),
    "attention/v_bias": heads_vector(ATTENTION + "v_proj.bias"),
}

EXPERTS: Table = {
    "experts/router": linear(MLP + "gate.weight"),
    "experts/gate": linear(MLP + "experts.{expert}.gate_proj.weight"),
    "experts/up": linear(MLP + "experts.{expert}.up_proj.weight"),
    "experts/down": linear(MLP + "experts.{expert}.down_proj.weight"),
}
