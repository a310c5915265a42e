"""OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward, q and k normed as a whole."""

from __future__ import annotations

from rljax.models.config import ModelConfig
from rljax.models.families.common import (
    Family,
    dense_layers,
    read_attention,
    read_decoder,
    write_decoder,
)
from rljax.models.families.names import ATTENTION, DECODER
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table, heads_vector, vector


def _read(f: Fields) -> ModelConfig:
    f.assume(rms_norm_eps=1e-5, max_position_embeddings=2048)
    attention = read_attention(f, qk_norm="full")
    return read_decoder(f, "olmo2", attention, dense_layers(f), norms="after")


_TABLE: Table = {
    **DECODER,
    "attention_norm": vector("model.layers.{layer}.post_attention_layernorm.weight"),
    "feed_forward_norm": vector("model.layers.{layer}.post_feedforward_layernorm.weight"),
    "attention/q_norm": heads_vector(ATTENTION + "q_norm.weight"),
    "attention/k_norm": heads_vector(ATTENTION + "k_norm.weight"),
}

FAMILY = Family(_read, write_decoder, _TABLE, "Olmo2ForCausalLM")
