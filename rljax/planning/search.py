"""Meshes that a model fits on, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models import ModelConfig
from rljax.planning.chips import Topology
from rljax.planning.plan import Plan, plan
from rljax.planning.tables import Table, seconds, size
from rljax.planning.work import Work

SEARCHED = ("data", "fsdp", "expert", "context", "tensor", "stage")
"""The axes whose sizes are tried."""


def search(
    config: ModelConfig,
    topology: Topology,
    work: Work,
    train_rules: meshes.Rules = meshes.TRAIN_RULES,
    rollout_rules: meshes.Rules = meshes.ROLLOUT_RULES,
    on_host: bool = False,
) -> list[Plan]:
    """Plans every mesh of the machine's chips and returns those whose memory fits.

    Args:
      config: The model.
      topology: The machine.
      work: The sizes of a step.
      train_rules: How weights are sharded in the update: logical axis -> mesh axes.
      rollout_rules: How weights are sharded while sampling.
      on_host: Whether the optimizer's moments are kept in the host's memory.

    Returns:
      Plans, the shortest estimated step first; of equal ones, the one with least memory.

    Raises:
      InputError: No mesh fits; with what the one of least memory needs.
    """
    found, nearest, refusal = [], None, ""
    axes = SEARCHED if config.num_experts else tuple(a for a in SEARCHED if a != "expert")
    for sizes in _factors(topology.num_chips, axes):
        mesh = meshes.make_abstract(topology.num_chips, **sizes)
        try:
            planned = plan(config, topology, mesh, work, train_rules, rollout_rules, on_host)
        except InputError as error:  # something does not divide over this mesh
            refusal = str(error)
            continue
        if planned.fits:
            found.append(planned)
        if nearest is None or planned.peak < nearest.peak:
            nearest = planned
    if not found:
        reason = refusal
        if nearest is not None:
            need = size(nearest.peak)
            reason = f"the least is {need} a device on {nearest.sharding.mesh}"
        raise InputError(
            f"no mesh of {topology.name} ({size(topology.chip.memory)} a chip) holds it: {reason}; "
            "take more chips, fewer slots or shorter rows"
        )
    return sorted(found, key=lambda p: (p.seconds, p.peak))


def ranking(plans: Sequence[Plan], most: int = 10) -> Table:
    """The first plans of a search as a table.

    Args:
      plans: What `search` returns.
      most: How many to show.
    """
    body = [
        (
            ",".join(f"{name}={n}" for name, n in p.sharding.mesh.items()) or "all axes 1",
            seconds(p.seconds),
            seconds(p.rollout_time.seconds),
            f"{p.updates} × {seconds(p.update_time.seconds)}",
            p.update_time.bound,
            size(p.peak),
        )
        for p in plans[:most]
    ]
    head = ("mesh", "step", "rollout", "updates", "update bound by", "bytes/device")
    return Table(f"{len(plans)} meshes fit; the fastest by estimate", head, body)


def _factors(n: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to write n as a product of one size for each name."""
    if len(names) == 1:
        yield {names[0]: n}
        return
    for first in range(1, n + 1):
        if n % first == 0:
            for rest in _factors(n // first, names[1:]):
                yield {names[0]: first, **rest}
