"""The process in which a user's reward function runs: one function, one thread, two pipes.

The file is started by its path, not as a module, and imports little more than the standard library,
so that a
worker starts fast and never loads jax. It exchanges pickles with `rljax.rewards.process` over two
pipes of its own; what the function prints goes to standard output as usual and cannot disturb
them.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import numbers
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rljax.errors import InputError, MissingFileError

# Each sample's outcome: a score, or one line with the reason why there is none.
Outcome = float | str

_LARGEST = 3.4028234e38  # of float32, in which rewards are kept


def load_function(reference: str) -> Callable[..., Any]:
    """Loads a reward function.

    Args:
      reference: "path/to/file.py:function" or "module:function".

    Returns:
      The function.

    Raises:
      ValueError: Where the reference is malformed, or nothing callable is found under it.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise InputError(
            f"reward function {reference!r} is not of the form path/to/file.py:function or "
            "module:function: write it so"
        )
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise MissingFileError(
                f"reward function {reference!r}: no file {where!r}: fix the path"
            )
        sys.path.append(str(path.parent.resolve()))  # so that it can import its neighbours
        spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        defined = [
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise InputError(
            f"reward function {reference!r}: {where!r} has no function {name!r}, it has "
            f"{', '.join(defined) or 'none'}: fix the name"
        )
    return function


def parameters(function: Callable[..., Any]) -> tuple[set[str] | None, set[str]]:
    """The keyword arguments a function takes (None: any), and those it cannot do without."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return None, set()
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in named if p.default is p.empty}
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None, required
    return {p.name for p in named}, required


def call(function: Callable[..., Any], arguments: dict[str, Any], size: int) -> list[Outcome] | str:
    """Calls a reward function and judges what it returns.

    Args:
      function: Returns one number for each sample.
      arguments: Its keyword arguments.
      size: How many samples there are.

    Returns:
      An outcome for each sample, or, where the call as a whole failed, one line with the reason.
    """
    try:
        result = function(**arguments)
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
            return f"returned {type(result).__name__} instead of a list of {size} numbers"
        values = list(result)
        if len(values) != size:
            return f"returned {len(values)} values for {size} samples"
        return [_outcome(value) for value in values]
    except BaseException as error:  # SystemExit too: a user's exit() must not end the worker
        return one_line(error)


def one_line(error: BaseException) -> str:
    """The error and the place it came from in one line, as short as can be."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return text[:300] + place


def _outcome(value: Any) -> Outcome:
    if value is None:
        return "returned None"
    if not isinstance(value, numbers.Real):
        # numpy's and jax's scalars and 0-d arrays are numbers, too
        if getattr(value, "shape", None) != () or not hasattr(value, "item"):
            return f"returned {type(value).__name__} instead of a number"
        value = value.item()
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return one_line(error)
    return number if abs(number) <= _LARGEST else f"returned {number:g}"


def _load(pickled: bool, payload: Any) -> Callable[..., Any]:
    return pickle.loads(payload) if pickled else load_function(payload)


def _read(requests: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    """Passes requests on; when the parent is gone, ends the process, whatever it is doing."""
    while True:
        try:
            inbox.put(requests.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(OSError):  # what the function started goes too
                if os.getpgrp() == os.getpid():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
            os._exit(0)


def main(request_fd: int, reply_fd: int) -> None:
    """Serves requests until the parent closes the pipe."""
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)  # processes the function starts do not hold them open
    requests, replies = Connection(request_fd, writable=False), Connection(reply_fd, readable=False)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, inbox), daemon=True).start()

    setup = pickle.loads(inbox.get())
    sys.path[:] = setup["path"]
    sys.argv = [""]
    try:
        function = _load(setup["pickled"], setup["function"])
        replies.send(("ready", parameters(function)))
    except BaseException as error:
        replies.send(("failed", str(error) if isinstance(error, ValueError) else one_line(error)))
        return
    nowhere = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
    while True:
        request = inbox.get()
        try:
            arguments, size = pickle.loads(request)
        except BaseException as error:
            replies.send(("scored", f"could not read the samples: {one_line(error)}"))
        else:
            # The parent ends a call that takes too long. Should it be gone, and the function hold
            # the interpreter's lock (a regular expression can), this still ends the process.
            faulthandler.dump_traceback_later(setup["timeout_s"] + 1, exit=True, file=nowhere)
            reply = call(function, arguments, size)
            faulthandler.cancel_dump_traceback_later()
            replies.send(("scored", reply))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
