"""Model families: how each one's config.json is read and written, and what its weights are called.

A family is a reader, a writer and a table; adding one touches this file, and `config.py` and
`forward.py` only where it computes something new.
"""

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
    LatentAttention,
    ModelConfig,
    RopeScaling,
    Stack,
    Yarn,
    yarn_magnitude,
)
from rljax.models.experts import CLAMP, GAIN
from rljax.models.fields import Fields
from rljax.models.weights import (
    Table,
    all_experts,
    from_heads,
    heads_vector,
    linear,
    rows,
    to_heads,
    vector,
)

# Fields that must say this, or nothing: the rest we lack.
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
      write: Configuration -> fields; what it cannot say is found by reading them back.
      table: Where each parameter is stored.
      architecture: The transformers class with an output matrix.
    """

    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Table
    architecture: str


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


def _rope_fields(f: Fields) -> Fields:
    """What is said of rotary embeddings, as transformers 5 (one field) and 4 (two) write it."""
    old, new = f.get("rope_scaling", None), f.get("rope_parameters", {})
    values = {"rope_theta": f.get("rope_theta", 10_000.0), **(old or new)}
    return Fields(values, f"{f.where}, rope parameters")


def _rope(f: Fields) -> tuple[float, RopeScaling | Yarn | None]:
    """Base and scaling of the rotary embeddings."""
    rope = _rope_fields(f)
    rope.must("partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.number("rope_theta", 10_000.0)
    if kind == "default":
        rope.close(("original_max_position_embeddings",))
        return theta, None
    readers: dict[str, Callable[[Fields, int], RopeScaling | Yarn]] = {
        "llama3": _read_llama3,
        "yarn": _read_yarn,
    }
    if kind not in readers:
        raise InputError(
            f"{f.where}: rope_type={kind!r} is not supported, only 'default', 'llama3' and "
            "'yarn' are"
        )
    original = rope.size("original_max_position_embeddings", f.get("max_position_embeddings", None))
    scaling = readers[kind](rope, original)
    rope.close(())
    return theta, scaling


def _needs(rope: Fields, kind: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in rope:
            raise InputError(f"{rope.where}: rope_type={kind!r} needs {name!r}, which is absent")


def _read_llama3(rope: Fields, original: int) -> RopeScaling:
    _needs(rope, "llama3", ("factor", "low_freq_factor", "high_freq_factor"))
    return RopeScaling(
        factor=rope.number("factor", 1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 1.0),
        original_max_position=original,
    )


def _read_yarn(rope: Fields, original: int) -> Yarn:
    _needs(rope, "yarn", ("factor",))
    factor = rope.number("factor", 1.0)
    magnitude = yarn_magnitude(factor)
    # Two weights of the logarithm count only together; alone, mscale_all_dim scales scores.
    over, under = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    if over and under:
        magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
    return Yarn(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        magnitude=rope.number("attention_factor", magnitude),
        truncate=bool(rope.get("truncate", True)),
    )


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _windows(f: Fields, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """Each layer's window, by `layer_types`, or where that is absent by `slides`."""
    count = f.size("num_hidden_layers")
    kinds = f.get(
        "layer_types", [_SLIDING if window and slides(i) else _FULL for i in range(count)]
    )
    if len(kinds) != count:
        raise InputError(
            f"{f.where}: layer_types says {len(kinds)} layers, num_hidden_layers={count}; give one "
            "type for each layer"
        )
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise InputError(
                f"{f.where}: layer_types holds {kind!r}, which is not supported; only {_FULL!r} "
                f"and {_SLIDING!r} are"
            )
        if kind == _SLIDING and window is None:
            raise InputError(
                f"{f.where}: layer_types holds {kind!r}, but no sliding window is set; give "
                "sliding_window, and use_sliding_window where the family has it"
            )
    return [window if kind == _SLIDING else None for kind in kinds]


def _qwen_window(f: Fields) -> int | None:
    """The window of the layers that slide, in the families that can switch it off."""
    window = f.size("sliding_window") if f.get("use_sliding_window", False) else None
    f.get("sliding_window", None)  # what it says is not meant
    return window


def _model(
    f: Fields,
    family: str,
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["head", "full"] | None = None,
    sinks: bool = False,
    windows: Sequence[int | None] | None = None,
    feed_forward: Callable[[int], Dense | Experts],
) -> ModelConfig:
    """What the families share.

    `windows` holds each layer's, by default none; `feed_forward` says what a layer's is.
    """
    width, heads = f.size("hidden_size"), f.size("num_attention_heads")
    theta, scaling = _rope(f)
    attention = Attention(
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
    layers = [
        Block(dataclasses.replace(attention, window=window), feed_forward(i))
        for i, window in enumerate(windows or [None] * f.size("num_hidden_layers"))
    ]
    return _assemble(f, family, layers, attention_bias=output_bias)


def _assemble(
    f: Fields, family: str, layers: Sequence[Block], attention_bias: bool = False
) -> ModelConfig:
    """The configuration of known layers; fields that nobody has read are refused."""
    f.must("model_type", family)
    config = ModelConfig(
        vocab_size=f.size("vocab_size"),
        hidden_size=f.size("hidden_size"),
        stacks=stacks(layers),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        family=family,
        max_position=f.size("max_position_embeddings", 32_768),
    )
    for name, value in _FIXED.items():
        f.must(name, value)
    f.must("attention_bias", attention_bias)
    f.close()
    return config


def _read_llama(f: Fields) -> ModelConfig:
    return _model(f, "llama", feed_forward=_dense(f))


def _read_qwen2(f: Fields) -> ModelConfig:
    return _model(
        f,
        "qwen2",
        bias=True,
        windows=_windows(f, _qwen_window(f), _late(f)),
        feed_forward=_dense(f),
    )


def _read_qwen3(f: Fields) -> ModelConfig:
    f.assume(head_dim=128)
    return _model(
        f,
        "qwen3",
        qk_norm="head",
        windows=_windows(f, _qwen_window(f), _late(f)),
        feed_forward=_dense(f),
    )


def _late(f: Fields) -> Callable[[int], bool]:
    first = f.get("max_window_layers", 28)
    return lambda layer: layer >= first


def _read_qwen3_moe(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768)
    # Here all layers slide or none does, whatever max_window_layers says.
    window, count = _qwen_window(f), f.size("num_hidden_layers")
    f.get("max_window_layers", None)
    f.must("layer_types", [_SLIDING if window else _FULL] * count)
    mixture = Experts(
        num_experts=_count_experts(f, 128),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=f.size("moe_intermediate_size"),
        norm_topk_prob=bool(f.get("norm_topk_prob", False)),
    )
    return _model(
        f,
        "qwen3_moe",
        qk_norm="head",
        windows=[window] * count,
        feed_forward=_sparse(f, mixture),
    )


def _read_qwen2_moe(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=16, intermediate_size=5632, moe_intermediate_size=1408)
    first = f.get("max_window_layers", 28)
    mixture = Experts(
        num_experts=_count_experts(f, 60),
        top_k=f.size("num_experts_per_tok", 4),
        intermediate_size=f.size("moe_intermediate_size"),
        norm_topk_prob=bool(f.get("norm_topk_prob", False)),
        shared_size=f.size("shared_expert_intermediate_size", 5632),
        shared_gated=True,
    )
    return _model(
        f,
        "qwen2_moe",
        bias=bool(f.get("qkv_bias", True)),
        windows=_windows(f, _qwen_window(f), lambda layer: layer % 2 == 0 and layer < first),
        feed_forward=_sparse(f, mixture),
    )


def _read_olmoe(f: Fields) -> ModelConfig:
    f.assume(rms_norm_eps=1e-5, max_position_embeddings=4096)
    f.must("clip_qkv", None)
    f.must("head_dim", f.size("hidden_size") // f.size("num_attention_heads"))
    mixture = Experts(
        num_experts=_count_experts(f, 64),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=f.size("intermediate_size", 2048),
        norm_topk_prob=bool(f.get("norm_topk_prob", False)),
    )
    return _model(f, "olmoe", qk_norm="full", feed_forward=lambda layer: mixture)


def _read_mixtral(f: Fields) -> ModelConfig:
    f.assume(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5)
    window = f.size("sliding_window") if "sliding_window" in f else None
    mixture = Experts(
        num_experts=_count_experts(f, 8),
        top_k=f.size("num_experts_per_tok", 2),
        intermediate_size=f.size("intermediate_size", 14_336),
    )
    return _model(
        f,
        "mixtral",
        windows=[window] * f.size("num_hidden_layers"),
        feed_forward=lambda layer: mixture,
    )


def _read_gpt_oss(f: Fields) -> ModelConfig:
    if "rope_scaling" not in f and "rope_parameters" not in f:
        raise InputError(f"{f.where} has neither rope_parameters nor rope_scaling; give one")
    f.assume(num_key_value_heads=8, head_dim=64, rope_theta=150_000.0, rms_norm_eps=1e-5)
    f.must("swiglu_limit", CLAMP)
    f.must("swiglu_alpha", GAIN)
    f.get("initial_context_length", None)  # the rotary parameters say it again
    top_k = f.size("num_experts_per_tok", 4)
    f.must("experts_per_token", top_k)
    mixture = Experts(
        num_experts=_count_experts(f, 128),
        top_k=top_k,
        intermediate_size=f.size("intermediate_size", 2880),
        router_bias=True,
        bias=True,
        activation="clamped",
    )
    bias = bool(f.get("attention_bias", True))
    window = f.size("sliding_window", 128)
    return _model(
        f,
        "gpt_oss",
        bias=bias,
        output_bias=bias,
        sinks=True,
        windows=_windows(f, window, lambda layer: layer % 2 == 0),
        feed_forward=lambda layer: mixture,
    )


def _read_deepseek_v3(f: Fields) -> ModelConfig:
    f.assume(intermediate_size=18_432, max_position_embeddings=4096)
    heads, rope_dim = f.size("num_attention_heads"), f.size("qk_rope_head_dim", 64)
    theta, scaling = _rope(f)
    attention = LatentAttention(
        num_heads=heads,
        q_rank=None if f.is_null("q_lora_rank") else f.size("q_lora_rank", 1536),
        kv_rank=f.size("kv_lora_rank", 512),
        nope_dim=f.size("qk_nope_head_dim", 128),
        rope_dim=rope_dim,
        value_dim=f.size("v_head_dim", 128),
        rope_theta=theta,
        rope_scaling=scaling,
        scale_weight=float(_rope_fields(f).get("mscale_all_dim", 0.0)),
    )
    size = f.size("moe_intermediate_size", 2048)
    mixture = Experts(
        num_experts=_count_experts(f, 256, "n_routed_experts"),
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=size,
        norm_topk_prob=bool(f.get("norm_topk_prob", True)),
        scoring="sigmoid",
        groups=f.size("n_group", 8),
        top_groups=f.size("topk_group", 4),
        scale=f.number("routed_scaling_factor", 2.5),
        correction_bias=True,
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
    plain, dense = _dense(f), f.get("first_k_dense_replace", 3)
    layers = [
        Block(attention, plain(i) if i < dense else mixture)
        for i in range(f.size("num_hidden_layers"))
    ]
    return _assemble(f, "deepseek_v3", layers)


# How many layers follow the model's own to predict further tokens, in either of two names.
_PREDICTIONS = "num_nextn_predict_layers", "num_mtp_layers"


def left_out(values: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """How the names of weights begin that the fields announce and the model does not use.

    They are those of layers for multi-token prediction.
    """
    count = next((values[name] for name in _PREDICTIONS if values.get(name)), 0)
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(count))


def _count_experts(f: Fields, default: int, first: str = "num_experts") -> int:
    """The number of experts, which goes by two names."""
    names = first, "num_local_experts"
    count = f.size(names[0] if names[0] in f else names[1], default)
    for name in names:
        f.must(name, count)
    return count


def _dense(f: Fields) -> Callable[[int], Dense]:
    size = f.size("intermediate_size")
    return lambda layer: Dense(size)


def _sparse(f: Fields, mixture: Experts) -> Callable[[int], Dense | Experts]:
    """Which layers are mixtures, in the families of Qwen."""
    plain = _dense(f)
    step, dense_layers = f.size("decoder_sparse_step", 1), set(f.get("mlp_only_layers", []))

    def feed_forward(layer: int) -> Dense | Experts:
        sparse = layer not in dense_layers and (layer + 1) % step == 0
        return mixture if sparse else plain(layer)

    return feed_forward


def _write(config: ModelConfig) -> dict[str, Any]:
    """The fields that all families of grouped-query attention share.

    Only windows may tell the layers' attention apart.
    """
    attention = _attentions(config)[0]
    return {
        **_write_any(config),
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
    }


def _attentions(config: ModelConfig) -> list[Attention]:
    """Each layer's attention, in families that know no other kind."""
    found = [b.attention for b in config.layers if isinstance(b.attention, Attention)]
    if len(found) < config.num_layers:
        raise InputError(
            f"family {config.family!r} cannot express latent attention; use 'deepseek_v3'"
        )
    return found


def _write_any(config: ModelConfig) -> dict[str, Any]:
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
        "rope_scaling": _write_scaling(attention.rope_scaling),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _write_scaling(scaling: RopeScaling | Yarn | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if isinstance(scaling, Yarn):
        return {
            "rope_type": "yarn",
            **fields,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.magnitude,
            "truncate": scaling.truncate,
        }
    return {
        "rope_type": "llama3",
        **fields,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "mlp_bias": False}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    windows = [a.window for a in _attentions(config)]
    return {
        "sliding_window": next((w for w in windows if w), None),
        "layer_types": [_SLIDING if w else _FULL for w in windows],
    }


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    windows = _write_windows(config)
    used = windows["sliding_window"] is not None
    return {**_write(config), "use_sliding_window": used, **windows}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    fields = _write_qwen(config)
    del fields["attention_bias"]  # it has no such field
    return fields


def _mixture(config: ModelConfig) -> Experts:
    """The mixture of all layers that have one."""
    for block in config.layers:
        if isinstance(block.feed_forward, Experts):
            return block.feed_forward
    raise InputError(
        f"family {config.family!r} needs a layer with experts, got none; use a dense family"
    )


def _write_sparse(config: ModelConfig) -> dict[str, Any]:
    mixture = _mixture(config)
    dense = [i for i in range(config.num_layers) if i not in config.mixture_layers]
    return {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": mixture.intermediate_size,
        "norm_topk_prob": mixture.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(config), **_write_sparse(config)}


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_qwen2(config),
        **_write_sparse(config),
        "qkv_bias": _attentions(config)[0].bias,
        "shared_expert_intermediate_size": _mixture(config).shared_size or None,
    }


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    mixture = _mixture(config)
    return {
        **_write(config),
        "intermediate_size": mixture.intermediate_size,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": mixture.norm_topk_prob,
    }


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    mixture = _mixture(config)
    return {
        **_write(config),
        "intermediate_size": mixture.intermediate_size,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        "sliding_window": _attentions(config)[0].window,
    }


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    fields = {**_write_mixtral(config), **_write_windows(config)}
    fields["sliding_window"] = fields["sliding_window"] or 128  # it must be a number
    if fields["rope_scaling"] is None:  # to say nothing means YaRN here
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    fields["attention_bias"] = _attentions(config)[0].output_bias
    return fields


def _write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    attention, mixture = config.layers[0].attention, _mixture(config)
    if not isinstance(attention, LatentAttention):
        raise InputError(f"family 'deepseek_v3' cannot express {attention}; use another family")
    fields = _write_any(config)
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
        "norm_topk_prob": mixture.norm_topk_prob,
        "n_group": mixture.groups,
        "topk_group": mixture.top_groups,
        "routed_scaling_factor": mixture.scale,
        "n_shared_experts": mixture.shared_size // mixture.intermediate_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": config.mixture_layers[0],
        "num_nextn_predict_layers": 0,
    }


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

_LLAMA: Table = {
    "embed": rows("model.embed_tokens.weight"),
    "norm": vector("model.norm.weight"),
    "output": linear("lm_head.weight"),
    "attention_norm": vector("model.layers.{layer}.input_layernorm.weight"),
    "attention/q": to_heads(_ATTENTION + "q_proj.weight"),
    "attention/k": to_heads(_ATTENTION + "k_proj.weight"),
    "attention/v": to_heads(_ATTENTION + "v_proj.weight"),
    "attention/o": from_heads(_ATTENTION + "o_proj.weight"),
    "feed_forward_norm": vector("model.layers.{layer}.post_attention_layernorm.weight"),
    "dense/gate": linear(_MLP + "gate_proj.weight"),
    "dense/up": linear(_MLP + "up_proj.weight"),
    "dense/down": linear(_MLP + "down_proj.weight"),
}

_QWEN2: Table = {
    **_LLAMA,
    "attention/q_bias": heads_vector(_ATTENTION + "q_proj.bias"),
    "attention/k_bias": heads_vector(_ATTENTION + "k_proj.bias"),
    "attention/v_bias": heads_vector(_ATTENTION + "v_proj.bias"),
}

_QWEN3: Table = {
    **_LLAMA,
    "attention/q_norm": vector(_ATTENTION + "q_norm.weight"),
    "attention/k_norm": vector(_ATTENTION + "k_norm.weight"),
}

_EXPERTS: Table = {
    "experts/router": linear(_MLP + "gate.weight"),
    "experts/gate": linear(_MLP + "experts.{expert}.gate_proj.weight"),
    "experts/up": linear(_MLP + "experts.{expert}.up_proj.weight"),
    "experts/down": linear(_MLP + "experts.{expert}.down_proj.weight"),
}

_QWEN2_MOE: Table = {
    **_QWEN2,
    **_EXPERTS,
    "experts/shared/gate": linear(_MLP + "shared_expert.gate_proj.weight"),
    "experts/shared/up": linear(_MLP + "shared_expert.up_proj.weight"),
    "experts/shared/down": linear(_MLP + "shared_expert.down_proj.weight"),
    "experts/shared_gate": linear(_MLP + "shared_expert_gate.weight"),
}

_OLMOE: Table = {
    **_LLAMA,
    **_EXPERTS,
    "attention/q_norm": heads_vector(_ATTENTION + "q_norm.weight"),
    "attention/k_norm": heads_vector(_ATTENTION + "k_norm.weight"),
}

_BLOCK_SPARSE = "model.layers.{layer}.block_sparse_moe."

_MIXTRAL: Table = {
    **_LLAMA,
    "experts/router": linear(_BLOCK_SPARSE + "gate.weight"),
    "experts/gate": linear(_BLOCK_SPARSE + "experts.{expert}.w1.weight"),
    "experts/up": linear(_BLOCK_SPARSE + "experts.{expert}.w3.weight"),
    "experts/down": linear(_BLOCK_SPARSE + "experts.{expert}.w2.weight"),
}

_GPT_OSS: Table = {
    **_QWEN2,
    "attention/o_bias": vector(_ATTENTION + "o_proj.bias"),
    "attention/sinks": vector(_ATTENTION + "sinks"),
    "experts/router": linear(_MLP + "router.weight"),
    "experts/router_bias": vector(_MLP + "router.bias"),
    "experts/gate": all_experts(_MLP + "experts.gate_up_proj", 3, part=0, parts=2),
    "experts/up": all_experts(_MLP + "experts.gate_up_proj", 3, part=1, parts=2),
    "experts/down": all_experts(_MLP + "experts.down_proj", 3),
    "experts/gate_bias": all_experts(_MLP + "experts.gate_up_proj_bias", 2, part=0, parts=2),
    "experts/up_bias": all_experts(_MLP + "experts.gate_up_proj_bias", 2, part=1, parts=2),
    "experts/down_bias": all_experts(_MLP + "experts.down_proj_bias", 2),
}

_DEEPSEEK_V3: Table = {
    **_LLAMA,
    **_EXPERTS,
    "attention/q": to_heads(_ATTENTION + "q_proj.weight", interleaved=True),
    "attention/q_up": to_heads(_ATTENTION + "q_b_proj.weight", interleaved=True),
    "attention/q_down": linear(_ATTENTION + "q_a_proj.weight"),
    "attention/q_norm": vector(_ATTENTION + "q_a_layernorm.weight"),
    "attention/kv_down": linear(_ATTENTION + "kv_a_proj_with_mqa.weight", interleaved=True),
    "attention/kv_norm": vector(_ATTENTION + "kv_a_layernorm.weight"),
    "attention/kv_up": to_heads(_ATTENTION + "kv_b_proj.weight"),
    "experts/correction": vector(_MLP + "gate.e_score_correction_bias"),
    "experts/shared/gate": linear(_MLP + "shared_experts.gate_proj.weight"),
    "experts/shared/up": linear(_MLP + "shared_experts.up_proj.weight"),
    "experts/shared/down": linear(_MLP + "shared_experts.down_proj.weight"),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_read_llama, _write_llama, _LLAMA, "LlamaForCausalLM"),
    "qwen2": Family(_read_qwen2, _write_qwen2, _QWEN2, "Qwen2ForCausalLM"),
    "qwen3": Family(_read_qwen3, _write_qwen, _QWEN3, "Qwen3ForCausalLM"),
    "qwen2_moe": Family(_read_qwen2_moe, _write_qwen2_moe, _QWEN2_MOE, "Qwen2MoeForCausalLM"),
    "qwen3_moe": Family(
        _read_qwen3_moe, _write_qwen3_moe, {**_QWEN3, **_EXPERTS}, "Qwen3MoeForCausalLM"
    ),
    "olmoe": Family(_read_olmoe, _write_olmoe, _OLMOE, "OlmoeForCausalLM"),
    "mixtral": Family(_read_mixtral, _write_mixtral, _MIXTRAL, "MixtralForCausalLM"),
    "deepseek_v3": Family(
        _read_deepseek_v3, _write_deepseek_v3, _DEEPSEEK_V3, "DeepseekV3ForCausalLM"
    ),
    "gpt_oss": Family(_read_gpt_oss, _write_gpt_oss, _GPT_OSS, "GptOssForCausalLM"),
}
"""`model_type` of config.json -> family."""


def family(name: str, where: str) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: There is none of that name.
    """
    if name not in FAMILIES:
        raise InputError(
            f"{where}: model_type={name!r} is not supported; the families are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def read_fields(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The configuration that config.json describes.

    Raises:
      ValueError: The family, or any field, is not supported; named.
    """
    kind = values.get("model_type")
    if kind is None:
        raise InputError(f"{where} has no field 'model_type'; is it a model's config.json?")
    try:
        found = family(kind, where)
        quantised = values.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise InputError(
                f"{where}: quantization_config (quant_method={method!r}) is not supported; save "
                "the model dequantised, in bfloat16"
            )
        return found.read(Fields(values, where))
    except ValueError as e:
        raise e if str(e).startswith(where) else ValueError(f"{where}: {e}") from e


def write_fields(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a configuration, checked by reading it back.

    Raises:
      ValueError: The family cannot express the configuration; the field that differs is named.
    """
    fields = family(config.family, "save_pretrained").write(config)
    back = read_fields(fields, f"family {config.family!r}")
    for name in (
        "vocab_size",
        "hidden_size",
        "norm_eps",
        "tie_embeddings",
        "max_position",
        "layers",
    ):
        want, got = getattr(config, name), getattr(back, name)
        if name == "layers" and want != got:
            i = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
            name, want, got = f"layer {i}", want[i], got[i]
        if want != got:
            raise InputError(
                f"family {config.family!r} cannot express {name} {want}, only {got}; change the "
                "configuration or its family"
            )
    return fields
