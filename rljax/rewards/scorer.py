"""Scores responses with reward functions; a failure in one costs only the samples it fails on."""

import collections
import dataclasses
import functools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float32

from rljax.errors import InputError
from rljax.rewards import worker
from rljax.rewards.process import CannotPickleError, Reply, RewardProcess
from rljax.rewards.verifiers import VERIFIERS
from rljax.rewards.worker import Outcome

_log = logging.getLogger(__name__)

RESERVED = ("prompts", "completions", "completion_ids")

# A verifier's name, "path/to/file.py:function", "module:function", or the function itself:
# called with keyword arguments, it returns a list of one float (or None) a sample.
RewardFunction = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores of B responses by K reward functions.

    Attributes:
      rewards: Their weighted sum, float32 [B]; 0 where not valid.
      scores: The first function's values, the verifier's, float32 [B]; 0 where not valid.
      components: Each function's values, unweighted, float32 [B, K]; NaN where it failed.
      valid: False where any function failed: to be left out everywhere, bool [B].
      failures: One line for each failure.
    """

    rewards: Float32[np.ndarray, " B"]
    scores: Float32[np.ndarray, " B"]
    components: Float32[np.ndarray, "B K"]
    valid: Bool[np.ndarray, " B"]
    failures: list[str]


class Scorer:
    """Calls reward functions on a batch of responses and sums their values.

    Each function is called once with keyword arguments, lists of equal length: `prompts` (texts),
    `completions` (texts), `completion_ids` (lists of ids) and every data column; those its
    signature does not name are left out unless it takes `**kwargs`. It returns a list with one
    number a sample.

    The library's own verifiers run in this process. A user's function runs in a process of its
    own, which has one thread and keeps its state between calls. Where a call fails as a whole
    (raises, exits, takes longer than the time limit, returns another number of values), its
    samples are tried again one at a time, so that only those that cause the failure are lost. A
    value that is None, not a number or not finite loses its sample. A process that hung or died is
    started anew.

    A Python function given by itself is sent to its process as it is at the start, with the
    variables it uses (by cloudpickle); what it changes there, such as a counter in a notebook, is
    not seen here. One that cannot be sent, such as one that uses an open file, a lock or a model
    on an accelerator, runs in a thread of this process, and a warning says so: exceptions, exit()
    and the time limit cost its samples only, as for the others, but a call that hangs continues in
    the background, and one that ends the process ends the run.

    A scorer may be called from several threads. Close it, or use it as a context manager.

    Attributes:
      names: A name for each function, all different, for metrics: `__name__`, or the part of a
        reference after its colon.
      failed: How many samples each function has lost so far, by its name.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeout_s: float = 10.0,
        *,
        max_hangs: int = 16,
        output: str | Path | None = None,
    ):
        """Loads the functions.

        Args:
          functions: Names, references and Python functions (see `RewardFunction`), mixed as
            you like. The first is the verifier, whose values are the `scores`.
          weights: A weight for each function; None: 1 each.
          timeout_s: Seconds that one call of a user's function may take: the call of all
            samples first and, if that failed, the call of each sample alone.
          max_hangs: After so many samples of a batch hung one by one, its rest is given up, so
            that a function that always hangs takes timeout_s * (max_hangs + 1) a batch.
          output: File to which the user's functions' printing is appended; None: standard error.

        Raises:
          InputError: Where a function cannot be loaded, two have one name, or a number does not
            fit.
        """
        if isinstance(functions, str) or not functions:
            raise InputError(
                f"functions={functions!r} is not a list of reward functions: give at least one of "
                f"{', '.join(VERIFIERS)}, path/to/file.py:function, module:function"
            )
        if weights is None:
            weights = (1.0,) * len(functions)
        if len(weights) != len(functions) or not all(map(math.isfinite, weights)):
            raise InputError(
                f"weights={tuple(weights)} do not fit {len(functions)} reward functions: give one "
                "finite weight for each"
            )
        if not timeout_s > 0:
            raise InputError(f"timeout_s={timeout_s} is not positive: give seconds")
        if max_hangs < 1:
            raise InputError(f"max_hangs={max_hangs} is too small: use at least 1")
        self.weights = tuple(float(w) for w in weights)
        self.timeout_s = float(timeout_s)
        self.max_hangs = max_hangs
        self.names = _names(functions)
        self.failed: collections.Counter[str] = collections.Counter()
        self._count = threading.Lock()
        self._functions: list[_Loaded] = []
        try:
            for function in functions:
                self._functions.append(self._load(function, output))
        except BaseException:
            self.close()
            raise

    def check(self, columns: Iterable[str]) -> None:
        """Refuses data columns with which a function could not be called; call it before a run.

        Args:
          columns: The names of the data columns.

        Raises:
          InputError: Where a function requires a column that the data lack, or a column has the
            name of another argument.
        """
        have = list(columns)
        taken = [name for name in RESERVED if name in have]
        if taken:
            raise InputError(
                f"data column {taken[0]!r} has the name of an argument of reward functions: "
                "rename the column"
            )
        for name, function in zip(self.names, self._functions, strict=True):
            missing = sorted(function.requires.difference(have, RESERVED))
            if missing:
                raise InputError(
                    f"reward function {name} requires the argument {missing[0]!r}, which the data "
                    f"lack (columns {', '.join(have) or 'none'}): add the column"
                    + (", name it by answer_column" if missing[0] == "answer" else "")
                    + " or give the argument a default"
                )

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Scores B responses.

        Args:
          prompts: The rendered prompt of each response (repeated for each of its G responses).
          completions: The responses' texts.
          completion_ids: The responses' token ids.
          columns: The data columns, each with B values.

        Returns:
          The scores.

        Raises:
          InputError: Where lengths differ or a column has the name of another argument; never
            for what a function does.
        """
        size = len(prompts)
        arguments: dict[str, Sequence[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        for name, values in columns.items():
            if name in arguments:
                self.check(columns)
            arguments[name] = values
        for name, values in arguments.items():
            if len(values) != size:
                raise InputError(
                    f"{name} has {len(values)} values for {size} prompts: give one for each"
                )
        components = np.full((size, len(self._functions)), np.nan, np.float32)
        failures = []
        for k, (name, function) in enumerate(zip(self.names, self._functions, strict=True)):
            for i, outcome in enumerate(self._outcomes(name, function, arguments, size)):
                if isinstance(outcome, str):
                    failures.append((name, i, outcome))
                else:
                    components[i, k] = outcome
        valid = np.asarray(~np.isnan(components).any(axis=1))
        self._report(failures, size)
        weights = np.asarray(self.weights, np.float32)
        return Scores(
            rewards=np.where(valid, np.where(valid[:, None], components, 0) @ weights, 0),
            scores=np.where(valid, components[:, 0], 0),
            components=components,
            valid=valid,
            failures=[f"{name}, sample {i}: {reason}" for name, i, reason in failures],
        )

    def close(self) -> None:
        """Ends the functions' processes."""
        for function in self._functions:
            function.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def _load(self, function: RewardFunction, output: str | Path | None) -> "_Loaded":
        if isinstance(function, str) and ":" not in function:
            if function not in VERIFIERS:
                raise InputError(
                    f"reward function {function!r} is unknown: use one of {', '.join(VERIFIERS)}, "
                    "path/to/file.py:function or module:function"
                )
            function = VERIFIERS[function]
        if not isinstance(function, str) and function in VERIFIERS.values():
            return _Verifier(function)
        try:
            return RewardProcess(function, self.timeout_s, output)
        except CannotPickleError as error:
            assert not isinstance(function, str)
            _log.warning(
                "%s; it runs in this process, where it cannot be stopped if it hangs", error
            )
            return _InThread(function, self.timeout_s)

    def _outcomes(
        self,
        name: str,
        function: "_Loaded",
        arguments: Mapping[str, Sequence[Any]],
        size: int,
    ) -> list[Outcome]:
        wanted = {
            key: list(values)
            for key, values in arguments.items()
            if function.accepts is None or key in function.accepts
        }
        if not size:
            return []
        reply = function.call(wanted, size)
        if reply.outcomes is not None:
            return reply.outcomes
        if size == 1:
            return [reply.reason]
        outcomes: list[Outcome] = []
        hangs = 0
        for i in range(size):
            if hangs == self.max_hangs:
                outcomes.append(f"not tried, as {hangs} samples had hung before")
                continue
            single = function.call({key: values[i : i + 1] for key, values in wanted.items()}, 1)
            hangs += single.hung
            outcomes.extend([single.reason] if single.outcomes is None else single.outcomes)
        if not any(isinstance(outcome, str) for outcome in outcomes):
            _log.warning(
                "reward function %s of all %d samples %s, of each sample alone worked: %s",
                name,
                size,
                reply.reason,
                "raise timeout_s" if reply.hung else "check that it scores lists",
            )
        return outcomes

    def _report(self, failures: Sequence[tuple[str, int, str]], size: int) -> None:
        if not failures:
            return
        lost = {i for _, i, _ in failures}
        reasons = collections.Counter(f"{name} {reason}" for name, _, reason in failures)
        listed = [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
        if len(reasons) > 3:
            listed.append(f"{len(reasons) - 3} other reasons")
        _log.warning(
            "%d of %d samples could not be scored and are left out: %s",
            len(lost),
            size,
            "; ".join(listed),
        )
        with self._count:
            self.failed.update(name for name, _, _ in failures)


class _Verifier:
    """A verifier of the library, called directly."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.accepts, self.requires = worker.parameters(function)

    def call(self, arguments: dict[str, list[Any]], size: int) -> Reply:
        outcome = worker.call(self._function, arguments, size)
        return Reply(None, outcome) if isinstance(outcome, str) else Reply(outcome)

    def close(self) -> None:
        pass


class _InThread:
    """A user's function that cannot leave this process, called in a thread with a time limit.

    A call that takes too long is abandoned: its thread runs until the function returns, as
    threads cannot be stopped, and its result is ignored.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float):
        self._function = function
        self._timeout_s = timeout_s
        self.accepts, self.requires = worker.parameters(function)

    def call(self, arguments: dict[str, list[Any]], size: int) -> Reply:
        replies: queue.SimpleQueue[list[Outcome] | str] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: replies.put(worker.call(self._function, arguments, size)), daemon=True
        ).start()
        try:
            outcome = replies.get(timeout=self._timeout_s)
        except queue.Empty:
            return Reply(None, f"took longer than {self._timeout_s:g} s", hung=True)
        return Reply(None, outcome) if isinstance(outcome, str) else Reply(outcome)

    def close(self) -> None:
        pass


_Loaded = _Verifier | _InThread | RewardProcess


def _names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """A name for each function; refuses two with one name, as their metrics would be one."""
    names = tuple(map(_name, functions))
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise InputError(
                f"{count} reward functions are called {name!r}, the name of their metric: rename "
                "all but one, or give each once with its weight"
            )
    return names


def _name(function: RewardFunction) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2]
    if not callable(function):
        raise InputError(
            f"{function!r} is not a reward function: give one of {', '.join(VERIFIERS)}, "
            "path/to/file.py:function, module:function, or a Python function"
        )
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__).strip("<>")
