"""A run: its parts, built from a configuration, and its stages, one method each.

`rljax.training.train` takes the stages in turn; a notebook takes them one by one:

    with rljax.open_run(config) as (run, state):
        groups, state, _ = run.sample(state)
        shapes = run.plan(groups)
        batch, _ = run.score(state, groups, shapes)
        rows, _ = run.prepare(batch)
        state, metrics = run.learn(state, rows, shapes)
        state = state.replace(step=state.step + 1)
        run.sync_weights(state)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from rljax import losses as L
from rljax.batch import Batch, Rows
from rljax.config import Config
from rljax.errors import InputError
from rljax.evals import reflection_frac
from rljax.models import Params
from rljax.monitoring import MetricsLog
from rljax.rollouts import (
    CollectSettings,
    GroupSource,
    ScoredGroup,
    collect,
    component_metrics,
)
from rljax.training.checkpoints import Checkpoints
from rljax.training.evaluation import Evaluator, OnProgress
from rljax.training.learner import Learner, make_learner
from rljax.training.metrics import Metrics
from rljax.training.policy import Policy
from rljax.training.prompts import RunPrompts
from rljax.training.rows import RowShapes
from rljax.training.state import RunState


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run. They do not change; `RunState` is what does.

    Attributes:
      config: The configuration.
      directory: Where everything is written.
      policy: What is trained.
      prompts: What it is asked.
      source: The engine and the reward functions.
      learner: The trainer.
      evaluator: Held-out evaluation.
      checkpoints: On disk.
      log: Metrics and samples on disk; None in all processes but the first.
      restored: Whether the run is continued from a checkpoint.
      opening: Metrics of the supervised warm-up, where there was one.
    """

    config: Config
    directory: Path
    policy: Policy
    prompts: RunPrompts
    source: GroupSource
    learner: Learner
    evaluator: Evaluator
    checkpoints: Checkpoints
    log: MetricsLog | None
    restored: bool
    opening: dict[str, float] = dataclasses.field(default_factory=dict)

    def sample(self, state: RunState) -> tuple[list[ScoredGroup], RunState, Metrics]:
        """Samples and scores a rollout batch with the weights that the engine holds.

        Returns:
          The groups, the state with the position after their prompts, and metrics.
        """
        stream, rollout = self.prompts.stream, self.config.rollout
        if stream.get_state() != state.data:
            stream.set_state(state.data)
        self.source.engine.forget_prefixes()  # an evaluation's, which a resumed run would not have
        settings = CollectSettings(
            num_groups=rollout.prompts_per_step,
            num_generations=rollout.num_generations,
            seed=self.config.run.seed,
            dynamic=rollout.dynamic_sampling,
            max_oversampling=rollout.max_oversampling,
            max_staleness=rollout.max_staleness,
        )
        found, remembered = collect(self.source, stream, state.collect, settings)
        metrics: dict[str, Any] = found.metrics() | component_metrics(
            found.groups, self.source.scorer.names
        )
        texts = [text for group in found.groups for text in group.texts]
        metrics["completion/reflection_frac"] = reflection_frac(texts)
        return found.groups, state.replace(data=stream.get_state(), collect=remembered), metrics

    def plan(self, groups: Sequence[ScoredGroup]) -> RowShapes:
        """The shapes of the rows that hold these groups; see `RowPlanner`."""
        return self.learner.planner.plan(groups)

    def score(
        self, state: RunState, groups: Sequence[ScoredGroup], shapes: RowShapes
    ) -> tuple[Batch, Metrics]:
        """The groups as a batch, with the trainer's log-probabilities; see `Learner.score`."""
        started = time.perf_counter()
        batch, metrics = self.learner.score(state, groups, shapes)
        mismatch = self.learner.compare(batch, state.step)
        return batch, {**metrics, **mismatch, "perf/score_s": time.perf_counter() - started}

    def prepare(self, batch: Batch) -> tuple[Rows, Metrics]:
        """Advantages, corrections and token weights; see `Learner.prepare`."""
        return self.learner.prepare(batch)

    def learn(self, state: RunState, rows: Rows, shapes: RowShapes) -> tuple[RunState, Metrics]:
        """Updates the policy on the rows; see `Learner.learn`.

        The state that is handed in is donated: use the one that is returned.
        """
        started = time.perf_counter()
        self.source.engine.unload(keep_pool=True)  # the update reuses buffers that it leased
        state, metrics = self.learner.learn(state, rows, shapes)
        return state, {**metrics, "perf/update_s": time.perf_counter() - started}

    def sync_weights(self, state: RunState) -> Metrics:
        """Gives the engine the policy's weights; their version is the state's step."""
        started = time.perf_counter()
        self.source.engine.load(self.weights(state), version=state.step)
        return {
            "perf/sync_s": time.perf_counter() - started,
            "perf/sync_bytes": float(self.source.engine.moved),
        }

    def evaluate(
        self, state: RunState, on_progress: OnProgress | None = None
    ) -> tuple[RunState, dict[str, float]]:
        """Held-out evaluation of the weights that the engine holds.

        Greedy accuracy; before the first step and once the run is finished avg@k and pass@k too,
        where `eval_k` asks for them.

        Args:
          state: Of the run.
          on_progress: Is called with how many prompts are done, and of how many.

        Returns:
          The state with the accuracy noted, and metrics.
        """
        started, first_uses = time.perf_counter(), self.learner.first_uses
        with first_uses.quietly("evaluation"):
            progress, metrics = self.evaluator.greedy(state.progress, on_progress)
        state = state.replace(progress=progress)
        if state.step == 0 or self.finished(state):
            with first_uses.quietly("sampled evaluation"):
                metrics |= self.evaluator.sampled(on_progress)
        if metrics:
            metrics["perf/eval_s"] = time.perf_counter() - started
        return state, metrics

    def save(self, state: RunState) -> Metrics:
        """Writes a checkpoint in the background."""
        started = time.perf_counter()
        with self.learner.first_uses.quietly("saving"):
            self.checkpoints.save(state)
        return {"perf/checkpoint_s": time.perf_counter() - started}

    def weights(self, state: RunState) -> Params:
        """The policy's weights, adapters merged."""
        return self.policy.weights(state.train)

    def finished(self, state: RunState) -> bool:
        """Whether all steps are done, or held-out accuracy has held at `stop_at`."""
        return state.step >= self.config.run.steps or state.progress.evals_above_target >= 2

    def with_objective(self, state: RunState, objective: L.Objective) -> tuple[Run, RunState]:
        """The run with another objective, from this state on; for interactive use.

        Weights, optimizer and data position stay. Where the objective compares with a reference
        and the run has none, the policy as it is now becomes the reference.

        Args:
          state: Of the run.
          objective: The new objective.

        Raises:
          InputError: It needs what the run cannot give, or one of the two has a critic.
        """
        if (objective.critic is None) != (self.learner.objective.critic is None):
            raise InputError(
                "a critic cannot be added to a run or removed; open another run for this objective"
            )
        reference = self.learner.reference
        if "ref" in objective.needs and reference is None:
            reference = jax.tree.map(lambda x: x.copy(), self.weights(state))
        learner = make_learner(
            self.config, self.policy, objective, reference, self.learner.first_uses
        )
        train = dataclasses.replace(state.train, objective=objective.init_state())
        return dataclasses.replace(self, learner=learner), state.replace(train=train)
