"""Named configurations: one file each; flags change their fields.

A new one is a function without arguments that returns a `Config`, and a line in `PRESETS`.
"""

from collections.abc import Callable

from rljax.config import Config
from rljax.presets.arithmetic import arithmetic
from rljax.presets.ppo import ppo
from rljax.presets.smollm2 import smollm2_arithmetic

PRESETS: dict[str, Callable[[], Config]] = {
    "arithmetic": arithmetic,
    "ppo": ppo,
    "smollm2-arithmetic": smollm2_arithmetic,
}
"""By the name that `--preset` takes."""

__all__ = ["PRESETS"]
