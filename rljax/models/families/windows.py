"""Sliding windows in config.json: the window of each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.models.families.common import attentions
from rljax.models.files.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(f: Fields, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """Each layer's window, by `layer_types`, or where that is absent by `slides`."""
    count = f.size("num_hidden_layers")
    kinds = f.get("layer_types", [SLIDING if window and slides(i) else FULL for i in range(count)])
    if len(kinds) != count:
        raise InputError(
            f"{f.where}: layer_types has {len(kinds)} entries, num_hidden_layers={count}; give one "
            "type for each layer"
        )
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise InputError(
                f"{f.where}: layer_types holds {kind!r}, which is not supported; only {FULL!r} "
                f"and {SLIDING!r} are"
            )
        if kind == SLIDING and window is None:
            raise InputError(
                f"{f.where}: layer_types holds {kind!r}, but no sliding window is set; give "
                "sliding_window, and use_sliding_window where the family has it"
            )
    return [window if kind == SLIDING else None for kind in kinds]


def switchable_window(f: Fields) -> int | None:
    """The window of the layers that slide, in the families that can switch it off."""
    window = f.size("sliding_window") if f.get("use_sliding_window", False) else None
    f.get("sliding_window", None)  # without effect where it is switched off
    return window


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The fields `sliding_window` and `layer_types`."""
    windows = [a.window for a in attentions(config)]
    return {
        "sliding_window": next((w for w in windows if w), None),
        "layer_types": [SLIDING if w else FULL for w in windows],
    }
