"""The trainer's state and its optimizer."""

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
from rljax.config import OptimizerSettings
from rljax.errors import InputError
from rljax.models import ModelConfig, Params


@struct.dataclass
class TrainState:
    """Everything that an update changes; 12 bytes a parameter with AdamW.

    Attributes:
      step: int32, optimizer updates tried (skipped ones included).
      params: float32 master weights; with adapters theirs, as `models.init_adapters` makes them.
      critic: The critic's, as `models.init_critic` makes it; None without one.
      base: With adapters, the frozen weights under them; not part of checkpoints.
      objective: What the objective remembers from step to step (`Objective.init_state`).
      opt_state: The optimizer's.
      skipped: int32, updates skipped so far for want of a finite gradient or of any weight.
      skipped_in_row: int32, the last of them without one between.
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
        """What the optimizer changes: the policy's weights, with the critic's where there are."""
        return self.params if self.critic is None else (self.params, self.critic)

    @property
    def whole(self) -> Params:
        """The weights of all matrices, adapters left out."""
        return self.params if self.base is None else self.base

    def weights(self, lora: models.Lora | None) -> Params:
        """The policy's weights, adapters merged."""
        return policy_weights(self.params, self.base, lora)


def policy_weights(params: Params, base: Params | None, lora: models.Lora | None) -> Params:
    """The policy's weights from what is trained and what is not."""
    if lora is None:
        return params
    if base is None:
        raise InputError("adapters rest on weights, got none; set TrainState.base")
    return models.merge_adapters(base, params, lora)


def learning_rate(settings: OptimizerSettings, updates: int) -> optax.Schedule:
    """The rate at each update: a linear rise whose first step is not idle, then the schedule.

    Args:
      settings: Rate, warm-up steps and schedule.
      updates: Optimizer steps of the whole run.
    """
    rate, rise = settings.learning_rate, settings.warmup_steps
    fall = max(updates - rise, 1)
    after = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, rate / 10, fall),
        "cosine": optax.cosine_decay_schedule(rate, fall, alpha=0.1),
    }[settings.lr_schedule]
    if rise <= 1:
        return after
    return optax.join_schedules([optax.linear_schedule(rate / rise, rate, rise - 1), after], [rise])


def make_optimizer(
    settings: OptimizerSettings, updates: int, with_critic: bool = False
) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip (Loshchilov and Hutter, 2019).

    Args:
      settings: Rates, decays and the clip.
      updates: Optimizer steps of the whole run.
      with_critic: Whether a critic is trained beside the policy, with its own rate and clip.
    """

    def chain(settings: OptimizerSettings) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(settings.max_grad_norm),
            optax.adamw(
                learning_rate(settings, updates),
                b1=settings.adam_b1,
                b2=settings.adam_b2,
                weight_decay=settings.weight_decay,
                mask=_decays,
            ),
        )

    if not with_critic:
        return chain(settings)
    critic = dataclasses.replace(settings, learning_rate=settings.critic_learning_rate)
    return optax.multi_transform(
        {"policy": chain(settings), "critic": chain(critic)}, ("policy", "critic")
    )


def _decays(trained: Any) -> Any:
    """Which weights decay: all but correction biases, which the load moves, not a gradient."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not models.path_name(path).endswith("/correction"), trained
    )


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
    """A fresh state around float32 weights; moments are laid out like their weights.

    Args:
      params: The weights.
      optimizer: What updates them.
      objective: What is minimised; some remember something from step to step.
      mesh: Where the weights lie.
      critic: The critic's weights, where the objective has one.
      on_host: Whether moments wait in the host's memory between updates.

    Raises:
      ValueError: The devices have no such memory.
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
    """Shardings of a whole state: parameter-shaped parts like the parameters, the rest whole.

    With `on_host`, moments are in the host's memory; refusals are those of `meshes.on_host`.
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
