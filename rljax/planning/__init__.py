"""Plans the training of a model on machines that need not be there.

`plan` estimates memory, communication and time of a mesh from shapes alone, `search` ranks meshes,
and `rljax.planning.compile` compiles the real programs for described chips.
"""

from rljax.planning.chips import CHIPS, Chip, Topology
from rljax.planning.collectives import Collective
from rljax.planning.pictures import draw_shards
from rljax.planning.placement import ShardedParameter, bytes_per_parameter, shard_parameters
from rljax.planning.plan import Plan, plan
from rljax.planning.roofline import Roofline
from rljax.planning.search import ranking, search
from rljax.planning.sharding_report import ShardingReport, describe
from rljax.planning.work import Work

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "Plan",
    "Roofline",
    "ShardedParameter",
    "ShardingReport",
    "Topology",
    "Work",
    "bytes_per_parameter",
    "describe",
    "draw_shards",
    "plan",
    "ranking",
    "search",
    "shard_parameters",
]
