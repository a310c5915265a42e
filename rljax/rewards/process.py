"""A reward worker as the trainer sees it: started, called within a time limit, killed."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rljax.errors import InputError
from rljax.rewards import worker
from rljax.rewards.worker import Outcome

# Importing what a user's function needs may take long; it is not the function's own time.
STARTUP_S = 120.0


class CannotPickleError(InputError):
    """A function that cannot be sent to a process of its own."""


class Reply(NamedTuple):
    """What a call returned: outcomes, or why the call as a whole failed and whether it hung."""

    outcomes: list[Outcome] | None
    reason: str = ""
    hung: bool = False


class RewardProcess:
    """One user's reward function in one process, restarted after it hung or died.

    Args to the constructor:
      function: "path/to/file.py:function", "module:function", or a function, which is pickled by
        cloudpickle (by value where it stems from a notebook or script).
      timeout_s: Seconds that a call may take.
      output: The file to which what the function prints is appended; None: standard error.

    The process never sees an accelerator through jax (JAX_PLATFORMS is cpu there), has no input,
    ignores a keyboard interrupt meant for the trainer, and ends when the trainer does.
    """

    def __init__(
        self, function: str | Callable[..., Any], timeout_s: float, output: str | Path | None = None
    ):
        """Starts the process; InputError where the function cannot be loaded."""
        self._timeout_s = timeout_s
        self._payload = function if isinstance(function, str) else _pickle(function)
        # As they are now, so that a process started anew finds what this one finds.
        self._folder = os.getcwd()
        self._path = [entry or self._folder for entry in sys.path]
        self._output = None if output is None else Path(output).absolute()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], None] = lambda: None
        self.accepts: set[str] | None
        self.requires: set[str]
        self.accepts, self.requires = self._start()

    def call(self, arguments: dict[str, list[Any]], size: int) -> Reply:
        """Calls the function with keyword arguments for `size` samples; never raises."""
        try:
            request = pickle.dumps((arguments, size), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return Reply(None, f"could not send the samples: {worker.one_line(error)}")
        with self._lock:
            if self._process is None:
                try:
                    self._start()
                except ValueError as error:
                    return Reply(None, str(error))
            try:
                self._requests.send_bytes(request)
                if not self._replies.poll(self._timeout_s):
                    self._kill()
                    return Reply(None, f"took longer than {self._timeout_s:g} s", hung=True)
                _, reply = self._replies.recv()
            except (EOFError, OSError):
                return Reply(None, f"ended its process ({self._kill()})")
        return Reply(None, reply) if isinstance(reply, str) else Reply(reply)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._kill()

    def _start(self) -> tuple[set[str] | None, set[str]]:
        request_end, self._requests = _pipe()
        self._replies, reply_end = _pipe()
        fds = (request_end.fileno(), reply_end.fileno())
        # A path, not a module: importing rljax.rewards would load numpy for nothing.
        command = [sys.executable, "-u", "-P", worker.__file__, *map(str, fds)]
        with contextlib.ExitStack() as stack:
            output: Any = 2
            if self._output is not None:
                output = stack.enter_context(open(self._output, "ab"))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        request_end.close()
        reply_end.close()
        self._stop = weakref.finalize(self, _end, self._process, self._requests, self._replies)
        setup = {
            "path": self._path,
            "function": self._payload,
            "timeout_s": self._timeout_s,
            "pickled": not isinstance(self._payload, str),
        }
        try:
            self._requests.send_bytes(pickle.dumps(setup))
            if not self._replies.poll(STARTUP_S):
                raise InputError(
                    f"loading the reward function took longer than {STARTUP_S:g} s: import less"
                )
            state, reply = self._replies.recv()
        except (EOFError, OSError):
            status = self._kill()
            raise InputError(
                f"loading the reward function ended its process ({status}): fix its imports"
            ) from None
        except ValueError:
            self._kill()
            raise
        if state == "failed":
            self._kill()
            raise InputError(reply)
        return reply

    def _kill(self) -> str:
        """Ends the process; returns its exit status or signal, if it had ended before."""
        process, self._process = self._process, None
        if process is None:
            return "not running"
        # A process that closed its pipes is about to end: wait for its own status.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        self._stop()
        code = process.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _pipe() -> tuple[Connection, Connection]:
    read, write = os.pipe()
    return Connection(read, writable=False), Connection(write, readable=False)


def _end(process: "subprocess.Popen[bytes]", *pipes: Connection) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that the function itself started
    process.wait()
    for pipe in pipes:
        pipe.close()


def _pickle(function: Callable[..., Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise CannotPickleError(
            f"reward function {name} cannot be sent to a process of its own "
            f"({worker.one_line(error)}): keep it in a file and name it path/to/file.py:{name}"
        ) from None
