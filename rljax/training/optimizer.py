"""The optimizer, AdamW behind a clip of the global gradient norm, and its schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from rljax import models
from rljax.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, updates: int) -> optax.Schedule:
    """The rate at each update: a linear warm-up that starts above 0, then the schedule.

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
    """Which weights decay: all but correction biases, which have no gradient."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not models.path_name(path).endswith("/correction"), trained
    )
