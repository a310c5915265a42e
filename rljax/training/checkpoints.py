"""Checkpoints of a run: sharded, asynchronous, atomic; the newest whole one is found again."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from rljax import processes
from rljax.models import Params
from rljax.training.state import TrainState

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run directory, by orbax.

    A checkpoint holds the train state and a JSON dict of everything the host knows: counters, the
    data position, kept groups, running estimates. It is written to a temporary name and renamed
    when whole, so that a run killed at any instant never finds half of one. Of several processes
    each writes and reads its own shards, all in one directory; which checkpoint is restored, the
    first decides.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Opens the directory, creating it.

        Args:
          directory: Where the checkpoints lie, one folder a step.
          keep: How many of the newest are kept.
        """
        self._directory = directory.absolute()
        processes.on_first(functools.partial(directory.mkdir, parents=True, exist_ok=True))
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=False,
            # Where the processes are named, they meet on the host, and not by a device's program.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count()))
            ),
        )
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self._directory, options=self._options, item_names=("state", "host")
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints at hand, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Writes a checkpoint in the background; returns once the state may be changed.

        The frozen weights under adapters are left out: `save_reference` keeps them.
        """
        state = dataclasses.replace(state, base=None)
        if jax.default_backend() == "cpu":
            # Host arrays are views of the buffers there, which the next update is given to reuse.
            state = jax.tree.map(jnp.copy, state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
            ),
        )

    def restore(self, target: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
        """The newest checkpoint that can be read, on the target's shardings; None if none can.

        One that cannot be read is reported, set aside as `unreadable-<step>`, and the one before
        it is tried.

        Args:
          target: Shapes, dtypes and shardings to restore into.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore()
        )
        for step in processes.on_first(lambda: self.steps[::-1]):
            found, trouble = None, ""
            try:
                found = self._manager.restore(step, args=args)
            except Exception as error:  # whatever a damaged file makes of itself
                trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
            troubles = [*filter(None, processes.exchange(trouble))]  # of any process
            if found is not None and not troubles:
                return step, found["state"], found["host"]
            self._manager.close()
            processes.on_first(self._set_aside, step, troubles[0])
            self._manager = self._open()
        return None

    def _set_aside(self, step: int, trouble: str) -> None:
        _log.error(
            "checkpoint of step %d cannot be read (%s); trying the one before", step, trouble
        )
        place = self._directory / str(step)
        place.rename(self._directory.parent / f"unreadable-{step}-{place.stat().st_mtime_ns}")

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def save_reference(directory: Path, params: Params) -> None:
    """Writes the policy that a run started from, in place of what lay there."""
    with ocp.StandardCheckpointer() as saver:
        saver.save(directory.absolute(), params, force=True)


def load_reference(directory: Path, target: Params) -> Params:
    """Reads the policy that a run started from onto the target's shardings."""
    with ocp.StandardCheckpointer() as saver:
        return saver.restore(directory.absolute(), target)
