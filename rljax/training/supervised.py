"""Supervised warm-up: maximum likelihood on the answers, until a validation score is reached."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.batch import Batch
from rljax.config import Config
from rljax.data import Prompt, Tokenizer
from rljax.errors import InputError
from rljax.evals import EvalTask, evaluate, seed_for_evaluation
from rljax.models import Params
from rljax.rollouts import GroupSource
from rljax.sampling import SamplingParams
from rljax.training import state as states
from rljax.training.microbatches import count_micro_batches
from rljax.training.policy import Policy
from rljax.training.state import TrainState
from rljax.training.update import UpdateOptions, make_update

_log = logging.getLogger(__name__)


def warm_up(
    config: Config,
    policy: Policy,
    source: GroupSource,
    prompts: Sequence[Prompt],
    validation: Sequence[Prompt],
    params: Params,
) -> tuple[Params, dict[str, float]]:
    """Trains weights on questions with their answers, up to a low score from which RL can start.

    Ends once greedy accuracy on the validation prompts reaches `sft_target`. Draws its batches
    from the run's seed alone, so that a run killed meanwhile repeats it to the same bits.

    Args:
      config: Of the run.
      policy: The policy.
      source: The engine and the reward functions; the engine's weights are unloaded at the end.
      prompts: Questions with their answers.
      validation: Questions that decide when it ends.
      params: The weights to start from.

    Returns:
      The weights, and metrics of the end.

    Raises:
      InputError: There are no validation prompts, or an answer is too long.
    """
    settings = config.supervised
    if not validation:
        raise InputError(
            f"sft_target={settings.sft_target} needs a validation split, which "
            f"{config.data.data or 'the rows'} does not have; use a generated task, or sft_target=0"
        )
    objective, optimizer = L.supervised(), _optimizer(config)
    prepare = processes.run_serially(jax.jit(objective.prepare))
    parts = count_micro_batches(
        settings.sft_batch_size,
        meshes.batch_shards(policy.mesh),
        config.update.micro_batch_size,
    )
    longest = config.rollout.max_completion_length
    options = UpdateOptions(temperature=1.0, max_scored_tokens=longest, parts=parts)
    update = make_update(policy.model, objective, optimizer, options)
    state = states.create(params, optimizer, objective, policy.mesh)
    rng = np.random.default_rng([config.run.seed, 1])
    values: dict[str, float] = {}
    for step in range(1, settings.sft_max_steps + 1):
        chosen = rng.integers(len(prompts), size=settings.sft_batch_size)
        batch = _answered([prompts[i] for i in chosen], policy.tokenizer, config)
        rows, _ = prepare(meshes.shard_rows(batch, policy.mesh))
        state, stats, _ = update(state, rows)
        if step % settings.sft_eval_every and step < settings.sft_max_steps:
            continue
        accuracy = _validate(config, policy, source, validation, state)
        values = {
            "warmup/steps": float(step),
            "warmup/accuracy": accuracy,
            "warmup/loss": L.finish(processes.fetch(stats))["policy/loss"],
        }
        _log.info("supervised warm-up, step %d: validation accuracy %.3f", step, accuracy)
        if accuracy >= settings.sft_target:
            break
    return state.params, values


def adopt(train: TrainState, params: Params, policy: Policy) -> TrainState:
    """The train state with the weights of the warm-up; the critic starts from them too.

    Under adapters they replace the frozen weights: the warm-up stands for pre-training.
    """
    if train.critic is not None:
        critic = models.init_critic(params, policy.model, policy.mesh)
        train = dataclasses.replace(train, critic=critic)
    if policy.lora is not None:
        return dataclasses.replace(train, base=params)
    return dataclasses.replace(train, params=params)


def _optimizer(config: Config) -> optax.GradientTransformation:
    rate = config.supervised.sft_learning_rate
    return optax.adamw(optax.linear_schedule(rate / 20, rate, 20), b2=0.99, weight_decay=0.0)


def _validate(
    config: Config,
    policy: Policy,
    source: GroupSource,
    validation: Sequence[Prompt],
    state: TrainState,
) -> float:
    """Greedy accuracy on the validation prompts."""
    greedy = SamplingParams(
        max_tokens=config.rollout.max_completion_length,
        temperature=0.0,
        stop_token_ids=tuple(policy.tokenizer.end_ids),
    )
    source.engine.load(state.params, version=0)
    found = evaluate(
        source.engine,
        validation,
        source.scorer,
        policy.tokenizer,
        greedy,
        EvalTask("validation", seed=seed_for_evaluation(config.run.seed)),
    )
    source.engine.unload()
    return found["eval/validation/greedy"]


def _answered(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: Config) -> Batch:
    """Questions with their answers and an end token, as a batch of one fixed length."""
    longest = config.rollout.max_completion_length
    length = config.data.max_prompt_length + longest
    shape = (len(prompts), length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for b, prompt in enumerate(prompts):
        answer = [*tokenizer.encode(str(prompt.columns["answer"])), tokenizer.end_ids[0]]
        n, end = len(prompt.tokens), len(prompt.tokens) + len(answer)
        if len(answer) > longest:
            raise InputError(
                f"the answer {prompt.columns['answer']!r} takes {len(answer)} tokens; raise "
                f"max_completion_length={longest}"
            )
        tokens[b, :n], tokens[b, n:end] = prompt.tokens, answer
        segments[b, :end], mask[b, n:end] = 1, True
    fields: dict[str, Any] = dict(  # numpy arrays, which the device takes as they are
        tokens=tokens,
        mask=mask,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        segments=segments,
        group=np.arange(len(prompts), dtype=np.int32),
        rewards=np.zeros(len(prompts), np.float32),
    )
    return Batch(**fields)
