"""Held-out evaluation of a run, and the target at which it may end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rljax.config import Config
from rljax.data import Prompt
from rljax.evals import EvalTask, evaluate, seed_for_evaluation
from rljax.rollouts import GroupSource
from rljax.sampling import SamplingParams
from rljax.training.state import Progress

OnProgress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Scores the policy that the engine holds on prompts that are never trained on.

    Every evaluation draws with the same keys, so that two of them compare weights, not luck.

    Attributes:
      source: The engine and the reward functions.
      prompts: The held-out prompts; none: nothing is evaluated.
      task: Their name in the tags.
      config: Of the run.
    """

    source: GroupSource
    prompts: list[Prompt]
    task: str
    config: Config

    def due(self, step: int) -> bool:
        """Whether a step is followed by an evaluation."""
        every = self.config.evals.eval_every
        return bool(every) and step % every == 0

    def greedy(
        self, progress: Progress, on_progress: OnProgress | None = None
    ) -> tuple[Progress, dict[str, float]]:
        """Greedy accuracy, and the progress with it noted: it decides when the run may end."""
        if not self.prompts:
            return progress, {}
        greedy = dataclasses.replace(self.source.sampling, temperature=0.0)
        values = self._evaluate(greedy, 1, on_progress)
        accuracy = values[f"eval/{self.task}/greedy"]
        reached = 0 < self.config.evals.stop_at <= accuracy
        progress = dataclasses.replace(
            progress,
            eval_last=accuracy,
            best=max(accuracy, progress.best or 0.0),
            evals_above_target=progress.evals_above_target + 1 if reached else 0,
        )
        return progress, values

    def sampled(self, on_progress: OnProgress | None = None) -> dict[str, float]:
        """avg@k and pass@k, where `eval_k` asks for them."""
        settings = self.config.evals
        if not self.prompts or not settings.eval_k:
            return {}
        drawn = evaluation_sampling(self.config, self.source.sampling)
        return self._evaluate(drawn, settings.eval_k, on_progress)

    def _evaluate(
        self, sampling: SamplingParams, k: int, on_progress: OnProgress | None
    ) -> dict[str, float]:
        return evaluate(
            self.source.engine,
            self.prompts,
            self.source.scorer,
            self.source.tokenizer,
            sampling,
            EvalTask(self.task, k, seed_for_evaluation(self.config.run.seed)),
            on_progress=on_progress,
        )


def evaluation_sampling(config: Config, sampling: SamplingParams) -> SamplingParams:
    """How avg@k and pass@k draw, from how training does."""
    return dataclasses.replace(
        sampling,
        temperature=config.evals.eval_temperature,
        top_p=config.evals.eval_top_p,
        top_k=0,
        min_p=0.0,
    )


def task_name(config: Config) -> str:
    """The name of the held-out data in tags: that of the file or folder, or of the task."""
    source = config.data.eval_data or config.data.data or "rows"
    return source.rstrip("/").split("/")[-1].split(".")[0]
