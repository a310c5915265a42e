"""What families share: how a decoder's fields are read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rljax.errors import InputError
from rljax.models.config import (
    Attention,
    Block,
    Dense,
    Experts,
    ModelConfig,
    Stack,
)
from rljax.models.families.rope import read_rope, write_scaling
from rljax.models.files.fields import Fields
from rljax.models.files.tables import Table

# Fields that must have this value, or be absent: no other is supported.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      read: Fields -> configuration.
      write: Configuration -> fields; what they cannot express is found by reading them back.
      table: Where each parameter is stored.
      architecture: The transformers class with an output matrix.
      unused: Fields, configuration -> how the names of weights begin that the fields announce and
        the model does not use.
    """

    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Table
    architecture: str
    unused: Callable[[Mapping[str, Any], ModelConfig], tuple[str, ...]] = lambda fields, config: ()


def stacks(layers: Sequence[Block]) -> tuple[Stack, ...]:
    """Groups layers so that as few as can be stand apart: one repeated pattern, or runs."""
    for period in range(1, len(layers) // 2 + 1):
        if len(layers) % period == 0:
            pattern = tuple(layers[:period])
            if pattern * (len(layers) // period) == tuple(layers):
                return (Stack(pattern, len(layers) // period),)
    out: list[Stack] = []
    for block in layers:
        if out and out[-1].pattern == (block,):
            out[-1] = Stack((block,), out[-1].repeats + 1)
        else:
            out.append(Stack((block,), 1))
    return tuple(out)


def read_attention(
    f: Fields,
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["head", "full"] | None = None,
    sinks: bool = False,
) -> Attention:
    """Grouped-query attention of all layers, without windows; arguments as in `Attention`."""
    width, heads = f.size("hidden_size"), f.size("num_attention_heads")
    theta, scaling = read_rope(f)
    return Attention(
        num_heads=heads,
        num_kv_heads=f.size("num_key_value_heads", heads),
        head_dim=f.size("head_dim", width // heads),
        bias=bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def read_decoder(
    f: Fields,
    family: str,
    attention: Attention,
    feed_forward: Callable[[int], Dense | Experts],
    windows: Sequence[int | None] | None = None,
    norms: Literal["before", "after"] = "before",
) -> ModelConfig:
    """A decoder whose layers' attention differs in nothing but windows.

    Args:
      f: The fields.
      family: Their `model_type`.
      attention: That of all layers.
      feed_forward: Layer -> its feed-forward.
      windows: Each layer's window; None: there are none.
      norms: As in `Block`.
    """
    layers = [
        Block(dataclasses.replace(attention, window=window), feed_forward(i), norms)
        for i, window in enumerate(windows or [None] * f.size("num_hidden_layers"))
    ]
    return assemble(f, family, layers, attention_bias=attention.output_bias)


def assemble(
    f: Fields, family: str, layers: Sequence[Block], attention_bias: bool = False
) -> ModelConfig:
    """The configuration of known layers; fields that were not read are refused."""
    f.must("model_type", family)
    config = ModelConfig(
        vocab_size=f.size("vocab_size"),
        hidden_size=f.size("hidden_size"),
        stacks=stacks(layers),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        family=family,
        max_positions=f.size("max_position_embeddings", 32_768),
    )
    for name, value in _FIXED.items():
        f.must(name, value)
    f.must("attention_bias", attention_bias)
    f.close()
    return config


def count_experts(f: Fields, default: int, first: str = "num_experts") -> int:
    """The number of experts, which goes by two names."""
    names = first, "num_local_experts"
    count = f.size(names[0] if names[0] in f else names[1], default)
    for name in names:
        f.must(name, count)
    return count


def dense_layers(f: Fields) -> Callable[[int], Dense]:
    """Layer -> its dense feed-forward, the same for all."""
    size = f.size("intermediate_size")
    return lambda layer: Dense(size)


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """The fields that all families of grouped-query attention share.

    Only windows may tell the layers' attention apart.
    """
    attention = attentions(config)[0]
    return {
        **write_any(config),
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
    }


def attentions(config: ModelConfig) -> list[Attention]:
    """Each layer's attention, in families without latent attention."""
    found = [b.attention for b in config.layers if isinstance(b.attention, Attention)]
    if len(found) < config.num_layers:
        raise InputError(
            f"family {config.family!r} cannot express latent attention; use 'deepseek_v3'"
        )
    return found


def write_any(config: ModelConfig) -> dict[str, Any]:
    """The fields that all families share."""
    attention = config.layers[0].attention
    dense = [b.feed_forward for b in config.layers if isinstance(b.feed_forward, Dense)]
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "intermediate_size": dense[0].intermediate_size if dense else config.hidden_size * 4,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope_theta,
        # rope_theta and rope_scaling are read by transformers 4 and 5 alike.
        "rope_scaling": write_scaling(attention.rope_scaling),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def mixture_of(config: ModelConfig) -> Experts:
    """The mixture of all layers that have one."""
    for block in config.layers:
        if isinstance(block.feed_forward, Experts):
            return block.feed_forward
    raise InputError(
        f"family {config.family!r} needs a layer with experts, got none; use a dense family"
    )
