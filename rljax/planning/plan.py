"""A plan: memory, communication and time of a model's training on a machine."""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.models import ModelConfig
from rljax.planning import attention, memory, roofline
from rljax.planning.chips import Topology
from rljax.planning.roofline import Roofline
from rljax.planning.sharding_report import (
    ShardingReport,
    collective_table,
    describe,
    pipeline_tables,
)
from rljax.planning.tables import Table, Tables, count, seconds, size
from rljax.planning.work import Work, batch_bytes, rows_bytes

KEPT = ("master weights", "optimizer moments")
"""The kinds that training keeps from step to step."""
ROWS, SAMPLED, POOL, SAMPLER = (
    "rows of a mini-batch",
    "sampled batch",
    "KV pool",
    "sampler's weights",
)
OUTPUT = "sampler's output matrix"
_HELD = (*KEPT, ROWS, SAMPLED, POOL, SAMPLER, OUTPUT)
_PHASES = {"train": "update", "score": "score", "prefill": "prefill", "decode": "rollout"}
"""Compiled program -> the phase that it computes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Tables):
    """Memory, communication and time of a step on a machine; prints as tables.

    Attributes:
      topology: The machine.
      sharding: Parameters, their bytes by kind, and collectives.
      update: Bytes per device while updating, by kind.
      score: Bytes per device while the trainer scores a rollout batch.
      prefill: Bytes per device while the sampler computes prompts.
      rollout: Bytes per device while it decodes.
      update_time: The least time of one optimizer step.
      score_time: The least time to score a rollout batch.
      rollout_time: The least time of a rollout batch.
      updates: Optimizer steps of a rollout batch.
      on_host: Bytes per device that are kept in the host's memory.
      attention: What computes attention in training and scoring, by name.
    """

    topology: Topology
    sharding: ShardingReport
    update: dict[str, int]
    score: dict[str, int]
    prefill: dict[str, int]
    rollout: dict[str, int]
    update_time: Roofline
    score_time: Roofline
    rollout_time: Roofline
    updates: int
    on_host: int
    attention: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, int]:
        """Bytes per device of the arguments of each compiled program."""
        shared = self.sharding.totals["master weights"]
        return {
            "train": sum(self.update[kind] for kind in (*KEPT, ROWS)),
            "score": self.score["master weights"] + self.score[SAMPLED],
            "prefill": (self.prefill[SAMPLER] or shared) + self.prefill[POOL],
            "decode": (self.rollout[SAMPLER] or shared) + self.rollout[POOL],
        }

    @property
    def temporaries(self) -> dict[str, int]:
        """Bytes per device of the temporaries of each compiled program."""
        return {
            program: sum(n for kind, n in getattr(self, phase).items() if kind not in _HELD)
            for program, phase in _PHASES.items()
        }

    @property
    def resident(self) -> dict[str, int]:
        """Bytes per device that stay in memory, unused, while each compiled program runs."""
        arguments = self.arguments
        return {
            program: sum(n for kind, n in getattr(self, phase).items() if kind in _HELD)
            - arguments[program]
            for program, phase in _PHASES.items()
        }

    @property
    def peak(self) -> int:
        """The most bytes per device, of all phases."""
        return max(sum(getattr(self, phase).values()) for phase in _PHASES.values())

    @property
    def fits(self) -> bool:
        """Whether the peak fits in a chip's memory."""
        return self.peak <= self.topology.chip.memory

    @property
    def seconds(self) -> float:
        """The least time of a whole step, if everything overlaps perfectly."""
        updates = self.updates * self.update_time.seconds
        # The only update of a batch needs no scores: the live policy is the one that they are of.
        scores = self.score_time.seconds if self.updates > 1 else 0.0
        return self.rollout_time.seconds + scores + updates

    def tables(self) -> list[Table]:
        """Parameters, memory, pipelines, collectives, times."""
        report = self.sharding
        return [
            self._memory(),
            *pipeline_tables(report.schedules),
            collective_table("Sent by each device in an optimizer step", report.collectives),
            self._times(),
        ]

    def _memory(self) -> Table:
        chip, report = self.topology.chip, self.sharding
        phases = [getattr(self, phase) for phase in _PHASES.values()]
        kinds = dict.fromkeys(kind for phase in phases for kind in phase)
        held = [(k, *(size(p[k]) if k in p else "" for p in phases)) for k in kinds]
        sums = [sum(phase.values()) for phase in phases]
        held.append(("all", *map(size, sums)))
        if self.on_host:
            held.append(("in the host's memory", *[size(self.on_host)] * len(phases)))
        held.append(("fits", *("yes" if n <= chip.memory else "NO" for n in sums)))
        where = ", ".join(f"{name}={n}" for name, n in report.mesh.items()) or "one device"
        return Table(
            f"{count(report.parameters)} parameters, {count(report.active)} active, on "
            f"{self.topology.num_chips} {chip.name} ({where}); attention: "
            f"{', '.join(self.attention)}",
            (f"bytes per device, of {size(chip.memory)}", *_PHASES.values()),
            held,
        )

    def _times(self) -> Table:
        times = (
            ("update", self.update_time),
            ("score", self.score_time),
            ("rollout batch", self.rollout_time),
        )
        scoring = ", its scoring and " if self.updates > 1 else " and "
        return Table(
            f"Least times; a step is a rollout batch{scoring}{self.updates} update(s): "
            f"{seconds(self.seconds)}",
            ("", "compute", "memory", "links", "bound by"),
            [
                (name, *(seconds(getattr(t, r)) for r in ("compute", "memory", "links")), t.bound)
                for name, t in times
            ],
        )


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
    report, chip = describe(mesh, config, work, train_rules), topology.chip
    placed, totals = report.rows, report.totals
    on_host_bytes = totals["optimizer moments"] if on_host else 0
    totals["optimizer moments"] -= on_host_bytes
    kept = {kind: totals[kind] for kind in KEPT}
    shards = meshes.batch_shards(mesh)
    pool = {POOL: memory.kv_pool(mesh, config, work)}
    sampler, output = memory.rollout_weights(placed, mesh, config, rollout_rules)
    given = (mesh, config, work, placed, chip.platform)
    return Plan(
        topology=topology,
        sharding=report,
        update=totals
        | {ROWS: rows_bytes(config, work, mesh) // shards}
        | memory.activations(*given)
        | pool,
        score=kept
        | {"compute weights": totals["compute weights"]}
        | {SAMPLED: batch_bytes(config, work, mesh) // shards}
        | memory.scoring(*given)
        | pool,
        prefill=kept
        | {SAMPLER: sampler - output, OUTPUT: output}
        | {"prefill activations": memory.prefill_activations(mesh, config, work, rollout_rules)}
        | pool,
        rollout=kept
        | {SAMPLER: sampler}
        | {"decode activations": memory.decode_activations(mesh, config, work)}
        | pool,
        update_time=roofline.update(chip, mesh, config, work, placed, report.collectives),
        score_time=roofline.score(chip, mesh, config, work, placed),
        rollout_time=roofline.rollout(
            chip, mesh, config, work, placed, sampler or totals["master weights"], rollout_rules
        ),
        updates=work.updates,
        on_host=on_host_bytes + memory.offloaded(mesh, config, work),
        attention=tuple(
            dict.fromkeys(
                attention.implementation(mesh, config, b.attention, work, chip.platform)
                for b in config.layers
            )
        ),
    )
