"""Scoring divided between the processes of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rljax import processes
from rljax.rewards.scorer import Scorer
from rljax.rewards.worker import Outcome


class SharedScorer(Scorer):
    """A scorer of which each process has one: it scores its own part, and all get all scores.

    So that all agree where a reward function is slow or would say something else the next time.
    What went wrong anywhere is reported by the first process.
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
