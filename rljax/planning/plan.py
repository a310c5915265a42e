"""A plan: memory, communication and time of a model's training on a machine."""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import ModelConfig
from rljax.planning import memory, roofline
from rljax.planning.chips import Topology
from rljax.planning.roofline import Roofline
from rljax.planning.sharding_report import (
    ShardingReport,
    collective_table,
    describe,
    pipeline_tables,
)
from rljax.planning.tables import Table, Tables, count, seconds, size
from rljax.planning.work import Work, rows_bytes

KEPT = ("master weights", "optimizer moments")
"""The kinds that training keeps from step to step."""
ROWS = "rows of a mini-batch"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Tables):
    """Memory, communication and time of a step on a machine; prints as tables.

    Attributes:
      topology: The machine.
      sharding: Parameters, their bytes by kind, and collectives.
      update: Bytes per device while updating, by kind.
      rollout: Bytes per device while sampling, by kind.
      update_time: The least time of one optimizer step.
      rollout_time: The least time of a rollout batch.
      updates: Optimizer steps of a rollout batch.
      on_host: Bytes per device that are kept in the host's memory.
    """

    topology: Topology
    sharding: ShardingReport
    update: dict[str, int]
    rollout: dict[str, int]
    update_time: Roofline
    rollout_time: Roofline
    updates: int
    on_host: int

    @property
    def arguments(self) -> dict[str, int]:
        """Bytes per device of the arguments of the train step and of the decode step."""
        kept = sum(self.update[kind] for kind in (*KEPT, ROWS))
        weights = self.rollout["sampler's weights"] or self.sharding.totals["master weights"]
        return {"train": kept, "decode": weights + self.rollout["KV pool"]}

    @property
    def temporaries(self) -> dict[str, int]:
        """Bytes per device of the temporaries of the train step and of the decode step."""
        arguments = (*KEPT, ROWS, "KV pool")
        return {
            "train": sum(n for kind, n in self.update.items() if kind not in arguments),
            "decode": self.rollout["decode activations"],
        }

    @property
    def resident(self) -> dict[str, int]:
        """Bytes per device that stay in memory, unused, during the train or the decode step."""
        # Without weights of its own the sampler decodes with the master weights.
        kept = KEPT if self.rollout["sampler's weights"] else KEPT[1:]
        return {
            "train": self.update["KV pool"],
            "decode": sum(self.rollout[kind] for kind in kept),
        }

    @property
    def peak(self) -> int:
        """The most bytes per device, of update and rollout."""
        return max(sum(self.update.values()), sum(self.rollout.values()))

    @property
    def fits(self) -> bool:
        """Whether the peak fits in a chip's memory."""
        return self.peak <= self.topology.chip.memory

    @property
    def seconds(self) -> float:
        """The least time of a whole step, rollout and updates, if everything overlaps perfectly."""
        return self.rollout_time.seconds + self.updates * self.update_time.seconds

    def tables(self) -> list[Table]:
        """Parameters, memory, pipelines, collectives, times."""
        chip, report = self.topology.chip, self.sharding
        kinds = [*dict.fromkeys([*self.update, *self.rollout])]
        held = [
            (k, *(size(phase[k]) if k in phase else "" for phase in (self.update, self.rollout)))
            for k in kinds
        ]
        sums = [sum(phase.values()) for phase in (self.update, self.rollout)]
        held.append(("all", *map(size, sums)))
        if self.on_host:
            held.append(("in the host's memory", *[size(self.on_host)] * 2))
        held.append(("fits", *("yes" if n <= chip.memory else "NO" for n in sums)))
        where = ", ".join(f"{name}={n}" for name, n in report.mesh.items()) or "one device"
        times = (("update", self.update_time), ("rollout batch", self.rollout_time))
        return [
            Table(
                f"{count(report.parameters)} parameters, {count(report.active)} active, on "
                f"{self.topology.num_chips} {chip.name} ({where})",
                (f"bytes per device, of {size(chip.memory)}", "update", "rollout"),
                held,
            ),
            *pipeline_tables(report.schedules),
            collective_table("Sent by each device in an optimizer step", report.collectives),
            Table(
                f"Least times; a step is a rollout batch and {self.updates} update(s): "
                f"{seconds(self.seconds)}",
                ("", "compute", "memory", "links", "bound by"),
                [
                    (
                        name,
                        *(seconds(getattr(t, r)) for r in ("compute", "memory", "links")),
                        t.bound,
                    )
                    for name, t in times
                ],
            ),
        ]


def plan(
    config: ModelConfig,
    topology: Topology,
    mesh: Mesh | AbstractMesh,
    work: Work,
    train_rules: meshes.Rules = meshes.TRAIN_RULES,
    rollout_rules: meshes.Rules = meshes.ROLLOUT_RULES,
    on_host: bool = False,
) -> Plan:
    """Plans the training of a model; nothing is allocated.

    Args:
      config: The model.
      topology: The machine.
      mesh: Its chips as a mesh, which may be abstract.
      work: The sizes of a step.
      train_rules: How weights are sharded in the update: logical axis -> mesh axes.
      rollout_rules: How weights are sharded while sampling.
      on_host: Whether the optimizer's moments are kept in the host's memory. Neither the time to
        transfer them is counted, nor the device memory of those in transfer.

    Raises:
      InputError: Parameters, batch, slots or pages do not divide over the mesh.
    """
    report = describe(mesh, config, work, train_rules)
    placed, totals = report.rows, report.totals
    on_host_bytes = totals["optimizer moments"] if on_host else 0
    totals["optimizer moments"] -= on_host_bytes
    kept = {kind: totals[kind] for kind in KEPT}
    rows = rows_bytes(config, work) // meshes.batch_shards(mesh)
    pool = {"KV pool": memory.kv_pool(mesh, config, work)}
    sampler = memory.rollout_weights(placed, mesh, config, rollout_rules)
    chip = topology.chip
    return Plan(
        topology=topology,
        sharding=report,
        update=totals | {ROWS: rows} | memory.activations(mesh, config, work, placed) | pool,
        rollout=kept
        | {"sampler's weights": sampler}
        | {"decode activations": memory.decode_activations(mesh, config, work)}
        | pool,
        update_time=roofline.update(chip, mesh, config, work, placed, report.collectives),
        rollout_time=roofline.rollout(
            chip, mesh, config, work, placed, sampler or totals["master weights"], rollout_rules
        ),
        updates=work.updates,
        on_host=on_host_bytes,
    )
