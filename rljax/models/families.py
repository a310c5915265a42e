"""Model families: how each one's config.json is read and written, and what its weights are called.

A family is a reader, a writer and a table; adding one touches this file, and `config.py` and
`forward.py` only where it computes something new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.models.config import (
    Attention,
    Block,
    Dense,
    Experts,
    ModelConfig,
    RopeScaling,
    Stack,
    Yarn,
    yarn_magnitude,
)
from rljax.models.weights import (
    Table,
    from_heads,
    heads_vector,
    linear,
    rows,
    to_heads,
    vector,
)

# Fields that change no logit: ids and limits of generation, bookkeeping, training-time losses.
_INERT = frozenset(
    {
        "architectures",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

# Fields that must say this, or nothing: the rest we lack.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
}


class Fields:
    """Fields of a configuration file, each of which is read, known to be inert, off, or refused."""

    def __init__(self, values: Mapping[str, Any], where: str):
        """Takes the fields and what to call their file."""
        self._values = {k: v for k, v in values.items() if v is not None}
        self._read: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any) -> Any:
        """A field, or its default where it is absent or null."""
        self._read.add(name)
        return self._values.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
          ValueError: It is absent and has no default, or is something else.
        """
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{self.where} has no field {name!r}; the model cannot be built")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {name}={value!r} must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number.

        Raises:
          ValueError: It is something else.
        """
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.where}: {name}={value!r} must be a positive number")
        return float(value)

    def must(self, name: str, value: Any) -> None:
        """Refuses a field that says anything but `value`, the only one that is supported.

        Raises:
          ValueError: It does.
        """
        got = self.get(name, value)
        if got != value:
            raise ValueError(f"{self.where}: {name}={got!r} is not supported, only {value!r} is")

    def close(self, inert: frozenset[str] | Sequence[str] = _INERT) -> None:
        """Refuses fields that nobody read, unless they say that something is off.

        Raises:
          ValueError: There is one.
        """
        for name, value in self._values.items():
            known = name in self._read or name in inert or name.startswith("_")
            if not known and value not in (False, "", [], {}):
                raise ValueError(
                    f"{self.where}: field {name}={_short(value)} is not supported; if it changes "
                    "nothing in the model, take it out of the file"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
        raise ValueError(
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
            raise ValueError(f"{rope.where}: rope_type={kind!r} needs {name!r}, which is absent")


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


def _no_window(f: Fields, num_layers: int, from_layer: int) -> None:
    """Refuses sliding windows that any layer would use."""
    window = f.get("sliding_window", None)
    if f.get("use_sliding_window", False) and window is not None and from_layer < num_layers:
        raise ValueError(
            f"{f.where}: use_sliding_window=True (sliding_window={window}) is not supported; "
            "only full attention is"
        )
    kinds = f.get("layer_types", ["full_attention"] * num_layers)
    for kind in kinds:
        if kind != "full_attention":
            raise ValueError(
                f"{f.where}: layer_types holds {kind!r}, which is not supported; only "
                "'full_attention' is"
            )


def _model(
    f: Fields,
    family: str,
    *,
    bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    feed_forward: Callable[[int], Dense | Experts],
) -> ModelConfig:
    """What the families share. `feed_forward` says what a layer's is."""
    f.must("model_type", family)
    width, heads = f.size("hidden_size"), f.size("num_attention_heads")
    theta, scaling = _rope(f)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=f.size("num_key_value_heads", num_kv_heads or heads),
        head_dim=f.size("head_dim", head_dim or width // heads),
        bias=bias,
        qk_norm=qk_norm,
        rope_theta=theta,
        rope_scaling=scaling,
    )
    layers = [Block(attention, feed_forward(i)) for i in range(f.size("num_hidden_layers"))]
    config = ModelConfig(
        vocab_size=f.size("vocab_size"),
        hidden_size=width,
        stacks=stacks(layers),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        family=family,
        max_position=f.size("max_position_embeddings", 32_768),
    )
    for name, value in _FIXED.items():
        f.must(name, value)
    f.close()
    return config


def _read_llama(f: Fields) -> ModelConfig:
    return _model(f, "llama", feed_forward=_dense(f))


def _read_qwen2(f: Fields) -> ModelConfig:
    _no_window(f, f.size("num_hidden_layers"), f.get("max_window_layers", 28))
    return _model(f, "qwen2", bias=True, feed_forward=_dense(f))


def _read_qwen3(f: Fields) -> ModelConfig:
    _no_window(f, f.size("num_hidden_layers"), f.get("max_window_layers", 28))
    return _model(f, "qwen3", qk_norm=True, head_dim=128, feed_forward=_dense(f))


def _read_qwen3_moe(f: Fields) -> ModelConfig:
    _no_window(f, f.size("num_hidden_layers"), from_layer=0)
    f.get("max_window_layers", None)
    # transformers 5 writes num_local_experts, 4 wrote num_experts.
    count = f.size("num_experts", f.get("num_local_experts", 128))
    f.must("num_local_experts", count)
    mixture = Experts(
        num_experts=count,
        top_k=f.size("num_experts_per_tok", 8),
        intermediate_size=f.size("moe_intermediate_size", 768),
        norm_topk_prob=bool(f.get("norm_topk_prob", False)),
    )
    plain = _dense(f)
    step, dense_layers = f.size("decoder_sparse_step", 1), set(f.get("mlp_only_layers", []))

    def feed_forward(layer: int) -> Dense | Experts:
        sparse = layer not in dense_layers and (layer + 1) % step == 0
        return mixture if sparse else plain(layer)

    return _model(f, "qwen3_moe", qk_norm=True, num_kv_heads=4, feed_forward=feed_forward)


def _dense(f: Fields) -> Callable[[int], Dense]:
    size = f.size("intermediate_size", 6144 if "moe_intermediate_size" in f else None)
    return lambda layer: Dense(size)


def _write(config: ModelConfig) -> dict[str, Any]:
    """The fields that all families share; the layers' attention must be one and the same."""
    attention = config.layers[0].attention
    dense = [b.feed_forward for b in config.layers if isinstance(b.feed_forward, Dense)]
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
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


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    fields = {**_write(config), "use_sliding_window": False}
    del fields["attention_bias"]  # it has no such field: q, k and v always have biases
    return fields


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "use_sliding_window": False}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    kinds = [b.feed_forward for b in config.layers]
    mixtures = [m for m in kinds if isinstance(m, Experts)]
    if not mixtures:
        raise ValueError("family 'qwen3_moe' needs a layer with experts, got none; use 'qwen3'")
    return {
        **_write(config),
        "use_sliding_window": False,
        "num_experts": mixtures[0].num_experts,
        "num_experts_per_tok": mixtures[0].top_k,
        "moe_intermediate_size": mixtures[0].intermediate_size,
        "norm_topk_prob": mixtures[0].norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, m in enumerate(kinds) if isinstance(m, Dense)],
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

_QWEN3_MOE: Table = {
    **_QWEN3,
    "experts/router": linear(_MLP + "gate.weight"),
    "experts/gate": linear(_MLP + "experts.{expert}.gate_proj.weight"),
    "experts/up": linear(_MLP + "experts.{expert}.up_proj.weight"),
    "experts/down": linear(_MLP + "experts.{expert}.down_proj.weight"),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_read_llama, _write_llama, _LLAMA, "LlamaForCausalLM"),
    "qwen2": Family(_read_qwen2, _write_qwen2, _QWEN2, "Qwen2ForCausalLM"),
    "qwen3": Family(_read_qwen3, _write_qwen3, _QWEN3, "Qwen3ForCausalLM"),
    "qwen3_moe": Family(_read_qwen3_moe, _write_qwen3_moe, _QWEN3_MOE, "Qwen3MoeForCausalLM"),
}
"""`model_type` of config.json -> family."""


def family(name: str, where: str) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: There is none of that name.
    """
    if name not in FAMILIES:
        raise ValueError(
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
        raise ValueError(f"{where} has no field 'model_type'; is it a model's config.json?")
    try:
        return family(kind, where).read(Fields(values, where))
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
            raise ValueError(
                f"family {config.family!r} cannot express {name} {want}, only {got}; change the "
                "configuration or its family"
            )
    return fields
