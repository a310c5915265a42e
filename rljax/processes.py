"""A run of several processes: all run the same script, each on the devices of its own host.

Every process makes the host's decisions itself, from data that all processes have. So all of them
launch the same device programs in the same order. Functions here that exchange data must be called
by all processes.
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

BARRIER_TIMEOUT_S = 24 * 3600
"""How long processes wait for one another, such as for the first one's evaluation or checkpoint. A
process that died is noticed much earlier, by its missing heartbeat."""

_barriers = itertools.count()


def initialize(settings: ProcessSettings) -> None:
    """Connects the processes of a run; must be called before the first use of a device.

    Without a coordinator in the settings, `jax.distributed.initialize` detects the cluster (Slurm,
    Open MPI, GKE, TPU pods); where there is none, the run has this process only.

    Args:
      settings: The coordinator's address, and this process's number.

    Raises:
      InputError: The settings do not fit together.
    """
    _check(settings)
    # On CPU devices two programs with collectives in flight at once can deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # For a single process, JAX's Slurm detection would use only the first GPU of the host.
    if settings.num_processes == 1 or os.environ.get("SLURM_NTASKS") == "1":
        return
    # JAX's preemption service would catch SIGTERM, and nothing here reads its notice.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on Kubernetes without its Python client
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
    coordinator, number, index = settings.coordinator, settings.num_processes, settings.process_id
    if settings.heartbeat_timeout < 1:
        raise InputError(f"heartbeat_timeout={settings.heartbeat_timeout} must be at least 1 s")
    if number is not None and number < 1:
        raise InputError(f"num_processes={number} must be at least 1")
    given = (bool(coordinator), number is not None, index is not None)
    alone = number == 1 and given == (False, True, False)
    if any(given) and not all(given) and not alone:
        raise InputError(
            f"coordinator={coordinator!r}, num_processes={number}, process_id={index} go together; "
            "give all three, or none on a cluster that is detected (Slurm, GKE, TPU pods)"
        )
    if number is not None and index is not None and not 0 <= index < number:
        raise InputError(
            f"process_id={index} must be from 0 to {number - 1}, for {number} processes"
        )
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdigit()):
        raise InputError(
            f"coordinator={coordinator!r} is not HOST:PORT; give the host of process 0 and a free "
            "port of it"
        )


# The watcher's standard input closes when this process ends; it writes its line if it read nothing.
_WATCHER = "import sys; sys.stdin.buffer.read() or sys.stderr.write(sys.argv[1])"


def report_crash(heartbeat_timeout: int) -> None:
    """Starts a small watcher process that writes one line of explanation if this process crashes.

    When one process of a run dies, the JAX runtime aborts the others, or a collective fails in
    them. After an abort no Python code of this process runs any more.

    Args:
      heartbeat_timeout: Seconds after which the runtime counts a silent process as dead.
    """
    line = (
        f"error: process {jax.process_index()} of {jax.process_count()} ended in the middle of the "
        "run: it failed, was killed, or did not hear from another process for "
        f"{heartbeat_timeout} s; start all processes again with the same command, to continue from "
        "the newest checkpoint\n"
    )
    watcher = subprocess.Popen(
        [sys.executable, "-E", "-S", "-c", _WATCHER, line],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a keyboard interrupt is meant for the run only
    )

    def end() -> None:
        if not hasattr(sys, "last_value"):  # set by an uncaught exception
            watcher.communicate(b"no crash")

    atexit.register(end)


def is_first() -> bool:
    """Whether this is process 0, which writes the run's files and shows its progress."""
    return jax.process_index() == 0


def put(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts a host array on the devices.

    Args:
      x: The whole array, the same on every process; each process puts the shards of its own
        devices.
      sharding: How it is split over devices.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: Any) -> Any:
    """Brings device arrays to the host, whole, on every process.

    Args:
      tree: Arrays. Those with shards on other processes are gathered by one device program, so
        that all processes must call this.

    Returns:
      The tree with numpy arrays.
    """

    def is_remote(x: Any) -> bool:
        if not isinstance(x, jax.Array):
            return False
        return not (x.is_fully_addressable or x.is_fully_replicated)

    remote = [x for x in jax.tree.leaves(tree) if is_remote(x)]
    if remote:
        sharding: Any = remote[0].sharding
        tree = _replicate(sharding.mesh)(tree)
    return jax.device_get(tree)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Any], Any]:
    """The program that gathers all arrays of a tree, one for each mesh."""
    return run_serially(jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P())))


def run_serially(program: Callable[..., Value]) -> Callable[..., Value]:
    """Wraps a device program to wait for its end, on CPU devices of several processes.

    The CPU devices of a process may start a program at different times. Collectives of two programs
    that run at once then wait for each other for ever.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return program
    return lambda *arguments: jax.block_until_ready(program(*arguments))


def share(size: int) -> slice:
    """This process's contiguous share of `size` items, where work is divided among processes."""
    number, index = jax.process_count(), jax.process_index()
    return slice(size * index // number, size * (index + 1) // number)


def exchange(value: Value) -> list[Value]:
    """Sends a value to all processes, and waits for theirs.

    Args:
      value: Anything that can be pickled.

    Returns:
      The values of all processes, in the order of their numbers.
    """
    if jax.process_count() == 1:
        return [value]
    _barrier()
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _gather(np.asarray([len(own)], np.int32))[:, 0]
    # Padded to a power of two: each length is a program of its own.
    padded = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)
    padded[: len(own)] = own
    gathered = _gather(padded)
    return [pickle.loads(x[:n].tobytes()) for x, n in zip(gathered, sizes, strict=True)]


def _gather(x: np.ndarray) -> np.ndarray:
    """Arrays [...] of all processes, all of one shape, as [processes, ...]."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.asarray(devices).reshape(jax.process_count(), -1)
    by_process = NamedSharding(Mesh(grid, ("process", "local")), P("process"))
    return fetch(jax.make_array_from_process_local_data(by_process, x[None]))


def _barrier() -> None:
    """Waits on the host for all processes, because CPU collectives fail after 30 s of waiting."""
    from orbax.checkpoint import multihost

    multihost.sync_global_processes(
        f"rljax-{next(_barriers)}",
        timeout=BARRIER_TIMEOUT_S,
        processes=set(range(jax.process_count())),
    )


def on_first(function: Callable[..., Value], *arguments: Any) -> Value:
    """Calls a function on process 0 only and gives every process its result.

    Args:
      function: What to call; its result must be picklable.
      *arguments: Its arguments.

    Raises:
      ValueError: The function raised it, on all processes; and likewise OSError. Other exceptions
        end process 0.
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
      values: Names and values; the names must be the same on all processes.

    Raises:
      InputError: Names the first value that differs, on all processes.
    """
    given = exchange(values)
    for index, other in enumerate(given):
        for name, value in given[0].items():
            if other[name] != value:
                raise InputError(
                    f"process 0 has {name}={value!r}, process {index} {name}={other[name]!r}; "
                    "start all processes with the same command, on the same files"
                )
