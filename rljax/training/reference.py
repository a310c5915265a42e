"""The reference policy: the policy before the first step, kept for KL penalties and adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from rljax import mesh as meshes
from rljax import models
from rljax.errors import InputError
from rljax.models import Params
from rljax.training.policy import Policy
from rljax.training.state import TrainState


def freeze_reference(
    directory: Path,
    policy: Policy,
    train: TrainState,
    *,
    compares: bool,
    restored: bool,
    on_host: bool = False,
) -> tuple[TrainState, Params | None]:
    """Keeps the policy as it is now, where an objective compares with it or adapters need it.

    It is written before the first step and read back on resume. Under adapters it is the weights
    that never change, in the dtypes of the forward pass.

    Args:
      directory: Where it is written.
      policy: The policy.
      train: The train state before the first step, or a restored one.
      compares: Whether the objective compares with it.
      restored: Whether the run is continued.
      on_host: Whether it is kept in host memory.

    Returns:
      The train state, with the adapters' frozen weights, and the reference; None where the
      objective does not compare.

    Raises:
      InputError: A continued run has none.
    """
    adapts = policy.lora is not None
    if not (compares or adapts):
        return train, None
    target = models.abstract(policy.model, mesh=policy.mesh, rules=policy.rules)
    if adapts:
        cast = jax.eval_shape(lambda p: models.cast_for_compute(p, policy.model), target)
        target = jax.tree.map(
            lambda x, d: jax.ShapeDtypeStruct(x.shape, d.dtype, sharding=x.sharding), target, cast
        )
    if on_host:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=meshes.on_host(x.sharding)),
            target,
        )
    with ocp.StandardCheckpointer() as checkpointer:
        place = directory.absolute()
        if not restored:
            whole = train.whole
            saved = models.cast_for_compute(whole, policy.model) if adapts else whole
            checkpointer.save(place, saved, force=True)
            checkpointer.wait_until_finished()
        elif not directory.is_dir():
            raise InputError(
                f"{directory} is missing: the run compares with it or adapts it; restore it, or "
                "choose another run_dir"
            )
        reference = checkpointer.restore(place, target)
    if adapts:
        train = dataclasses.replace(train, base=reference)
    return train, reference if compares else None
