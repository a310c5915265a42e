"""The device mesh: its axes, the rules that shard weights over it, and collectives between shards.

`describe` and `draw` show how a model is sharded over a mesh. They need the models and the planner,
which import this package: they live in `rljax.planning`, and are looked up there when first used.
"""

import importlib
from typing import Any

from rljax.mesh.activations import (
    Names,
    axes_of,
    constrain,
    constrain_rows,
    fit,
    map_shards,
    split,
)
from rljax.mesh.collectives import gather, true_anywhere, varies, vary_alike, vary_over
from rljax.mesh.meshes import (
    AXES,
    BATCH_AXES,
    batch_shards,
    from_flags,
    make,
    make_abstract,
    read_flags,
)
from rljax.mesh.placement import batch_sharding, on_host, replicated, shard_rows
from rljax.mesh.rules import ROLLOUT_RULES, TRAIN_RULES, Rules, read_rules, sharding

__all__ = [
    "AXES",
    "BATCH_AXES",
    "ROLLOUT_RULES",
    "TRAIN_RULES",
    "Names",
    "Rules",
    "axes_of",
    "batch_sharding",
    "batch_shards",
    "constrain",
    "constrain_rows",
    "fit",
    "from_flags",
    "gather",
    "make",
    "make_abstract",
    "map_shards",
    "on_host",
    "read_flags",
    "read_rules",
    "replicated",
    "shard_rows",
    "sharding",
    "split",
    "true_anywhere",
    "varies",
    "vary_alike",
    "vary_over",
]

_IN_PLANNING = {"describe": "describe", "draw": "draw_shards"}


def __getattr__(name: str) -> Any:
    if name in _IN_PLANNING:
        return getattr(importlib.import_module("rljax.planning"), _IN_PLANNING[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_IN_PLANNING])
