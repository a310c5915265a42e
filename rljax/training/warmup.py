"""Supervised warm-up: maximum likelihood on the answers, until a validation score is reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.batch import Batch
from rljax.data import Prompt
from rljax.errors import InputError
from rljax.evals import EvalTask, evaluate, seed_for_evaluation
from rljax.sampling import SamplingParams
from rljax.training import state as states
from rljax.training import update as updates
from rljax.training.setup import Run


def warm_up(run: Run, tell: Callable[[str], None]) -> dict[str, float]:
    """Trains the policy on questions with their answers; it starts poor and is to stay poor.

    Ends once greedy accuracy on the validation prompts reaches `sft_target`, whatever the count
    of steps: the score jumps within a few of them. Draws its batches from the run's seed alone,
    so that a run killed meanwhile repeats it to the same bits.

    Args:
      run: The run; its state's parameters are replaced, its optimizer state is not touched.
      tell: Receives a line about each validation.

    Returns:
      The numbers of the end, under the names of the tag table.

    Raises:
      ValueError: The data have no validation split.
    """
    settings = run.config.supervised
    if not run.validation:
        raise InputError(
            f"sft_target={settings.sft_target} needs a validation split, which "
            f"{run.config.data.data} does not have; use a generated task, or sft_target=0"
        )
    optimizer = optax.adamw(
        optax.linear_schedule(settings.sft_learning_rate / 20, settings.sft_learning_rate, 20),
        b2=0.99,
        weight_decay=0.0,
    )
    objective = L.supervised()
    prepare = processes.run_serially(jax.jit(objective.prepare))
    update = updates.make_update(
        run.model,
        objective,
        optimizer,
        temperature=1.0,
        max_scored_tokens=run.config.rollout.max_completion_length,
    )
    state = states.create(run.state.whole, optimizer, objective, run.mesh)
    rng = np.random.default_rng([run.config.run.seed, 1])
    greedy = SamplingParams(
        max_tokens=run.config.rollout.max_completion_length,
        temperature=0.0,
        stop_token_ids=tuple(run.tokenizer.end_ids),
    )
    values: dict[str, float] = {}
    for step in range(1, settings.sft_max_steps + 1):
        chosen = rng.integers(len(run.prompts.prompts), size=settings.sft_batch_size)
        batch = _answered(run, [run.prompts.prompts[i] for i in chosen])
        rows, _ = prepare(meshes.shard_rows(batch, run.mesh))
        state, stats, _ = update(state, rows)
        if step % settings.sft_eval_every and step < settings.sft_max_steps:
            continue
        run.engine.load(state.params, version=0)
        found = evaluate(
            run.engine,
            run.validation,
            run.scorer,
            run.tokenizer,
            greedy,
            EvalTask("validation", seed=seed_for_evaluation(run.config.run.seed)),
        )
        run.engine.unload()
        accuracy = found["eval/validation/greedy"]
        values = {
            "warmup/steps": float(step),
            "warmup/accuracy": accuracy,
            "warmup/loss": L.finish(stats)["policy/loss"],
        }
        tell(f"supervised warm-up, step {step}: validation accuracy {accuracy:.3f}")
        if accuracy >= settings.sft_target:
            break
    critic = run.state.critic
    if critic is not None:  # it starts from the policy as it stands now
        critic = models.init_critic(state.params, run.model, run.mesh)
    run.state = dataclasses.replace(run.state, critic=critic)
    if run.lora is None:
        run.state = dataclasses.replace(run.state, params=state.params)
    else:  # adapters are for what follows: the warm-up stands in for pre-training
        run.state = dataclasses.replace(run.state, base=state.params)
    return values


def _answered(run: Run, prompts: list[Prompt]) -> Batch:
    """Questions with their answers and an end token, as a batch of one fixed length."""
    length = run.config.data.max_prompt_length + run.config.rollout.max_completion_length
    shape = (len(prompts), length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for b, prompt in enumerate(prompts):
        answer = [*run.tokenizer.encode(str(prompt.columns["answer"])), run.tokenizer.end_ids[0]]
        n, end = len(prompt.tokens), len(prompt.tokens) + len(answer)
        if len(answer) > run.config.rollout.max_completion_length:
            raise InputError(
                f"the answer {prompt.columns['answer']!r} takes {len(answer)} tokens; raise "
                f"max_completion_length={run.config.rollout.max_completion_length}"
            )
        tokens[b, :n], tokens[b, n:end] = prompt.tokens, answer
        segments[b, :end], mask[b, n:end] = 1, True
    rows = np.arange(len(prompts), dtype=np.int32)
    fields: dict[str, Any] = dict(  # numpy arrays, which the device takes as they are
        tokens=tokens,
        mask=mask,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        segments=segments,
        group=rows,
        rewards=np.zeros(len(prompts), np.float32),
    )
    return Batch(**fields)
