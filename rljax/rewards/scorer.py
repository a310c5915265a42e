"""Scores responses with reward functions, such that a faulty function costs only its samples."""

import collections
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float32

from rljax.errors import InputError
from rljax.rewards import worker
from rljax.rewards.process import Reply, RewardProcess
from rljax.rewards.verifiers import VERIFIERS
from rljax.rewards.worker import Outcome

logger = logging.getLogger(__name__)

RESERVED = ("prompts", "completions", "completion_ids")

# A verifier's name, "path/to/file.py:function", "module:function", or the function itself:
# called with keyword arguments, it returns a list of one float (or None) a sample.
RewardFunction = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """What the reward functions said of B responses; K functions.

    Attributes:
        rewards: Their weighted sum, float32 [B]; 0 where not valid.
        scores: What the first function, the verifier, said, float32 [B]; 0 where not valid.
        components: What each function said, unweighted, float32 [B, K]; NaN where it failed.
        valid: False where any function failed: to be left out everywhere, bool [B].
        failures: One line for each failure.
    """

    rewards: Float32[np.ndarray, " B"]
    scores: Float32[np.ndarray, " B"]
    components: Float32[np.ndarray, "B K"]
    valid: Bool[np.ndarray, " B"]
    failures: list[str]


class Scorer:
    """Calls reward functions on a batch of responses and sums what they say.

    Each function is called once with keyword arguments, lists of equal length: `prompts` (texts),
    `completions` (texts), `completion_ids` (lists of ids) and every data column; those its
    signature does not name are left out unless it takes `**kwargs`. It returns a list with one
    number a sample.

    The library's own verifiers run in this process. A user's function runs in a process of its
    own, which has one thread and keeps its state between calls. Where a call fails as a whole
    (raises, exits, takes longer than the time limit, returns another number of values), its
    samples are tried again one at a time, so that only the guilty ones are lost. A value that is
    None, not a number or not finite loses its sample. A process that hung or died is started anew.

    A scorer may be called from several threads. Close it, or use it as a context manager.

    Attributes:
        names: A name for each function, all different, for metrics.
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
            functions: The first is the verifier, whose values are the `scores`.
            weights: A weight for each function; None: 1 each.
            timeout_s: Seconds that one call of a user's function may take: the call of all
                samples first and, if that failed, the call of each sample alone.
            max_hangs: After so many samples of a batch hung one by one, its rest is given up, so
                that a function that always hangs takes timeout_s * (max_hangs + 1) a batch.
            output: File to which the user's functions' printing is appended; None: standard error.

        Raises:
            ValueError: Where a function cannot be loaded, or a number does not fit.
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
        self.names = _unique_names(functions)
        self.failed: collections.Counter[str] = collections.Counter()
        self._count = threading.Lock()
        self._functions: list[_InProcess | RewardProcess] = []
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
            ValueError: Where a function requires a column that the data lack, or a column has the
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
                    f"lack (columns {', '.join(have) or 'none'}): add the column or give the "
                    "argument a default"
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
            prompts: The rendered prompt of each response (so a prompt's text stands G times).
            completions: The responses' texts.
            completion_ids: The responses' token ids.
            columns: The data columns, each with B values.

        Returns:
            The scores.

        Raises:
            ValueError: Where lengths differ or a column has the name of another argument; never
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

    def _load(
        self, function: RewardFunction, output: str | Path | None
    ) -> "_InProcess | RewardProcess":
        if isinstance(function, str) and ":" not in function:
            if function not in VERIFIERS:
                raise InputError(
                    f"reward function {function!r} is unknown: use one of {', '.join(VERIFIERS)}, "
                    "path/to/file.py:function or module:function"
                )
            function = VERIFIERS[function]
        if not isinstance(function, str) and function in VERIFIERS.values():
            return _InProcess(function)
        return RewardProcess(function, self.timeout_s, output)

    def _outcomes(
        self,
        name: str,
        function: "_InProcess | RewardProcess",
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
            logger.warning(
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
        told = [f"{count} x {reason}" for reason, count in reasons.most_common(3)]
        if len(reasons) > 3:
            told.append(f"{len(reasons) - 3} other reasons")
        logger.warning(
            "%d of %d samples could not be scored and are left out: %s",
            len(lost),
            size,
            "; ".join(told),
        )
        with self._count:
            self.failed.update(name for name, _, _ in failures)


class _InProcess:
    """A verifier of the library, called directly."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.accepts, self.requires = worker.parameters(function)

    def call(self, arguments: dict[str, list[Any]], size: int) -> Reply:
        outcome = worker.call(self._function, arguments, size)
        return Reply(None, outcome) if isinstance(outcome, str) else Reply(outcome)

    def close(self) -> None:
        pass


def _unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        if isinstance(function, str):
            base = function.rpartition(":")[2]
        else:
            base = getattr(function, "__name__", type(function).__name__)
        name = base
        for number in range(2, len(functions) + 1):
            if name not in names:
                break
            name = f"{base}_{number}"
        names.append(name)
    return tuple(names)
