"""XLA's figures of compiled programs next to the estimates of a plan."""

from __future__ import annotations

import dataclasses

from rljax.planning.compile import Compiled
from rljax.planning.plan import Plan
from rljax.planning.sharding_report import collective_table
from rljax.planning.tables import Table, Tables, short, size


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Tables):
    """XLA's figures of a compiled program and the plan's estimates, in one table.

    Attributes:
      plan: The estimates.
      compiled: XLA's figures.
    """

    plan: Plan
    compiled: Compiled

    def tables(self) -> list[Table]:
        """Memory, the largest temporaries, collectives."""
        c = self.compiled
        arguments, temporaries = self.plan.arguments[c.name], self.plan.temporaries[c.name]
        memory, resident = self.plan.topology.chip.memory, self.plan.resident[c.name]
        total = arguments + temporaries
        lines = [
            ("arguments", size(c.arguments), size(arguments), _error(arguments, c.arguments)),
            (
                "temporaries",
                size(c.temporaries),
                size(temporaries),
                _error(temporaries, c.temporaries),
            ),
            ("outputs", size(c.outputs), "", ""),
            ("of them aliases of arguments", size(c.aliases), "", ""),
            ("all", size(c.total), size(total), _error(total, c.total)),
            ("peak", size(c.peak), "", ""),
            ("also resident", "", size(resident), ""),
            ("fits", "yes" if c.total + resident <= memory else "NO", "", f"of {size(memory)}"),
        ]
        return [
            Table(
                f"{c.name} program: compiled in {c.seconds:.0f} s with {size(c.host_bytes)} of "
                "host memory; bytes per device",
                ("", "XLA", "estimate", "difference"),
                lines,
            ),
            Table(
                "Its largest temporaries",
                ("bytes", "arrays that share the buffer"),
                [(size(n), short(arrays)) for n, arrays in c.largest],
            ),
            collective_table("Sent by each device, as compiled", c.collectives),
        ]


def _error(estimate: float, measured: float) -> str:
    return f"{measured / estimate - 1:+.1%}" if estimate else ""
