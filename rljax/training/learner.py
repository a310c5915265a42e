"""The trainer's side of a step: scoring a batch, preparing it, updating on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax import losses as L
from rljax import mesh as meshes
from rljax import processes
from rljax.batch import Batch, Rows
from rljax.config import Config
from rljax.errors import InputError, TrainingStoppedError
from rljax.mesh import constrain_rows
from rljax.models import Params
from rljax.packing import Layout
from rljax.rollouts import ScoredGroup, make_batch
from rljax.training.first_use import FirstUses
from rljax.training.metrics import Metrics
from rljax.training.microbatches import count_micro_batches
from rljax.training.optimizer import learning_rate, make_optimizer
from rljax.training.policy import Policy, load_teacher
from rljax.training.row_cost import row_cost
from rljax.training.rows import RowPlanner, RowShapes
from rljax.training.scoring import ScoreOptions, Scores, make_score, make_values
from rljax.training.state import RunState
from rljax.training.update import Update, UpdateOptions, make_update

Teacher = Callable[[Batch, Layout | None], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The compiled functions of training; each compiles once for each shape of rows.

    Attributes:
      prepare: (batch) -> (rows, metrics): `Objective.prepare`.
      minibatch: (rows, index, layout) -> rows of one optimizer step, weighed as a whole and packed.
      score: (params, batch, layout) -> `Scores`.
      values: (critic, batch, layout) -> float32 [B, T].
      update: (train state, rows, cut) -> (train state, metrics, router sums).
      compare: (batch, version) -> metrics of mismatch and staleness.
    """

    prepare: Callable[[Batch], tuple[Rows, Metrics]]
    minibatch: Callable[..., Rows]
    score: Callable[..., Scores]
    values: Callable[..., jax.Array]
    update: Update
    compare: Callable[[Batch, int], Metrics]


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """Turns groups into updates of the policy.

    Attributes:
      config: Of the run.
      policy: What is trained.
      objective: What is minimised.
      programs: The compiled functions.
      planner: Chooses the shapes of rows.
      reference: The reference policy's weights, where the objective compares with it.
      teacher: The teacher's log-probabilities of a batch, where the objective needs them.
      first_uses: Announces compilations.
    """

    config: Config
    policy: Policy
    objective: L.Objective
    programs: Programs
    planner: RowPlanner
    reference: Params | None
    teacher: Teacher | None
    first_uses: FirstUses

    @property
    def needs_scores(self) -> bool:
        """Whether a batch is scored by the trainer before the update.

        That pass is left out where one on-policy update follows and nothing else asks for it: the
        live policy is then the one at the start of the step, and the update measures the mismatch.
        """
        replays = self.config.rollout.routing_replay == "trainer" and self.policy.model.top_k > 0
        return (
            self.config.updates_per_step > 1
            or not {"old", "old_entropy"}.isdisjoint(self.objective.prepare_needs)
            or self.config.rollout.max_staleness > 0
            or replays
        )

    def score(
        self, state: RunState, groups: Sequence[ScoredGroup], shapes: RowShapes
    ) -> tuple[Batch, Metrics]:
        """Lays the groups out as a batch, with the log-probabilities of trainer and reference.

        Args:
          state: Of the run.
          groups: A rollout batch.
          shapes: Of its rows.

        Returns:
          The batch on the devices, and metrics of the routers.

        Raises:
          InputError: The objective cannot take these rewards, such as negative ones.
        """
        batch = make_batch(groups, shapes.length)
        self.objective.check_values(batch)  # which the compiled `prepare` cannot
        batch = meshes.shard_rows(batch, self.policy.mesh)
        metrics: dict[str, Any] = {}
        packed = self.planner.pack(shapes) if self._scores(state) else None
        layout = None if packed is None else packed.layout
        with self.first_uses.of("scoring", packed or shapes, (packed or shapes).padding):
            if self.needs_scores:
                found = self.programs.score(self.policy.weights(state.train), batch, layout)
                batch = batch.replace(old_logp=found.logp, old_entropy=found.entropy)
                if self.config.rollout.routing_replay == "trainer":
                    batch = batch.replace(routing=found.routing)
                if found.router is not None:
                    metrics |= found.router.metrics()
            if self.reference is not None:
                reference = jax.device_put(self.reference, jax.memory.Space.Device)
                found = self.programs.score(reference, batch, layout)
                batch = batch.replace(ref_logp=found.logp)
            if self.teacher is not None:
                batch = batch.replace(teacher_logp=self.teacher(batch, layout))
            if state.train.critic is not None:
                values = self.programs.values(state.train.critic, batch, layout)
                batch = batch.replace(values=values)
            jax.block_until_ready(batch)
        return batch, metrics

    def prepare(self, batch: Batch) -> tuple[Rows, Metrics]:
        """Advantages, corrections and token weights: all that does not need the live policy.

        Args:
          batch: What `score` gave.

        Returns:
          The rows to train on, and metrics of the batch.
        """
        return self.programs.prepare(batch)

    def compare(self, batch: Batch, version: int) -> Metrics:
        """How far the sampler was from the trainer, and how old the tokens were."""
        return self.programs.compare(batch, version)

    def learn(self, state: RunState, rows: Rows, shapes: RowShapes) -> tuple[RunState, Metrics]:
        """Updates on mini-batches that partition the rollout batch, `num_iterations` times over.

        Args:
          state: Of the run; its train state is donated.
          rows: What `prepare` gave.
          shapes: Of the rows.

        Returns:
          The new state, and metrics of the updates.

        Raises:
          TrainingStoppedError: Too many updates in a row had no finite gradient.
        """
        train, parts, router = state.train, [], None
        for index in self._mini_batches(state.step, rows.tokens.shape[0]):
            packed = self.planner.pack(shapes, index)
            layout = None if packed is None else packed.layout
            padding = shapes.padding if packed is None else packed.padding
            with self.first_uses.of("the update", packed or shapes, padding):
                part = self.programs.minibatch(rows, index, layout)
                cut = None if layout is None else layout.cut
                train, metrics, router = self.programs.update(train, part, cut)
            share = L.Mean(jnp.float32(padding), jnp.float32(1))
            parts.append({**metrics, "perf/padding_frac": share})
        counts = (train.step, train.skipped, train.skipped_in_row)
        step, skipped, in_row = (int(x) for x in processes.fetch(counts))
        if in_row >= self.config.update.max_skipped_updates:
            raise TrainingStoppedError(
                f"{in_row} updates in a row were skipped: no finite gradient, or no token with a "
                "weight; lower learning_rate, or check which rewards and masks reach the loss"
            )
        values = {
            "policy/lr": float(self._learning_rate(max(step - skipped - 1, 0))),
            "policy/skipped_updates": float(skipped),
        }
        if rows.old_logp is None and router is not None:
            values |= router.metrics()
        return state.replace(train=train), L.merge(*parts) | values

    def _scores(self, state: RunState) -> bool:
        """Whether a batch is passed through any model before the update."""
        others = (self.reference, self.teacher, state.train.critic)
        return self.needs_scores or any(other is not None for other in others)

    @functools.cached_property
    def _learning_rate(self) -> optax.Schedule:
        return learning_rate(self.config.optimizer, self.config.updates)

    def _mini_batches(self, step: int, total: int) -> list[np.ndarray]:
        """The rows of each update, whole groups in an order drawn for the step."""
        group, found = self.config.rollout.num_generations, []
        for iteration in range(self.config.update.num_iterations):
            rng = np.random.default_rng([self.config.run.seed, 2, step, iteration])
            order = rng.permutation(total // group)[:, None] * group + np.arange(group)
            found += list(order.reshape(-1, self.config.mini_batch_size).astype(np.int32))
        return found


def make_learner(
    config: Config,
    policy: Policy,
    objective: L.Objective,
    reference: Params | None,
    first_uses: FirstUses,
) -> Learner:
    """The learner of a run, with nothing compiled yet.

    Args:
      config: Of the run.
      policy: What is trained.
      objective: What is minimised.
      reference: The reference policy's weights, where the objective compares with it.
      first_uses: Announces compilations.

    Raises:
      InputError: The batch does not divide over the devices, or a teacher is given that the
        objective does not need, or none that it needs.
    """
    wants = "teacher" in objective.needs
    if wants != bool(config.model.teacher):
        raise InputError(
            f"teacher={config.model.teacher!r} with objective={config.objective.objective}: "
            + ("give it a teacher" if wants else "it takes no teacher; leave it out")
        )
    shards, update = meshes.batch_shards(policy.mesh), config.update
    scoring = ScoreOptions(
        temperature=config.rollout.temperature,
        max_scored_tokens=config.rollout.max_completion_length,
        parts=count_micro_batches(config.responses, shards, update.micro_batch_size),
        replay=config.rollout.routing_replay == "sampler",
    )
    return Learner(
        config=config,
        policy=policy,
        objective=objective,
        programs=_programs(config, policy, objective, scoring),
        planner=RowPlanner(
            config.data.max_prompt_length,
            config.rollout.max_completion_length,
            config.rollout.num_generations,
            packs=update.packing == "auto",
            shares=update.share_prompts == "auto",
            shards=shards,
            divisor=policy.mesh.shape["context"],
            micro_batch_tokens=update.micro_batch_tokens,
            micro_batch_size=update.micro_batch_size,
            cost=row_cost(policy.model),
        ),
        reference=reference,
        teacher=_teacher(config, policy, scoring) if wants else None,
        first_uses=first_uses,
    )


def _programs(
    config: Config, policy: Policy, objective: L.Objective, scoring: ScoreOptions
) -> Programs:
    minibatch = functools.partial(_minibatch, objective)
    options = UpdateOptions(
        temperature=scoring.temperature,
        max_scored_tokens=scoring.max_scored_tokens,
        parts=count_micro_batches(
            config.mini_batch_size,
            meshes.batch_shards(policy.mesh),
            config.update.micro_batch_size,
        ),
        replay=config.rollout.routing_replay != "none",
        seed=config.run.seed,
        lora=policy.lora,
        bias_rate=config.update.router_bias_update_rate,
        on_host="optimizer" in config.mesh.host_memory,
    )
    optimizer = make_optimizer(config.optimizer, config.updates, objective.critic is not None)
    return Programs(
        prepare=processes.run_serially(jax.jit(objective.prepare)),
        minibatch=processes.run_serially(jax.jit(minibatch)),
        score=make_score(policy.model, scoring),
        values=make_values(policy.model, scoring.parts),
        update=make_update(policy.model, objective, optimizer, options),
        compare=processes.run_serially(jax.jit(_compare)),
    )


def _minibatch(objective: L.Objective, rows: Rows, index: jax.Array, layout: Layout | None) -> Rows:
    """Cuts the rows of an optimizer step, weighs them as a whole, and packs them."""
    part = objective.minibatch(rows, index)
    return part if layout is None else jax.tree.map(constrain_rows, part.lay_out(layout))


def _compare(batch: Batch, version: int) -> Metrics:
    mismatch = L.mismatch(batch) if batch.old_logp is not None else {}
    return {**mismatch, **L.staleness(batch, version)}


def _teacher(config: Config, policy: Policy, scoring: ScoreOptions) -> Teacher:
    model, params = load_teacher(config, policy)
    score = make_score(model, dataclasses.replace(scoring, replay=False))
    # Its experts are its own: the routing of the policy means nothing to it.
    return lambda batch, layout: score(params, batch.replace(routing=None), layout).logp
