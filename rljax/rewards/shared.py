"""Scoring divided between the processes of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rljax import processes
from rljax.rewards.scorer import Scorer
from rljax.rewards.worker import Outcome


class SharedScorer(Scorer):
    """A scorer for several processes: each scores its own part of a batch, and all get all scores.

    All processes then agree, even where a reward function is random or times out. Failures
    anywhere are reported by the first process.
    """

    def _outcomes(
        self, name: str, function: Any, arguments: Mapping[str, Sequence[Any]], size: int
    ) -> list[Outcome]:
        part = processes.share(size)
        own = {key: values[part] for key, values in arguments.items()}
        found = super()._outcomes(name, function, own, part.stop - part.start)
        return [outcome for some in processes.exchange(found) for outcome in some]

    def _report(self, failures: Sequence[tuple[str, int, str]], size: int) -> None:
        if processes.is_first():
            super()._report(failures, size)
