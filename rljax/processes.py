"""Several processes, one run: all run the same program, each on the devices of its own host.

What the host decides, every process decides by itself from data that all of them hold; so they
issue the same programs in the same order, and functions that exchange anything are called by all.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from rljax.config import ProcessSettings
from rljax.errors import InputError

Value = TypeVar("Value")

# A process that died is noticed by its heartbeat long before.
BARRIER_TIMEOUT_S = 24 * 3600
_meetings = itertools.count()


def initialize(settings: ProcessSettings) -> None:
    """Joins the processes of a run; to be called before anything touches a device.

    Where the settings name no coordinator, the cluster is asked (what `jax.distributed.initialize`
    finds by itself: Slurm, Open MPI, GKE, TPU pods); without one, this process is the only one.

    Args:
      settings: Where the others are.

    Raises:
      ValueError: The settings do not fit together; one line.
    """
    _check(settings)
    # Programs with collectives in flight at once can wait for each other for ever on CPU devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Slurm's detection would leave a single process the first GPU of its host alone.
    if settings.num_processes == 1 or os.environ.get("SLURM_NTASKS") == "1":
        return
    # It would keep SIGTERM from ending the process, and nothing here asks it for that notice.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Kubernetes without the package that asks it
            jax.distributed.initialize(
                settings.coordinator or None,
                settings.num_processes,
                settings.process_id,
                heartbeat_timeout_seconds=settings.heartbeat_timeout,
                shutdown_timeout_seconds=settings.heartbeat_timeout,
            )
    except ValueError:
        if settings.coordinator or "JAX_COORDINATOR_ADDRESS" in os.environ:
            raise
        return  # no cluster
    if jax.process_count() > 1:
        report_crash(settings.heartbeat_timeout)


def _check(settings: ProcessSettings) -> None:
    coordinator, number, place = settings.coordinator, settings.num_processes, settings.process_id
    if settings.heartbeat_timeout < 1:
        raise InputError(f"heartbeat_timeout={settings.heartbeat_timeout} must be at least 1 s")
    if number is not None and number < 1:
        raise InputError(f"num_processes={number} must be at least 1")
    given = (bool(coordinator), number is not None, place is not None)
    alone = number == 1 and given == (False, True, False)
    if any(given) and not all(given) and not alone:
        raise InputError(
            f"coordinator={coordinator!r}, num_processes={number}, process_id={place} go together; "
            "give all three, or none where the cluster tells (Slurm, GKE, TPU pods)"
        )
    if number is not None and place is not None and not 0 <= place < number:
        raise InputError(
            f"process_id={place} is none of the {number} processes; count from 0 to {number - 1}"
        )
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdigit()):
        raise InputError(
            f"coordinator={coordinator!r} is not HOST:PORT; give the host of process 0 and a port "
            "that is free there"
        )


_WATCH = "import sys; sys.stdin.buffer.read() or sys.stderr.write(sys.argv[1])"


def report_crash(heartbeat_timeout: int) -> None:
    """Has a small process say one line where this one does not come to an end of its own.

    The runtime aborts a process of which another died, or a collective fails at it, whichever is
    first; after an abort nothing of ours runs any more.
    """
    line = (
        f"error: process {jax.process_index()} of {jax.process_count()} ended in the middle of the "
        f"run: it failed, was killed, or had no word from another for {heartbeat_timeout} s; start "
        "all of them again by the same command, to go on from the newest checkpoint\n"
    )
    watch = subprocess.Popen(
        [sys.executable, "-E", "-S", "-c", _WATCH, line],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a keyboard interrupt is for the run
    )

    def end() -> None:
        if not hasattr(sys, "last_value"):  # an error that nobody caught
            watch.communicate(b"as it should")

    atexit.register(end)


def is_first() -> bool:
    """Whether this is the process that writes and shows what the run has to say."""
    return jax.process_index() == 0


def put(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts a host array on the devices.

    Args:
      x: The whole array, as every process has it; each brings the parts of its own devices.
      sharding: How it is to lie.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: Any) -> Any:
    """Brings device arrays to the host, whole, on every process.

    Args:
      tree: Arrays; those that span processes are gathered by one program, which all must run.

    Returns:
      The tree with numpy arrays.
    """

    def elsewhere(x: Any) -> bool:
        here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
        return not here

    apart = [x for x in jax.tree.leaves(tree) if elsewhere(x)]
    if apart:
        sharding: Any = apart[0].sharding
        tree = _replicate(sharding.mesh)(tree)
    return jax.device_get(tree)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Any], Any]:
    """One program that gathers all arrays of a tree."""
    return run_serially(jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P())))


def run_serially(program: Callable[..., Value]) -> Callable[..., Value]:
    """A program that ends before the next one begins, on CPU devices of several processes.

    There the devices of a process may come to a later program at different times, and collectives
    of two programs under way at once wait for each other for ever.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return program
    return lambda *arguments: jax.block_until_ready(program(*arguments))


def share(size: int) -> slice:
    """Which of `size` items are this process's own, where work is divided; they are contiguous."""
    number, place = jax.process_count(), jax.process_index()
    return slice(size * place // number, size * (place + 1) // number)


def exchange(value: Value) -> list[Value]:
    """What every process gives, by their numbers; waits until all have given.

    Args:
      value: Anything that can be pickled.
    """
    if jax.process_count() == 1:
        return [value]
    _meet()
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _gather(np.asarray([len(own)], np.int32))[:, 0]
    room = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)  # few sizes are compiled
    room[: len(own)] = own
    found = _gather(room)
    return [pickle.loads(x[:n].tobytes()) for x, n in zip(found, sizes, strict=True)]


def _gather(x: np.ndarray) -> np.ndarray:
    """Arrays [...] of all processes, one shape, as [processes, ...]."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.asarray(devices).reshape(jax.process_count(), -1)
    by_process = NamedSharding(Mesh(grid, ("process", "local")), P("process"))
    return fetch(jax.make_array_from_process_local_data(by_process, x[None]))


def _meet() -> None:
    """Waits on the host: CPU collectives that meet for the first time give up after 30 s."""
    from orbax.checkpoint import multihost

    everybody = set(range(jax.process_count()))
    name = f"rljax-{next(_meetings)}"
    multihost.sync_global_processes(name, timeout=BARRIER_TIMEOUT_S, processes=everybody)


def on_first(function: Callable[..., Value], *arguments: Any) -> Value:
    """Calls a function on the first process alone; all wait, and all get what it returns.

    Raises:
      ValueError: The function raised it, or OSError; on all processes.
    """
    outcome: Any = None
    if is_first():
        try:
            outcome = function(*arguments)
        except (ValueError, OSError) as error:
            outcome = error
    outcome = exchange(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def agree(values: dict[str, Any]) -> None:
    """Refuses values that differ between processes.

    Args:
      values: Names to values.

    Raises:
      ValueError: The first that differs, on all processes.
    """
    given = exchange(values)
    for place, other in enumerate(given):
        for name, value in given[0].items():
            if other[name] != value:
                raise InputError(
                    f"process 0 has {name}={value!r}, process {place} {name}={other[name]!r}; "
                    "start all processes by the same command, on the same files"
                )
