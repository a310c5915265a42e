"""Model families: how config.json is read and written, and what weights are called.

A family is one file here and one line in `FAMILIES`; `config.py`, `parameters.py` and the forward
pass change only where it computes something new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.models.families import (
    deepseek,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    olmoe,
    qwen,
    smollm3,
)
from rljax.models.families.common import Family
from rljax.models.files.fields import Fields

FAMILIES: Mapping[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3_moe": qwen.QWEN3_MOE,
    "olmoe": olmoe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "deepseek_v3": deepseek.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "olmo2": olmo2.FAMILY,
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
        "max_positions",
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
