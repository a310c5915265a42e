"""Rotary embeddings in config.json: base and scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rljax.errors import InputError
from rljax.models.config import RopeScaling, Yarn, yarn_magnitude
from rljax.models.files.fields import Fields


def rope_fields(f: Fields) -> Fields:
    """The fields of rotary embeddings, as transformers 5 (one field) and 4 (two) write it."""
    old, new = f.get("rope_scaling", None), f.get("rope_parameters", {})
    values = {"rope_theta": f.get("rope_theta", 10_000.0), **(old or new)}
    return Fields(values, f"{f.where}, rope parameters")


def read_rope(f: Fields) -> tuple[float, RopeScaling | Yarn | None]:
    """Base and scaling of the rotary embeddings."""
    rope = rope_fields(f)
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


def write_scaling(scaling: RopeScaling | Yarn | None) -> dict[str, Any] | None:
    """The field `rope_scaling`; None: not stretched."""
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
