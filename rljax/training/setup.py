"""From a configuration to the parts of a run, new or restored."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.batch import Batch, Rows
from rljax.config import Config, ObjectiveSettings, ProcessSettings
from rljax.data import (
    TASKS,
    CharTokenizer,
    Prompt,
    PromptStream,
    Tokenizer,
    load_prompts,
    load_rows,
    load_tokenizer,
    model_path,
)
from rljax.errors import InputError
from rljax.losses.base import parts
from rljax.models import ModelConfig, Params
from rljax.monitoring import MetricsLog
from rljax.rewards import Scorer
from rljax.rewards.shared import SharedScorer
from rljax.rollouts import CollectState, plan_sharing, share_rows
from rljax.sampling import Engine, SamplingParams
from rljax.training import state as states
from rljax.training import update as updates
from rljax.training.checkpoints import Checkpoints, load_reference, save_reference
from rljax.training.state import TrainState

_log = logging.getLogger(__name__)

# Settings that add a part to any objective.
_ADDED = (
    "truncated_is", "top_entropy", "entropy_coef", "entropy_target", "router_aux_loss_coef",
    "clip_cov", "kl_cov",
)  # fmt: skip

_MAY_CHANGE = (
    "run.steps", "run.run_dir", "run.resume", "run.save_every", "run.keep_checkpoints",
    "run.export", "run.log_samples", "optimizer.micro_batch_size", "optimizer.share_prompts",
    "optimizer.max_skipped_updates", "rewards.reward_timeout", "evals.stop_at",
)  # fmt: skip


@dataclasses.dataclass
class Progress:
    """What the host knows of a run beside the train state; part of every checkpoint.

    Attributes:
      step: Rollout batches trained on.
      seconds: Time spent so far, over all restarts.
      eval_before: Greedy held-out accuracy before the first step; None: not evaluated.
      eval_last: The newest greedy held-out accuracy.
      best: The best greedy held-out accuracy.
      evals_above_target: Evaluations in a row at or above `stop_at`.
      collect: What dynamic sampling remembers.
      data: Position of the prompt stream.
    """

    step: int = 0
    seconds: float = 0.0
    eval_before: float | None = None
    eval_last: float | None = None
    best: float | None = None
    evals_above_target: int = 0
    collect: CollectState = dataclasses.field(default_factory=CollectState)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "collect": self.collect.to_json()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Progress:
        """The inverse of `to_json`."""
        return cls(**{**saved, "collect": CollectState.from_json(saved["collect"])})


@dataclasses.dataclass
class Run:
    """The parts of a run; `progress` and `state` are what changes from step to step."""

    config: Config
    directory: Path
    mesh: Mesh
    rules: meshes.Rules
    model: ModelConfig
    lora: models.Lora | None
    tokenizer: Tokenizer
    prompts: PromptStream
    held_out: list[Prompt]
    validation: list[Prompt]
    scorer: Scorer
    engine: Engine
    sampling: SamplingParams
    objective: L.Objective
    prepare: Callable[..., Any]
    minibatch: Callable[..., Any]
    score: Callable[..., updates.Scores]
    values: Callable[..., jax.Array]
    update: Callable[..., Any]
    merge: Callable[[TrainState], Params]
    compare: Callable[[Batch, int], dict[str, Any]]
    learning_rate: Callable[[int], Any]
    may_share: bool
    checkpoints: Checkpoints
    log: MetricsLog | None
    state: TrainState
    reference: Params | None
    teacher: Callable[..., jax.Array] | None
    progress: Progress
    restored: bool
    started: float

    def weights(self) -> Params:
        """The policy's weights as they stand, for the sampler, for scoring and for export."""
        return self.state.params if self.lora is None else self.merge(self.state)

    def record(
        self, step: int, values: dict[str, float], samples: list[dict[str, Any]] | None = None
    ) -> None:
        """Logs the numbers of a step, and responses; of several processes the first does."""
        if self.log is not None:
            self.log.log(step, values)
            self.log.samples(step, samples or [])

    def save(self) -> None:
        """Writes a checkpoint of this moment."""
        now = time.perf_counter()
        self.progress.seconds, self.started = self.progress.seconds + now - self.started, now
        self.progress.data = self.prompts.get_state()
        self.checkpoints.save(self.progress.step, self.state, self.progress.to_json())


@contextlib.contextmanager
def start(config: Config, preset: str = "custom", started: float | None = None) -> Iterator[Run]:
    """Builds a run, or restores the one that its directory holds.

    Args:
      config: The configuration.
      preset: Its name, for the directory's.
      started: `time.perf_counter()` of when the user began to wait; now by default.

    Raises:
      ValueError: Something in the configuration cannot be had or does not fit; one line.
      FileNotFoundError: A file does not exist.
    """
    config.check()
    started = time.perf_counter() if started is None else started
    directory = Path(config.run.run_dir or f"runs/{preset}-seed{config.run.seed}")
    _agree_on(config)
    processes.on_first(_claim, directory, config, preset)
    # Programs with collectives in flight at once can wait for each other for ever on CPU devices.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mesh = meshes.from_flags(config.model.mesh)
    rules = meshes.read_rules(config.model.train_rules, meshes.TRAIN_RULES)
    policy = _Policy.open(config, mesh, rules)
    settings, data = config.rollout, config.data
    columns: dict[str, Any] = {
        "question_column": data.question_column or None,
        "answer_column": data.answer_column or None,
    }
    prompts = PromptStream(
        data.data,
        policy.tokenizer,
        data.template,
        config.run.seed,
        data.max_prompt_length,
        **columns,
    )
    processes.agree({"digest of the prompts": prompts.get_state()["digest"]})
    held_out, validation = _held_out(config, policy.tokenizer, columns)
    functions, weights = config.rewards.rewards, config.rewards.reward_weights
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(
            SharedScorer(
                functions,
                weights or None,
                config.rewards.reward_timeout,
                output=directory / f"rewards{jax.process_index() or ''}.log",
            )
        )
        scorer.check(prompts.prompts[0].columns)
        # Responses that end within a chunk or two leave nothing to gain from fewer rows.
        brief = settings.max_completion_length <= 2 * settings.decode_chunk
        sampling = SamplingParams(
            max_tokens=settings.max_completion_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop_token_ids=tuple(policy.tokenizer.end_ids),
        )
        engine = Engine(
            policy.model,
            mesh,
            slots=settings.slots,
            least_rows=settings.slots if brief else max(settings.slots // 16, 4),
            page_size=settings.page_size,
            num_pages=settings.num_pages or None,
            max_length=data.max_prompt_length + settings.max_completion_length,
            chunk=settings.decode_chunk,
            kernels="native" if settings.native_rollouts else "off",
            stop_ids=max(len(policy.tokenizer.end_ids), 1),
            with_routing=policy.model.top_k > 0,
            max_support=settings.max_support if sampling.filtered else 0,
            detokenize=policy.tokenizer.decode,
            rules=meshes.read_rules(config.model.rollout_rules, meshes.ROLLOUT_RULES),
        )
        objective = make_objective(config)
        _check_balance(config, policy.model)
        with_critic = objective.critic is not None
        optimizer = states.make_optimizer(config.optimizer, config.updates, with_critic)
        checkpoints = Checkpoints(directory / "checkpoints", config.run.keep_checkpoints)
        stack.callback(checkpoints.close)
        lora = _lora(config)
        on_host = "optimizer" in config.model.host_memory
        shapes = states.abstract(policy.model, optimizer, objective, mesh, lora, rules, on_host)
        found = checkpoints.restore(shapes)
        if found is None:
            params, base = policy.initial(), None
            critic = models.init_critic(params, policy.model, mesh) if with_critic else None
            if lora is not None:
                key = jax.random.key(config.run.seed)
                params, base = models.init_adapters(key, policy.model, lora, mesh, rules), params
            state = states.create(params, optimizer, objective, mesh, critic, on_host)
            state = dataclasses.replace(state, base=base)
            progress = Progress()
        else:
            _, state, host = found
            progress = Progress.from_json(host)
            prompts.set_state(progress.data)
            _log.info("resumed %s at step %d", directory, progress.step)
        log = None
        if processes.is_first():
            log = MetricsLog(directory, None if found is None else progress.step)
            stack.enter_context(log)
        shards = meshes.batch_shards(mesh)
        may_share = _may_share(config, shards)
        rollout_rows = settings.prompts_per_step * settings.num_generations
        shared: dict[str, Any] = {
            "temperature": settings.temperature,
            "max_scored_tokens": settings.max_completion_length,
        }
        scoring = {
            "parts": updates.micro_batches(rollout_rows, shards, config.optimizer.micro_batch_size),
            "group_size": settings.num_generations if may_share else 1,
        }
        run = Run(
            config=config,
            directory=directory,
            mesh=mesh,
            rules=rules,
            model=policy.model,
            lora=lora,
            tokenizer=policy.tokenizer,
            prompts=prompts,
            held_out=held_out,
            validation=validation,
            scorer=scorer,
            engine=engine,
            sampling=sampling,
            objective=objective,
            prepare=processes.run_serially(jax.jit(objective.prepare)),
            minibatch=processes.run_serially(
                jax.jit(
                    functools.partial(_minibatch, objective, settings.num_generations),
                    static_argnums=2,
                )
            ),
            score=updates.make_score(
                policy.model, **shared, **scoring, replay=settings.routing_replay == "sampler"
            ),
            values=updates.make_values(
                policy.model, group_size=settings.num_generations if may_share else 1
            ),
            update=updates.make_update(
                policy.model,
                objective,
                optimizer,
                **shared,
                parts=updates.micro_batches(
                    config.optimizer.mini_batch_size, shards, config.optimizer.micro_batch_size
                ),
                replay=settings.routing_replay != "none",
                seed=config.run.seed,
                lora=lora,
                bias_rate=config.optimizer.router_bias_update_rate,
                on_host=on_host,
            ),
            merge=processes.run_serially(jax.jit(lambda state: state.weights(lora))),
            compare=processes.run_serially(jax.jit(_compare)),
            learning_rate=states.learning_rate(config.optimizer, config.updates),
            may_share=may_share,
            checkpoints=checkpoints,
            log=log,
            state=state,
            reference=None,
            teacher=_teacher(config, policy, mesh, rules, shared | scoring),
            progress=progress,
            restored=found is not None,
            started=started,
        )
        stack.enter_context(jax.set_mesh(mesh))
        yield run


def _minibatch(
    objective: L.Objective,
    group_size: int,
    rows: Rows,
    index: jax.Array,
    shared: tuple[int, int] | None,
) -> Rows:
    """Cuts the rows of an optimizer step, weighs them, and lets groups share their prompts."""
    part = objective.minibatch(rows, index)
    if shared is None:
        return part
    return share_rows(plan_sharing(part.mask, part.segments, group_size, *shared), part)


def _compare(batch: Batch, version: int) -> dict[str, Any]:
    """How far the sampler was from the trainer at the start of the step."""
    mismatch = L.mismatch(batch) if batch.old_logp is not None else {}
    return {**mismatch, **L.staleness(batch, version)}


def _may_share(config: Config, shards: int) -> bool:
    """Whether groups may share rows: whole groups must fit a device and a micro-batch."""
    group, optimizer = config.rollout.num_generations, config.optimizer
    micro = optimizer.micro_batch_size or group
    return (
        optimizer.share_prompts == "auto"
        and optimizer.mini_batch_size // group % shards == 0
        and config.rollout.prompts_per_step % shards == 0
        and micro % group == 0
    )


def freeze_reference(run: Run) -> None:
    """Keeps the policy as it stands, where an objective compares with it or adapters rest on it.

    It is written to the run directory before the first step and read back on resume. Under
    adapters it is the weights that never change, in the dtypes of the forward pass.
    """
    compares, adapts = "ref" in run.objective.needs, run.lora is not None
    if not (compares or adapts):
        return
    place = run.directory / "reference"
    target = models.abstract(run.model, mesh=run.mesh, rules=run.rules)
    if adapts:
        lean = jax.eval_shape(lambda p: models.cast_for_compute(p, run.model), target)
        target = jax.tree.map(
            lambda x, d: jax.ShapeDtypeStruct(x.shape, d.dtype, sharding=x.sharding), target, lean
        )
    if "reference" in run.config.model.host_memory:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=meshes.on_host(x.sharding)),
            target,
        )
    if not run.restored:
        whole = run.state.whole
        save_reference(place, models.cast_for_compute(whole, run.model) if adapts else whole)
    start = load_reference(place, target)
    if adapts:
        run.state = dataclasses.replace(run.state, base=start)
    if compares:
        run.reference = start


def make_objective(config: Config) -> L.Objective:
    """The named objective with the settings that were given.

    Raises:
      ValueError: A setting was given that the objective does not take.
    """
    chosen = config.objective
    build = getattr(L, chosen.objective)
    taken = inspect.signature(build).parameters
    given = {
        f.name: value
        for f in dataclasses.fields(chosen)
        if f.name not in ("objective", *_ADDED) and (value := getattr(chosen, f.name)) is not None
    }
    for name in given:
        if name not in taken:
            raise InputError(
                f"{name}={given[name]} means nothing to objective={chosen.objective}; leave it "
                f"out, or choose an objective that takes it ({chosen.objective} takes "
                f"{', '.join(taken)})"
            )
    longest = config.rollout.max_completion_length
    if chosen.objective == "dapo":
        given.setdefault("overlong_max", longest)
        if given["overlong_max"] > longest:
            raise InputError(
                f"overlong_max={given['overlong_max']} is longer than max_completion_length="
                f"{longest}; no response could reach it"
            )
        given.setdefault("overlong_cache", max(given["overlong_max"] // 5, 1))
    if chosen.objective == "gdpo":
        rewards = config.rewards
        given["reward_weights"] = rewards.reward_weights or (1.0,) * len(rewards.rewards)
    if chosen.objective == "dr_grpo":
        given["length"] = longest
    return _with_additions(build(**given), chosen)


def _with_additions(objective: L.Objective, chosen: ObjectiveSettings) -> L.Objective:
    """The objective with the parts that any may have."""
    corrections, masks, terms = (
        list(objective.corrections),
        list(objective.masks),
        list(objective.regularisers),
    )
    policy = objective.policy
    if chosen.truncated_is is not None:
        corrections.append(L.truncated_is(cap=chosen.truncated_is))
    if chosen.top_entropy is not None:
        masks.append(L.top_entropy(chosen.top_entropy))
    if chosen.entropy_target is not None:
        adaptive = L.adaptive_entropy(chosen.entropy_target)
        if chosen.entropy_coef is not None:
            adaptive = dataclasses.replace(adaptive, initial=chosen.entropy_coef)
        terms.append(adaptive)
    elif chosen.entropy_coef is not None:
        terms.append(L.entropy_bonus(chosen.entropy_coef))
    if chosen.router_aux_loss_coef is not None:
        terms.append(L.router_balance(chosen.router_aux_loss_coef))
    if chosen.clip_cov is not None:
        terms.append(L.clip_cov(fraction=chosen.clip_cov))
    if chosen.kl_cov is not None:
        terms.append(L.kl_cov(coef=chosen.kl_cov))
        if [type(part) for part in parts(policy)] != [L.token_ratio, L.ppo_clip]:
            raise InputError(
                f"kl_cov={chosen.kl_cov} takes the place of a clipping window on token ratios, "
                f"which objective={chosen.objective} does not have; use grpo, dr_grpo or dapo"
            )
        policy = L.chain(L.token_ratio(), L.policy_gradient())
    return dataclasses.replace(
        objective,
        policy=policy,
        corrections=tuple(corrections),
        masks=tuple(masks),
        regularisers=tuple(terms),
    )


@dataclasses.dataclass(frozen=True)
class _Policy:
    """The model's description, its tokenizer, and how its first weights come about."""

    model: ModelConfig
    tokenizer: Tokenizer
    initial: Callable[[], Params]

    @classmethod
    def open(cls, config: Config, mesh: Mesh, rules: meshes.Rules) -> _Policy:
        name, dtype = config.model.model, config.model.compute_dtype
        ways: Any = {
            "remat": config.model.remat,
            "expert_dispatch": config.model.expert_dispatch,
            "expert_backend": config.model.expert_backend,
            "pipeline_repeats": config.model.pipeline_repeats,
            "pipeline_rows": config.model.pipeline_rows,
        }
        path = model_path(name)
        if path.exists():
            tokenizer: Any = load_tokenizer(path)
            model, params = models.from_pretrained(
                path, jnp.float32, mesh, rules=rules, compute_dtype=dtype
            )
            return cls(dataclasses.replace(model, **ways), tokenizer, lambda: params)
        if name not in models.PRESETS:
            raise InputError(
                f"model={name!r} is neither a folder or .gguf file nor one of smollm2, "
                f"{', '.join(models.PRESETS)}; mend the path"
            )
        tokenizer = CharTokenizer(_alphabet(config))
        model = dataclasses.replace(
            models.PRESETS[name](), vocab_size=tokenizer.vocab_size, dtype=dtype, **ways
        )
        key = jax.random.key(config.run.seed)
        return cls(model, tokenizer, lambda: models.init(key, model, mesh=mesh, rules=rules))


def _check_balance(config: Config, model: ModelConfig) -> None:
    """Refuses balancing of what the model does not have."""
    coef, rate = config.objective.router_aux_loss_coef, config.optimizer.router_bias_update_rate
    if coef is not None and not model.top_k:
        raise InputError(
            f"router_aux_loss_coef={coef}: the model has no experts to balance; leave it out"
        )
    kinds = [b.feed_forward for b in model.layers]
    if rate and not any(isinstance(c, models.Experts) and c.correction_bias for c in kinds):
        raise InputError(
            f"router_bias_update_rate={rate}: the model's routers have no correction bias (that of "
            "deepseek_v3 does); use router_aux_loss_coef"
        )
    if rate and config.model.lora_rank:
        raise InputError(
            f"router_bias_update_rate={rate} would move weights that lora_rank="
            f"{config.model.lora_rank} freezes; set one of them to 0"
        )


def _lora(config: Config) -> models.Lora | None:
    """The adapters that the flags ask for."""
    m = config.model
    return models.Lora(m.lora_rank, m.lora_alpha, m.lora_targets) if m.lora_rank else None


def _teacher(
    config: Config, policy: _Policy, mesh: Mesh, rules: meshes.Rules, scoring: dict[str, Any]
) -> Callable[..., jax.Array] | None:
    """The teacher's log-probabilities of a batch: (batch, shared) -> float32 [B, T].

    Raises:
      ValueError: There is no such teacher, or it has another vocabulary than the policy.
    """
    if not config.model.teacher:
        return None
    dtype = config.model.compute_dtype
    path = model_path(config.model.teacher)
    model, params = models.from_pretrained(path, dtype, mesh, rules=rules)
    if model.vocab_size != policy.model.vocab_size:
        raise InputError(
            f"teacher={config.model.teacher!r} has a vocabulary of {model.vocab_size} tokens, the "
            f"policy one of {policy.model.vocab_size}; choose a teacher of the same family"
        )
    score = updates.make_score(model, **scoring)
    # Its experts are its own: the routing of the policy means nothing to it.
    return lambda batch, shared: score(params, batch.replace(routing=None), shared).logp


def _alphabet(config: Config) -> str:
    """The characters of the training data: what a model from random weights must know."""
    rows = load_rows(config.data.data, "train")
    return "".join(sorted({c for row in rows for value in row.values() for c in str(value)}))


def _held_out(
    config: Config, tokenizer: Tokenizer, columns: dict[str, Any]
) -> tuple[list[Prompt], list[Prompt]]:
    """Held-out and validation prompts, as far as there are any."""
    data = config.data

    def load(source: str, split: str) -> list[Prompt]:
        return load_prompts(
            source,
            tokenizer,
            data.template,
            split=split,
            max_prompt_length=data.max_prompt_length,
            **columns,
        )

    generated = data.data in TASKS
    held_out = []
    if data.eval_data or generated or Path(data.data).is_dir():
        held_out = load(data.eval_data or data.data, "test")
    most = config.evals.eval_prompts
    validation = load(data.data, "validation") if generated else []
    return held_out[:most] if most else held_out, validation


def _agree_on(config: Config) -> None:
    """Refuses processes that were started with different settings.

    Raises:
      ValueError: The first setting that differs.
    """
    parts = dataclasses.asdict(dataclasses.replace(config, processes=ProcessSettings()))
    processes.agree({name: value for fields in parts.values() for name, value in fields.items()})


def _claim(directory: Path, config: Config, preset: str) -> None:
    """Writes the configuration into a new run directory, or refuses one that holds another run.

    A directory holds a run once it holds a checkpoint; one whose start failed is new.
    """
    file = directory / "config.json"
    resume = config.run.resume
    checkpoints = directory / "checkpoints"
    holds = checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir())
    if not holds:
        if resume == "must":
            raise InputError(f"resume=must, but {directory} holds no run; check run_dir")
        directory.mkdir(parents=True, exist_ok=True)
        versions = {
            name: metadata.version(name) for name in ("rljax", "jax", "jaxlib", "flax", "optax")
        }
        record = {
            "preset": preset,
            "config": dataclasses.asdict(config),
            "versions": {"python": platform.python_version(), **versions},
        }
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.rename(file)
        return
    if resume == "never":
        raise InputError(f"resume=never, but {directory} holds a run; choose another run_dir")
    saved = json.loads(file.read_text())["config"]
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    for part, fields in now.items():
        for name, value in fields.items():
            old = saved.get(part, {}).get(name)
            free = (part == "processes" or f"{part}.{name}" in _MAY_CHANGE) and not (
                name == "steps" and config.optimizer.lr_schedule != "constant"
            )
            if old != value and not free:
                raise InputError(
                    f"{directory} holds a run with {name}={old!r}, got {value!r}; choose another "
                    "run_dir, or give the old value to continue it"
                )
