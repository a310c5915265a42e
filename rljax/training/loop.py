"""The loop of reinforcement learning: sample, score, update, repeat; evaluate, log and save."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from rljax import losses as L
from rljax import models, processes
from rljax.config import Config
from rljax.monitoring import LiveDisplay, compilations, plot_curves
from rljax.rewards import RewardFunction
from rljax.rollouts import ScoredGroup
from rljax.training.build import open_run
from rljax.training.metrics import (
    Metrics,
    device_memory,
    finish,
    sample_lines,
    throughput,
    utilisation,
)
from rljax.training.run import Run
from rljax.training.state import RunState


def train(
    config: Config,
    *,
    objective: L.Objective | None = None,
    rewards: Sequence[RewardFunction] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    name: str = "custom",
    started: float | None = None,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Runs, or continues, a whole run.

    Args:
      config: The configuration; the other arguments replace what it names.
      objective: An objective of your own.
      rewards: Reward functions of your own, or names; the first is the verifier.
      prompts: Rows to train on: dicts with a question and an answer, questions, or chat messages.
      eval_prompts: Held-out rows.
      name: Of the preset, or any other; part of the default run directory.
      started: `time.perf_counter()` of when the user began to wait; now by default.
      mesh: Devices to use, where not all are to be; None: the configuration's mesh.

    Returns:
      `eval_before`, `eval_after` (greedy held-out accuracy; None without held-out prompts),
      `steps`, `seconds` (over all restarts) and `run_dir`; also written as result.json.

    Raises:
      InputError: Something in the configuration does not exist or does not fit; one line.
      TrainingStoppedError: Too many updates in a row had no finite gradient.
    """
    clock = _Clock(started)
    title = f"{name}: {config.objective.objective if objective is None else 'your objective'}"
    opened = open_run(
        config,
        objective=objective,
        rewards=rewards,
        prompts=prompts,
        eval_prompts=eval_prompts,
        name=name,
        mesh=mesh,
    )
    display = LiveDisplay(config.run.steps, title, quiet=not processes.is_first())
    with display, opened as (run, state):
        state, saved = begin(run, state, display, clock)
        while not run.finished(state):
            step_started = time.perf_counter()
            groups, state, sampled = run.sample(state)  #            prompts -> responses -> rewards
            shapes = run.plan(groups)  #                             lengths of the rows
            batch, scored = run.score(state, groups, shapes)  #      the trainer's log-probabilities
            rows, prepared = run.prepare(batch)  #                   advantages, weights
            state, learned = run.learn(state, rows, shapes)  #       losses -> gradients -> weights
            state = state.replace(step=state.step + 1)
            synced = run.sync_weights(state)  #                      weights -> sampler
            metrics = finish(sampled, scored, prepared, learned, synced, saved)
            metrics |= speed(run, groups, metrics, time.perf_counter() - step_started)
            if run.evaluator.due(state.step) or state.step >= config.run.steps:
                with display.stage("evaluating") as done:
                    state, evaluated = run.evaluate(state, on_progress=done)
                metrics |= evaluated
            report(run, display, state, metrics, groups)
            saved = {}
            if state.step % config.run.save_every == 0 or run.finished(state):
                state = clock.note(state)
                saved = run.save(state)
        return conclude(run, clock.note(state), display)


class _Clock:
    """Seconds since the user began to wait, added to the run's own over all restarts."""

    def __init__(self, started: float | None) -> None:
        self._noted = time.perf_counter() if started is None else started

    def note(self, state: RunState) -> RunState:
        """The state with the seconds since the last note added."""
        now = time.perf_counter()
        seconds, self._noted = state.progress.seconds + now - self._noted, now
        return state.replace(progress=dataclasses.replace(state.progress, seconds=seconds))


def begin(
    run: Run, state: RunState, display: LiveDisplay, clock: _Clock
) -> tuple[RunState, Metrics]:
    """Evaluates, logs and saves a new run before its first step; a restored one has done so.

    Returns:
      The state with the evaluation noted, and metrics of the save.
    """
    if run.restored:
        display.message(f"continuing {run.directory} after step {state.step}")
        return state, {}
    with display.stage("evaluating") as done:
        state, metrics = run.evaluate(state, on_progress=done)
    progress = dataclasses.replace(state.progress, eval_before=state.progress.eval_last)
    state = clock.note(state.replace(progress=progress))
    report(run, display, state, run.opening | metrics)
    return state, run.save(state)


def speed(
    run: Run, groups: Sequence[ScoredGroup], metrics: dict[str, float], seconds: float
) -> dict[str, float]:
    """Seconds and tokens per second of a step, and how far it used the devices."""
    passes, update_s = run.config.update.num_iterations, metrics["perf/update_s"]
    used = utilisation(run.policy.model, groups, passes, update_s)
    return throughput(groups, seconds, metrics["perf/rollout_s"]) | used


def report(
    run: Run,
    display: LiveDisplay,
    state: RunState,
    metrics: dict[str, float],
    groups: Sequence[ScoredGroup] = (),
) -> None:
    """Logs the metrics of a step and some of its responses, and shows them."""
    if state.step:
        run.learner.first_uses.end_step(state.step)
        for remark in run.learner.objective.remarks(metrics):
            run.learner.first_uses.warn(remark)
        metrics = metrics | device_memory() | {"perf/compilations": float(compilations.count())}
    if run.log is not None:
        run.log.log(state.step, metrics)
        run.log.samples(state.step, sample_lines(groups, run.config.run.log_samples))
    display.update(state.step, metrics)


def conclude(run: Run, state: RunState, display: LiveDisplay) -> dict[str, Any]:
    """Exports the policy, draws the curves and writes the result."""
    if run.config.run.export:
        models.save_pretrained(run.config.run.export, run.policy.model, run.weights(state))
    result = {
        "eval_before": state.progress.eval_before,
        "eval_after": state.progress.eval_last,
        "steps": state.step,
        "seconds": round(state.progress.seconds, 1),
        "run_dir": str(run.directory),
    }
    processes.on_first(_write_result, run.directory, result)
    display.message(
        f"{run.directory} holds metrics.jsonl, samples.jsonl, TensorBoard events, curves.png and "
        "checkpoints/"
    )
    return result


def _write_result(directory: Path, result: dict[str, Any]) -> None:
    plot_curves(directory)
    file = directory / "result.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    temporary.rename(file)
