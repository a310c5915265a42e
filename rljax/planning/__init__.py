"""Plans for meshes nobody has at hand: layout, memory, communication, time, compiled programs."""

from rljax.planning.chips import CHIPS, Chip, Topology
from rljax.planning.communication import Collective
from rljax.planning.pictures import draw_shards
from rljax.planning.placement import Placed, bytes_per_parameter, place
from rljax.planning.plan import Plan, plan
from rljax.planning.roofline import Roofline
from rljax.planning.search import ranking, search
from rljax.planning.sharding_report import ShardingReport, describe
from rljax.planning.work import Work

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "Placed",
    "Plan",
    "Roofline",
    "ShardingReport",
    "Topology",
    "Work",
    "bytes_per_parameter",
    "describe",
    "draw_shards",
    "place",
    "plan",
    "ranking",
    "search",
]
