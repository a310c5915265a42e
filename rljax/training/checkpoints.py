"""Checkpoints of a run: sharded, asynchronous, atomic; the newest readable one is found again."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from rljax import processes
from rljax.errors import InputError
from rljax.training.state import RunState, TrainState

_log = logging.getLogger(__name__)

# What readers say of data that are not what was written. All else may pass: no memory, no
# permission, a file system that is away for a moment.
_DAMAGE = re.compile(
    r"DATA_LOSS|INVALID_ARGUMENT|NOT_FOUND|FAILED_PRECONDITION|OUT_OF_RANGE|checksum|corrupt|"
    r"decod|decompress|parse|Expecting|Extra data|Unterminated|truncated|not found|does not exist",
    re.IGNORECASE,
)


class Checkpoints:
    """The checkpoints of one run directory, by orbax.

    A checkpoint holds a `RunState`: the train state, and as JSON all that only the host knows. It
    is written to a temporary name and renamed when whole, so that a run killed at any instant
    never finds half of one. Of several processes each writes and reads its own shards, all in one
    directory; which checkpoint is restored, the first decides.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Opens the directory, creating it.

        Args:
          directory: Where the checkpoints are, one folder a step.
          keep: How many of the newest are kept.
        """
        self._directory = directory.absolute()
        processes.on_first(functools.partial(directory.mkdir, parents=True, exist_ok=True))
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=False,
            # With the processes named, they synchronise on the host, not by a device's program.
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

    def save(self, state: RunState) -> None:
        """Writes a checkpoint in the background; returns once the state may be changed.

        The frozen weights under adapters are left out: they are the reference's.
        """
        train = dataclasses.replace(state.train, base=None)
        if jax.default_backend() == "cpu":
            # Host arrays are views of the buffers there, which the next update is given to reuse.
            train = jax.tree.map(jnp.copy, train)
        self._manager.save(
            state.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(train), host=ocp.args.JsonSave(state.host())
            ),
        )

    def restore(
        self, target: TrainState, check: Callable[[dict[str, Any]], None] = lambda host: None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint that can be read; None where there is no checkpoint.

        A checkpoint whose data are damaged is reported, set aside as `unreadable-<step>` and the
        one before it is used. Where none can be read nothing is renamed, and the run stops: it is
        never started anew over checkpoints.

        Args:
          target: Shapes, dtypes and shardings to restore into.
          check: Raises InputError where the host's part is of another run, such as one over other
            data.

        Returns:
          The train state on the target's shardings, and the host's part.

        Raises:
          InputError: The checkpoints are of another run or model, are all damaged, or cannot be
            read now for another reason, such as memory or permission.
        """
        steps = processes.on_first(lambda: self.steps[::-1])
        damaged: list[tuple[int, str]] = []
        for step in steps:
            found, trouble = self._read(step, target, check)
            if found is not None:
                self._set_aside(damaged)
                return found
            damaged.append((step, trouble))
        if damaged:
            raise InputError(
                f"none of the checkpoints {', '.join(str(s) for s, _ in damaged)} in "
                f"{self._directory} can be read ({damaged[0][1]}); restore one from a copy, or "
                "choose another run_dir"
            )
        return None

    def _read(
        self, step: int, target: TrainState, check: Callable[[dict[str, Any]], None]
    ) -> tuple[tuple[TrainState, dict[str, Any]] | None, str]:
        """A checkpoint, or in what way it is damaged; all processes agree on which."""
        found, trouble, damage = None, "", False
        try:
            host = self._manager.restore(
                step, args=ocp.args.Composite(host=ocp.args.JsonRestore())
            )["host"]
            check(host)
            self._check_fits(step, target)
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            found = self._manager.restore(step, args=args)["state"], host
        except InputError:
            raise
        except Exception as error:  # readers raise errors of many classes
            trouble = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            damage = is_damage(error)
        told = processes.exchange((trouble, damage))
        troubles = [text for text, _ in told if text]
        if not troubles:
            return found, ""
        if not all(damaged for text, damaged in told if text):
            raise InputError(
                f"checkpoint of step {step} in {self._directory} cannot be read now "
                f"({troubles[0]}); nothing was changed: remove the cause and start again"
            )
        return None, troubles[0]

    def _check_fits(self, step: int, target: TrainState) -> None:
        """Refuses a checkpoint of another model, before anything is read or renamed."""
        metadata = ocp.StandardCheckpointHandler().metadata(self._directory / str(step) / "state")
        saved = getattr(metadata, "tree", metadata)

        def shapes(tree: Any) -> dict[str, Any]:
            leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
            return {_name(path): tuple(x.shape) for path, x in leaves if hasattr(x, "shape")}

        have, want = shapes(saved), shapes(target)
        for name in sorted(have.keys() | want.keys()):
            if have.get(name) != want.get(name):
                raise InputError(
                    f"checkpoint of step {step} in {self._directory} does not fit: {name} has "
                    f"shape {have.get(name, 'none')} there, {want.get(name, 'none')} here; give "
                    "the model, vocabulary and optimizer of the run, or choose another run_dir"
                )

    def _set_aside(self, damaged: list[tuple[int, str]]) -> None:
        """Renames damaged checkpoints, now that an older one was read."""
        if not damaged:
            return
        self._manager.close()
        for step, trouble in damaged:
            processes.on_first(self._rename, step, trouble)
        self._manager = self._open()

    def _rename(self, step: int, trouble: str) -> None:
        _log.error("checkpoint of step %d cannot be read (%s); using the one before", step, trouble)
        place = self._directory / str(step)
        place.rename(self._directory.parent / f"unreadable-{step}-{place.stat().st_mtime_ns}")

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def is_damage(error: BaseException) -> bool:
    """Whether an error of a reader proves that the data are not what was written."""
    if isinstance(error, MemoryError | PermissionError):
        return False
    if isinstance(error, FileNotFoundError | json.JSONDecodeError | UnicodeDecodeError):
        return True
    if isinstance(error, OSError):
        return False
    return _DAMAGE.search(str(error)) is not None


def _name(path: Any) -> str:
    """A leaf's path, the same for the saved tree (dicts) and for the target (dataclasses)."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )
