"""What changes from step to step: the train state, and all else that a checkpoint holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models, processes
from rljax.errors import InputError
from rljax.models import ModelConfig, Params
from rljax.rollouts import CollectState


@struct.dataclass
class TrainState:
    """Everything that an update changes; 12 bytes a parameter with AdamW.

    Attributes:
      step: int32, optimizer updates tried: those skipped are counted, those held are not.
      params: float32 master weights; with adapters theirs, as `models.init_adapters` makes them.
      critic: The critic's, as `models.init_critic` makes it; None without one.
      base: With adapters, the frozen weights under them; not part of checkpoints.
      objective: What the objective remembers from step to step (`Objective.init_state`).
      opt_state: The optimizer's.
      skipped: int32, updates skipped so far for want of a finite gradient or of any weight.
      skipped_in_row: int32, how many of the last updates were skipped without a break.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]
    critic: Params | None = None
    base: Params | None = None
    objective: dict[str, Array] = struct.field(default_factory=dict)

    @property
    def trained(self) -> Any:
        """What the optimizer changes: the policy's weights, and the critic's where it has one."""
        return self.params if self.critic is None else (self.params, self.critic)

    @property
    def whole(self) -> Params:
        """The weights of all matrices, without adapters."""
        return self.params if self.base is None else self.base

    @property
    def applied(self) -> Int[Array, ""]:
        """int32, updates that changed the weights: what the learning-rate schedule counts."""
        return self.step - self.skipped

    def weights(self, lora: models.Lora | None) -> Params:
        """The policy's weights, adapters merged."""
        return policy_weights(self.params, self.base, lora)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Counters of a run that only the host needs.

    Attributes:
      seconds: Time spent so far, over all restarts.
      eval_before: Greedy held-out accuracy before the first step; None: not evaluated.
      eval_last: The newest greedy held-out accuracy.
      best: The best greedy held-out accuracy.
      evals_above_target: Evaluations in a row at or above `stop_at`.
    """

    seconds: float = 0.0
    eval_before: float | None = None
    eval_last: float | None = None
    best: float | None = None
    evals_above_target: int = 0


@dataclasses.dataclass(frozen=True)
class RunState:
    """Everything that shapes the rest of a run: what a checkpoint holds, and nothing else.

    Attributes:
      train: Weights, optimizer and all else on the devices.
      step: Rollout batches trained on; also the version of the policy's weights.
      data: Position of the prompt stream.
      collect: What dynamic sampling remembers.
      progress: Counters for the log and for when to stop.
    """

    train: TrainState
    step: int = 0
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    collect: CollectState = dataclasses.field(default_factory=CollectState)
    progress: Progress = Progress()

    def replace(self, **changes: Any) -> RunState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def host(self) -> dict[str, Any]:
        """All but `train`, as JSON can hold it."""
        return {
            "step": self.step,
            "data": self.data,
            "collect": self.collect.to_json(),
            "progress": dataclasses.asdict(self.progress),
        }

    @classmethod
    def restored(cls, train: TrainState, host: dict[str, Any], prompts: Any) -> RunState:
        """The inverse of `host`; a field that an older version did not write has its default.

        Args:
          train: The restored train state.
          host: What `host` gave.
          prompts: The prompts of the run, to which kept groups refer.
        """
        known = {f.name for f in dataclasses.fields(Progress)}
        progress = {k: v for k, v in host.get("progress", host).items() if k in known}
        return cls(
            train=train,
            step=host["step"],
            data=host["data"],
            collect=CollectState.from_json(host["collect"], prompts),
            progress=Progress(**progress),
        )


def policy_weights(params: Params, base: Params | None, lora: models.Lora | None) -> Params:
    """The policy's weights from those that are trained and those that are frozen."""
    if lora is None:
        return params
    if base is None:
        raise InputError("adapters need the weights under them, got none; set TrainState.base")
    return models.merge_adapters(base, params, lora)


def _fresh(
    params: Params,
    critic: Params | None,
    optimizer: optax.GradientTransformation,
    objective: L.Objective,
) -> TrainState:
    zero = jnp.int32(0)
    state = TrainState(
        zero, params, None, zero, zero, critic=critic, objective=objective.init_state()
    )
    return dataclasses.replace(state, opt_state=optimizer.init(state.trained))


def create(
    params: Params,
    optimizer: optax.GradientTransformation,
    objective: L.Objective,
    mesh: Mesh,
    critic: Params | None = None,
    on_host: bool = False,
) -> TrainState:
    """A fresh state around float32 weights; moments are sharded like their weights.

    Args:
      params: The weights.
      optimizer: What updates them.
      objective: What is minimised; some remember something from step to step.
      mesh: Where the weights are.
      critic: The critic's weights, where the objective has one.
      on_host: Whether moments are kept in host memory between updates.

    Raises:
      InputError: The devices have no such memory.
    """

    def build(params: Params, critic: Params | None) -> TrainState:
        return _fresh(params, critic, optimizer, objective)

    shapes = jax.eval_shape(build, params, critic)
    out = state_shardings(shapes, jax.tree.map(lambda x: x.sharding, params), mesh, on_host)
    return processes.run_serially(jax.jit(build, out_shardings=out))(params, critic)


def abstract(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    objective: L.Objective,
    mesh: Mesh,
    lora: models.Lora | None = None,
    rules: meshes.Rules = meshes.TRAIN_RULES,
    on_host: bool = False,
) -> TrainState:
    """The state's shapes and shardings, to restore a checkpoint into; without `base`."""
    critic = models.abstract_critic(config) if objective.critic is not None else None
    params, layout = models.abstract(config), models.shardings(config, mesh, rules)
    if lora is not None:
        params = models.abstract_adapters(config, lora)
        layout = models.adapter_shardings(config, lora, mesh, rules)
    shapes = jax.eval_shape(lambda p, c: _fresh(p, c, optimizer, objective), params, critic)
    shardings = state_shardings(shapes, layout, mesh, on_host)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def state_shardings(
    state: TrainState, params: Params, mesh: Mesh, on_host: bool = False
) -> TrainState:
    """Shardings of a whole state: parameter-shaped parts like the parameters, the rest replicated.

    With `on_host`, moments are in host memory; errors are those of `meshes.on_host`.
    """
    whole = meshes.replicated(mesh)
    structure: Any = jax.tree.structure(params)

    def is_params(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    laid = jax.tree.map(
        lambda part: params if is_params(part) else jax.tree.map(lambda _: whole, part),
        state,
        is_leaf=is_params,
    )
    if not on_host:
        return laid
    moments = jax.tree.map(
        lambda x, s: meshes.on_host(s) if x.ndim else s, state.opt_state, laid.opt_state
    )
    return dataclasses.replace(laid, opt_state=moments)


def move_moments(opt_state: Any, space: Any) -> Any:
    """Puts an optimizer's arrays into a `jax.memory.Space`; counts stay where they are."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, opt_state)
