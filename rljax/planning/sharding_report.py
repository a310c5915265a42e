"""How a model is sharded over a mesh: shards, bytes per device, communication of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.models import ModelConfig
from rljax.models.pipeline import Schedule
from rljax.planning.collectives import Collective
from rljax.planning.communication import update_collectives
from rljax.planning.placement import KINDS, ShardedParameter, shard_parameters
from rljax.planning.tables import Table, Tables, count, size
from rljax.planning.work import Work


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingReport(Tables):
    """How a model is sharded over a mesh; prints as tables, as HTML in a notebook.

    Attributes:
      mesh: Sizes of the mesh axes that are not 1.
      parameters: Number of parameters.
      active: Number of parameters that one token uses.
      rows: Every parameter.
      parts: Micro-batches of an optimizer step.
      schedules: The pipeline schedule of each stack of layers; None: not pipelined.
      collectives: The communication of an optimizer step.
    """

    mesh: dict[str, int]
    parameters: int
    active: int
    rows: tuple[ShardedParameter, ...]
    parts: int
    schedules: tuple[Schedule | None, ...]
    collectives: tuple[Collective, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes per device by kind."""
        each = [row.bytes(self.parts) for row in self.rows]
        return {kind: sum(row[kind] for row in each) for kind in KINDS}

    def tables(self) -> list[Table]:
        """Parameters, bytes by kind, pipelines, collectives."""
        where = ", ".join(f"{name}={n}" for name, n in self.mesh.items()) or "one device"
        total = self.totals
        return [
            Table(
                f"{count(self.parameters)} parameters ({count(self.active)} active) on {where}",
                ("parameter", "shape", "logical axes", "split over", "shard", "bytes/device"),
                [
                    (
                        row.name,
                        "×".join(map(str, row.shape)),
                        ", ".join(a or "·" for a in row.axes),
                        ", ".join("×".join(meshes.axes_of([a])) or "·" for a in row.spec),
                        "×".join(map(str, row.shard)),
                        size(sum(row.bytes(self.parts).values())),
                    )
                    for row in self.rows
                ],
            ),
            Table(
                "Kept by each device for training",
                ("kind", "bytes"),
                [*((k, size(n)) for k, n in total.items()), ("all", size(sum(total.values())))],
            ),
            *pipeline_tables(self.schedules),
            collective_table("Sent by each device in an optimizer step", self.collectives),
        ]


def pipeline_tables(schedules: Sequence[Schedule | None]) -> list[Table]:
    """Pipelines as a table, where there are any."""
    head = ("stack", "layers", "pieces a stage", "of layers", "micro-batches", "stages wait")
    body = [
        (
            str(i),
            str(s.layers),
            str(s.repeats),
            str(s.depth),
            str(s.micro_batches),
            f"{s.bubble:.0%}",
        )
        for i, s in enumerate(schedules)
        if s is not None
    ]
    return [Table("Layers as a pipeline", head, body)] if body else []


def collective_table(title: str, collectives: tuple[Collective, ...]) -> Table:
    """Collectives as a table."""
    body = [(c.kind, c.axis, size(c.bytes), c.why) for c in collectives]
    return Table(title, ("collective", "mesh axis", "bytes", "why"), body)


def describe(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    work: Work | None = None,
    rules: meshes.Rules = meshes.TRAIN_RULES,
) -> ShardingReport:
    """How a model is sharded over a mesh while training; nothing is allocated.

    Args:
      mesh: A mesh with the axes of `rljax.mesh.AXES`; it may be abstract.
      config: The model.
      work: The sizes of a step; by default one response for each shard of the batch.
      rules: Logical axis -> mesh axes.

    Returns:
      Tables of parameters, bytes and collectives.

    Raises:
      InputError: A parameter or the batch does not divide over the mesh.
    """
    if work is None:
        n = meshes.batch_shards(mesh)
        work = Work(prompts_per_step=n, num_generations=1, mini_batch_size=n, slots=n)
    rows = shard_parameters(mesh, config, rules)
    return ShardingReport(
        mesh={name: n for name, n in mesh.shape.items() if n > 1},
        parameters=models.count(config),
        active=models.count_active(config),
        rows=tuple(rows),
        parts=work.parts(mesh),
        schedules=work.schedules(mesh, config),
        collectives=tuple(update_collectives(mesh, config, work, rows)),
    )
