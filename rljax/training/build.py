"""From a configuration to the parts of a run and its state, new or restored."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.config import Config
from rljax.monitoring import MetricsLog
from rljax.rewards import RewardFunction
from rljax.rewards.shared import SharedScorer
from rljax.rollouts import GroupSource
from rljax.sampling import Engine, SamplingParams
from rljax.settings import ProcessSettings
from rljax.training import run_directory, supervised
from rljax.training import state as states
from rljax.training.checkpoints import Checkpoints
from rljax.training.evaluation import Evaluator, evaluation_sampling, task_name
from rljax.training.first_use import FirstUses
from rljax.training.learner import make_learner
from rljax.training.objective_flags import make_objective
from rljax.training.optimizer import make_optimizer
from rljax.training.policy import Policy, open_policy
from rljax.training.prompts import RunPrompts, load_run_prompts, run_alphabet
from rljax.training.reference import freeze_reference
from rljax.training.run import Run
from rljax.training.state import RunState

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(
    config: Config,
    *,
    objective: L.Objective | None = None,
    rewards: Sequence[RewardFunction] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    name: str = "custom",
    mesh: Mesh | None = None,
) -> Iterator[tuple[Run, RunState]]:
    """Builds a run, or restores the one that its directory holds; the engine has the weights.

    Args:
      config: The configuration.
      objective: An objective of your own, in place of the one that the configuration names.
      rewards: Reward functions of your own, or names; the first is the verifier.
      prompts: Rows to train on: dicts with a question and an answer, questions, or chat messages.
      eval_prompts: Held-out rows.
      name: Of the preset, or any other; part of the default run directory.
      mesh: Devices to use, where not all are to be; None: the configuration's mesh.

    Yields:
      The parts of the run, and its state: before the first step, or after the restored one.

    Raises:
      InputError: Something in the configuration does not exist or does not fit; one line.
    """
    config.check()
    chosen = make_objective(config, objective)
    directory = run_directory.locate(config, name)
    own = {} if objective is None else {"objective": _describe(objective)}
    _agree_on(config)
    processes.on_first(run_directory.claim, directory, config, name, own)
    # Programs with collectives in flight at once can wait for each other for ever on CPU devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    policy = open_policy(config, lambda: run_alphabet(config, prompts, eval_prompts), mesh)
    _warn_of_positions(config, policy)
    asked = load_run_prompts(config, policy.tokenizer, prompts, eval_prompts)
    with contextlib.ExitStack() as stack:
        source = _open_source(stack, config, directory, policy, asked, rewards)
        checkpoints = Checkpoints(directory / "checkpoints", config.run.keep_checkpoints)
        stack.callback(checkpoints.close)
        state, restored = _restore(config, policy, chosen, checkpoints, asked)
        log = None
        if processes.is_first():
            log = stack.enter_context(MetricsLog(directory, state.step if restored else None))
        stack.enter_context(jax.set_mesh(policy.mesh))
        values: dict[str, float] = {}
        if not restored and config.supervised.sft_target > 0:
            state, values = _supervise(config, policy, source, asked, state)
        train, reference = freeze_reference(
            directory / "reference",
            policy,
            state.train,
            compares="ref" in chosen.needs,
            restored=restored,
            on_host="reference" in config.mesh.host_memory,
        )
        run = Run(
            config=config,
            directory=directory,
            policy=policy,
            prompts=asked,
            source=source,
            learner=make_learner(config, policy, chosen, reference, FirstUses()),
            evaluator=Evaluator(source, asked.held_out, task_name(config), config),
            checkpoints=checkpoints,
            log=log,
            restored=restored,
            opening=values,
        )
        state = state.replace(train=train)
        run.sync_weights(state)
        if not values:
            _compile_engine(config, source, asked)
        yield run, state


def _open_source(
    stack: contextlib.ExitStack,
    config: Config,
    directory: Path,
    policy: Policy,
    prompts: RunPrompts,
    rewards: Sequence[RewardFunction] | None,
) -> GroupSource:
    """The engine and the reward functions."""
    scorer = stack.enter_context(
        SharedScorer(
            config.rewards.rewards if rewards is None else rewards,
            config.rewards.reward_weights or None,
            config.rewards.reward_timeout,
            output=directory / f"rewards{jax.process_index() or ''}.log",
        )
    )
    for part in filter(None, (prompts.stream.prompts, prompts.held_out, prompts.validation)):
        scorer.check(part[0].columns)
    rollout = config.rollout
    sampling = SamplingParams(
        max_tokens=rollout.max_completion_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(policy.tokenizer.end_ids),
    )
    return GroupSource(_make_engine(config, policy, sampling), policy.tokenizer, scorer, sampling)


def _make_engine(config: Config, policy: Policy, sampling: SamplingParams) -> Engine:
    sampler, longest = config.sampler, config.rollout.max_completion_length
    # Responses that end within a chunk or two leave nothing to gain from fewer rows.
    brief = longest <= 2 * sampler.decode_chunk
    return Engine(
        policy.model,
        policy.mesh,
        slots=sampler.slots,
        least_rows=sampler.slots if brief else max(sampler.slots // 16, 4),
        page_size=sampler.page_size or None,
        num_pages=sampler.num_pages or None,
        max_length=config.data.max_prompt_length + longest,
        chunk=sampler.decode_chunk,
        kernels=sampler.rollout_kernels,
        stop_ids=max(len(policy.tokenizer.end_ids), 1),
        with_routing=policy.model.top_k > 0,
        max_support=sampler.max_support if sampling.filtered else 0,
        detokenize=policy.tokenizer.decode,
        rules=meshes.read_rules(config.mesh.rollout_rules, meshes.ROLLOUT_RULES),
    )


def _supervise(
    config: Config, policy: Policy, source: GroupSource, prompts: RunPrompts, state: RunState
) -> tuple[RunState, dict[str, float]]:
    """The supervised warm-up of a new run, and its metrics."""
    params = state.train.whole
    source.engine.load(params, version=0)
    _compile_engine(config, source, prompts)
    params, values = supervised.warm_up(
        config, policy, source, prompts.stream.prompts, prompts.validation, params
    )
    return state.replace(train=supervised.adopt(state.train, params, policy)), values


def _compile_engine(config: Config, source: GroupSource, prompts: RunPrompts) -> None:
    """Compiles what sampling and evaluation will ask of the engine."""
    evals, sampling = config.evals, source.sampling
    wanted, most = [sampling], config.responses
    if prompts.held_out:
        wanted.append(dataclasses.replace(sampling, temperature=0.0))
        most = max(most, len(prompts.held_out) * max(evals.eval_k, 1))
    if prompts.held_out and evals.eval_k:
        wanted.append(evaluation_sampling(config, sampling))
    asked = [*prompts.stream.prompts, *prompts.held_out, *prompts.validation]
    source.engine.warm_up(
        sampling=wanted,
        max_prompt_length=max(len(prompt.tokens) for prompt in asked),
        num_requests=max(most, len(prompts.validation)),
    )


def _restore(
    config: Config,
    policy: Policy,
    objective: L.Objective,
    checkpoints: Checkpoints,
    prompts: RunPrompts,
) -> tuple[RunState, bool]:
    """The state of the newest checkpoint, or a fresh one; and whether it was restored."""
    critic = objective.critic is not None
    optimizer = make_optimizer(config.optimizer, config.updates, critic)
    on_host = "optimizer" in config.mesh.host_memory
    shapes = states.abstract(
        policy.model, optimizer, objective, policy.mesh, policy.lora, policy.rules, on_host
    )
    stream = prompts.stream
    found = checkpoints.restore(shapes, lambda host: stream.set_state(host["data"]))
    if found is not None:
        state = RunState.restored(*found, stream.prompts)
        _log.info("resumed at step %d", state.step)
        return state, True
    params, base = policy.initial(), None
    critic_params = models.init_critic(params, policy.model, policy.mesh) if critic else None
    if policy.lora is not None:
        key = jax.random.key(config.run.seed)
        params, base = (
            models.init_adapters(key, policy.model, policy.lora, policy.mesh, policy.rules),
            params,
        )
    train = states.create(params, optimizer, objective, policy.mesh, critic_params, on_host)
    train = dataclasses.replace(train, base=base)
    return RunState(train, data=stream.get_state()), False


def _warn_of_positions(config: Config, policy: Policy) -> None:
    """Warns of sequences longer than the model was made for."""
    longest = config.data.max_prompt_length + config.rollout.max_completion_length
    if longest > policy.model.max_positions:
        _log.warning(
            "max_prompt_length + max_completion_length = %d exceed the model's %d positions "
            "(max_position_embeddings): log-probabilities beyond them may be poor",
            longest,
            policy.model.max_positions,
        )


def _describe(objective: L.Objective) -> str:
    """The composition as text, the same in every process: functions by name, not by address."""
    return re.sub(r" at 0x[0-9a-f]+", "", L.describe(objective))


def _agree_on(config: Config) -> None:
    """Refuses processes that were started with different settings."""
    own = {f.name for f in dataclasses.fields(ProcessSettings)}
    processes.agree({name: value for name, value in config.flat().items() if name not in own})
