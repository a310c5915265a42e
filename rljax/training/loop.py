"""The circle: sample, score, update, repeat, watch, save."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.batch import Batch, Rows
from rljax.config import Config
from rljax.errors import TrainingStoppedError
from rljax.evals import EvalTask, evaluate, seed_for_evaluation
from rljax.monitoring import LiveDisplay, compilations, plot_curves
from rljax.rollouts import Collected, ScoredGroup, collect, component_metrics, make_batch
from rljax.sampling import SamplingParams
from rljax.training.setup import Run, freeze_reference, start
from rljax.training.warmup import warm_up

_log = logging.getLogger(__name__)

Metrics = dict[str, Any]

_LONGEST_SHARED = 2048  # tokens of a row; attention costs its square


def train(config: Config, preset: str = "custom", started: float | None = None) -> dict[str, Any]:
    """Runs, or continues, a whole run.

    Args:
      config: What to do.
      preset: Its name, for the run directory and the display.
      started: `time.perf_counter()` of when the user began to wait; now by default.

    Returns:
      `eval_before`, `eval_after` (greedy held-out accuracy; None without held-out prompts),
      `steps`, `seconds` (over all restarts) and `run_dir`; also written as result.json.
    """
    title = f"{preset}: {config.objective.objective} on {config.data.data}"
    with (
        start(config, preset, started) as run,
        LiveDisplay(config.run.steps, title, quiet=not processes.is_first()) as display,
    ):
        begin(run, display)
        while not finished(run):
            clock = Clock()
            groups = sample(run, clock)  #            prompts -> responses -> rewards
            batch = score(run, groups, clock)  #      the trainer's own log-probabilities
            rows, stats = run.prepare(batch)  #       advantages, corrections, token weights
            stats = learn(run, rows, stats, clock)  # losses -> gradients -> new weights
            sync_weights(run, clock)  #                  weights -> sampler
            watch(run, display, groups, batch, stats, clock)
        return finish(run, display)


class Clock:
    """Seconds of each part of one step, and numbers that are known by the way."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.values: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a tag."""
        began = time.perf_counter()
        yield
        self.values[name] = self.values.get(name, 0.0) + time.perf_counter() - began


def begin(run: Run, display: LiveDisplay) -> None:
    """What stands before the first step of a new run; a restored run has it behind it."""
    if run.restored:
        display.message(f"continuing {run.directory} after step {run.progress.step}")
    else:
        values: dict[str, float] = {}
        if run.config.supervised.sft_target > 0:
            values = warm_up(run, display.message)
    freeze_reference(run)
    run.engine.load(run.weights(), version=run.progress.step)
    if not run.restored:
        values |= held_out(run) | held_out_samples(run)
        run.progress.eval_before = run.progress.eval_last
        run.record(0, values)
        display.update(0, values)
        run.save()


def finished(run: Run) -> bool:
    """Whether all steps are done, or held-out accuracy has held at `stop_at`."""
    return run.progress.step >= run.config.run.steps or run.progress.evals_above_target >= 2


def sample(run: Run, clock: Clock) -> list[ScoredGroup]:
    """Asks the policy, scores what it says, and fills a rollout batch."""
    settings = run.config.rollout
    run.engine.forget_prefixes()  # an evaluation's, which a resumed run would not have
    found, run.progress.collect = collect(
        run.engine,
        run.prompts,
        run.tokenizer,
        run.scorer,
        run.sampling,
        run.progress.collect,
        num_groups=settings.prompts_per_step,
        num_generations=settings.num_generations,
        seed=run.config.run.seed,
        dynamic=settings.dynamic_sampling,
        max_oversampling=settings.max_oversampling,
        max_staleness=settings.max_staleness,
    )
    clock.values |= _account(found, settings.num_generations)
    return found.groups


def _account(found: Collected, num_generations: int) -> dict[str, float]:
    values = {
        "perf/rollout_s": found.sampling_seconds,
        "perf/reward_s": found.scoring_seconds,
        "group/oversampling": found.generated / max(len(found.groups) - found.reused, 1),
        "staleness/dropped": float(found.dropped_stale * num_generations),
    }
    if found.generated > len(found.groups):
        _log.info(
            "dynamic sampling: %d groups generated, %d kept (%d from before), %d dropped as "
            "degenerate, factor %.2f",
            found.generated,
            len(found.groups) - found.filled,
            found.reused,
            found.dropped_degenerate,
            values["group/oversampling"],
        )
    return values


def score(run: Run, groups: list[ScoredGroup], clock: Clock) -> Batch:
    """Lays the groups out as a batch and adds what the trainer itself says of their tokens.

    That pass is spared where a single update follows and nothing else asks for it: the live
    policy is then the one at the start of the step.
    """
    prompt = run.config.data.max_prompt_length
    longest = prompt + run.config.rollout.max_completion_length
    need = max(len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses)
    batch: Batch = meshes.shard_rows(make_batch(groups, _length(run, need, longest)), run.mesh)
    with clock.measure("perf/score_s"):
        shared = _shared(run, batch)
        if _needs_scores(run):
            scores = run.score(run.weights(), batch, shared)
            routing = batch.routing
            if run.config.rollout.routing_replay == "trainer":
                routing = scores.routing
            batch = batch.replace(old_logp=scores.logp, old_entropy=scores.entropy, routing=routing)
            if scores.router is not None:
                clock.values |= scores.router.metrics()
        if run.reference is not None:
            reference = jax.device_put(run.reference, jax.memory.Space.Device)
            batch = batch.replace(ref_logp=run.score(reference, batch, shared).logp)
        if run.teacher is not None:
            batch = batch.replace(teacher_logp=run.teacher(batch, shared))
        if run.state.critic is not None:
            batch = batch.replace(values=run.values(run.state.critic, batch, shared))
        jax.block_until_ready((batch.old_logp, batch.ref_logp, batch.teacher_logp, batch.values))
    return batch


def _needs_scores(run: Run) -> bool:
    rollout, updates = run.config.rollout, run.config.updates // run.config.run.steps
    return (
        updates > 1
        or bool(run.objective.corrections)
        or "old_entropy" in run.objective.needs
        or rollout.max_staleness > 0
        or (rollout.routing_replay == "trainer" and run.model.top_k > 0)
    )


def _shared(run: Run, batch: Batch | Rows) -> tuple[int, int] | None:
    """Room for prompt and response in shared rows; None where separate rows are no worse."""
    if not run.may_share:
        return None
    mask, segments = processes.fetch((batch.mask, batch.segments))
    start, total = mask.argmax(1), (segments > 0).sum(1)
    data, rollout = run.config.data, run.config.rollout
    prompt = _length(run, int(start.max()), data.max_prompt_length)
    response = _length(run, int((total - start).max()), rollout.max_completion_length)
    group, row = rollout.num_generations, prompt + rollout.num_generations * response
    few = row <= 0.8 * group * mask.shape[1]
    return (prompt, response) if few and row <= _LONGEST_SHARED else None


def _length(run: Run, need: int, longest: int) -> int:
    """One of at most four lengths, not less than 8 apart, so that few shapes are compiled.

    Each divides over the context axis, so that rows can be split along it.
    """
    step = max(-(-longest // 4), 8)
    length, parts = min(-(-need // step) * step, longest), run.mesh.shape["context"]
    return -(-length // parts) * parts


def learn(run: Run, rows: Rows, stats: Metrics, clock: Clock) -> Metrics:
    """Updates on mini-batches that partition the rollout batch, `num_iterations` times over.

    Raises:
      FloatingPointError: Too many updates in a row had no finite gradient.
    """
    optimizer = run.config.optimizer
    group = run.config.rollout.num_generations
    total = rows.tokens.shape[0]
    shared = _shared(run, rows)
    run.engine.unload(keep_pool=True)  # the update reuses the buffers that the sampler leased
    found: list[Metrics] = []
    with clock.measure("perf/update_s"):
        for iteration in range(optimizer.num_iterations):
            rng = np.random.default_rng([run.config.run.seed, 2, run.progress.step, iteration])
            order = rng.permutation(total // group)[:, None] * group + np.arange(group)
            for index in order.reshape(-1, optimizer.mini_batch_size).astype(np.int32):
                part = run.minibatch(rows, index, shared)
                run.state, more, router = run.update(run.state, part)
                found.append(more)
        skipped = int(run.state.skipped_in_row)
        if rows.old_logp is None and router is not None:
            clock.values |= router.metrics()
    if skipped >= optimizer.max_skipped_updates:
        raise TrainingStoppedError(
            f"{skipped} updates in a row were skipped: no finite gradient, or no token with a "
            "weight; lower learning_rate, or see which rewards and masks reach the loss"
        )
    return L.merge(stats, *found)


def sync_weights(run: Run, clock: Clock) -> None:
    """Gives the sampler the new weights."""
    run.progress.step += 1
    with clock.measure("perf/sync_s"):
        run.engine.load(run.weights(), version=run.progress.step)
    clock.values["perf/sync_bytes"] = run.engine.moved


def watch(
    run: Run,
    display: LiveDisplay,
    groups: list[ScoredGroup],
    batch: Batch,
    stats: Metrics,
    clock: Clock,
) -> None:
    """Evaluates, logs, shows and saves, as far as it is time to."""
    step, config = run.progress.step, run.config
    stats = L.merge(
        stats,
        run.compare(batch, step - 1),
        component_metrics(groups, run.scorer.names),
    )
    values = L.finish(processes.fetch(stats)) | clock.values
    seconds = time.perf_counter() - clock.started
    tokens = float(sum(len(r.tokens) for g in groups for r in g.responses))
    values |= {
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_tokens_per_s": tokens / max(values["perf/rollout_s"], 1e-9),
        "perf/compilations": float(compilations.count()),
        "policy/lr": float(run.learning_rate(max(int(run.state.step) - 1, 0))),
        "policy/skipped_updates": float(run.state.skipped),
    }
    values |= _memory()
    due = config.evals.eval_every and step % config.evals.eval_every == 0
    if due or step >= config.run.steps:
        with clock.measure("perf/eval_s"):
            values |= held_out(run)
            if finished(run):
                values |= held_out_samples(run)
        values["perf/eval_s"] = clock.values["perf/eval_s"]
    run.record(step, values, _samples(run, groups))
    display.update(step, values)
    if step % config.run.save_every == 0 or finished(run):
        run.save()


def _memory() -> dict[str, float]:
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    known = [p for p in peaks if p is not None]
    return {"perf/device_memory_gb": max(known) / 1e9} if known else {}


def _samples(run: Run, groups: list[ScoredGroup]) -> list[dict[str, Any]]:
    """One response each of the first groups."""
    return [
        {
            "prompt": g.prompt.text,
            "answer": g.prompt.columns.get("answer"),
            "completion": g.texts[0],
            "reward": float(g.rewards[0]),
            "score": float(g.scores[0]),
            "valid": bool(g.valid[0]),
            "tokens": len(g.responses[0].tokens),
            "finish_reason": g.responses[0].finish_reason,
        }
        for g in groups[: run.config.run.log_samples]
    ]


def held_out(run: Run) -> dict[str, float]:
    """Greedy accuracy on the held-out prompts, which also decides when the run may end.

    Every evaluation draws with the same keys, so that two of them compare weights, not luck.
    """
    if not run.held_out:
        return {}
    progress = run.progress
    greedy = dataclasses.replace(run.sampling, temperature=0.0)
    values = _evaluate(run, greedy, 1)
    accuracy = values[f"eval/{_task_name(run.config)}/greedy"]
    progress.eval_last = accuracy
    progress.best = max(accuracy, progress.best or 0.0)
    reached = 0 < run.config.evals.stop_at <= accuracy
    progress.evals_above_target = progress.evals_above_target + 1 if reached else 0
    return values


def held_out_samples(run: Run) -> dict[str, float]:
    """avg@k and pass@k on the held-out prompts, where `eval_k` asks for them."""
    settings = run.config.evals
    if not run.held_out or not settings.eval_k:
        return {}
    drawn = dataclasses.replace(
        run.sampling,
        temperature=settings.eval_temperature,
        top_p=settings.eval_top_p,
        top_k=0,
        min_p=0.0,
    )
    return _evaluate(run, drawn, settings.eval_k)


def _evaluate(run: Run, sampling: SamplingParams, k: int) -> dict[str, float]:
    return evaluate(
        run.engine,
        run.held_out,
        run.scorer,
        run.tokenizer,
        sampling,
        EvalTask(_task_name(run.config), k, seed_for_evaluation(run.config.run.seed)),
    )


def _task_name(config: Config) -> str:
    source = config.data.eval_data or config.data.data
    return source.rstrip("/").split("/")[-1].split(".")[0]


def finish(run: Run, display: LiveDisplay) -> dict[str, Any]:
    """Draws the curves, writes the result, and says where everything lies."""
    if run.config.run.export:
        models.save_pretrained(run.config.run.export, run.model, run.weights())
    result = {
        "eval_before": run.progress.eval_before,
        "eval_after": run.progress.eval_last,
        "steps": run.progress.step,
        "seconds": round(run.progress.seconds, 1),
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
    (directory / "result.json").write_text(json.dumps(result) + "\n")
