"""The trainer's own pass over a batch: log-probabilities, entropies, routing, values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from rljax import models, processes
from rljax.batch import Batch
from rljax.models import ModelConfig, Params
from rljax.rollouts.shared_prompts import Sharing, plan_sharing, share_batch, unshare
from rljax.training.microbatches import cut, join
from rljax.training.router import RouterSums, router_sums

_READ = (
    "tokens", "mask", "group", "rewards", "positions", "segments", "routing", "support",
)  # fmt: skip


@struct.dataclass
class Scores:
    """What the trainer's own pass over a batch gives.

    Attributes:
      logp: float32 [B, T], 0 outside the mask.
      entropy: float32 [B, T], nats.
      routing: int32 [B, T, layers, k], the experts it used; None for a dense model.
      router: Sums over the routers; None for a dense model.
    """

    logp: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    routing: Int[Array, "B T layers k"] | None
    router: RouterSums | None


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How a batch is scored.

    Attributes:
      temperature: Divides the logits, as in sampling.
      max_scored_tokens: A bound on a response's tokens.
      parts: How many pieces the batch is cut into, for memory.
      replay: Whether the sampler's routing is used.
      group_size: Responses of a prompt, where they share it.
    """

    temperature: float
    max_scored_tokens: int
    parts: int = 1
    replay: bool = False
    group_size: int = 1


def make_score(config: ModelConfig, options: ScoreOptions) -> Callable[..., Scores]:
    """The jitted pass that gives the log-probabilities of a batch's own tokens.

    Args:
      config: The model.
      options: How it is scored.

    Returns:
      (params, batch, shared) -> scores; `shared` is None, or the tokens kept for the prompt and
      for each response of rows in which a group's prompt is computed once.
    """

    @functools.partial(jax.jit, static_argnums=2)
    def score(params: Params, batch: Batch, shared: tuple[int, int] | None = None) -> Scores:
        batch = Batch(**{name: getattr(batch, name) for name in _READ})
        piece = functools.partial(_score_piece, config, options, params, shared)
        if options.parts == 1:
            return piece(batch)
        unit = options.group_size
        found = jax.lax.map(piece, cut(batch, options.parts, unit))
        return Scores(
            logp=join(found.logp, unit),
            entropy=join(found.entropy, unit),
            routing=None if found.routing is None else join(found.routing, unit),
            router=jax.tree.map(lambda x: x.sum(0), found.router),
        )

    return processes.run_serially(score)


def _score_piece(
    config: ModelConfig,
    options: ScoreOptions,
    params: Params,
    shared: tuple[int, int] | None,
    batch: Batch,
) -> Scores:
    plan, most, length = None, options.max_scored_tokens, batch.tokens.shape[1]
    if shared is not None:
        plan, batch = _share(batch, options.group_size, shared)
        most = options.group_size * shared[1]
    logp, entropy, router = models.score_tokens(
        params,
        config,
        models.Inputs(
            batch.tokens,
            batch.positions,
            batch.segments,
            prefix=None if plan is None else plan.prefix,
            routing=batch.routing if options.replay else None,
            support=batch.support,
        ),
        temperature=options.temperature,
        score_mask=batch.mask,
        max_scored_tokens=most,
    )
    segments = batch.segments
    assert segments is not None
    sums = router_sums(router, None if options.replay else batch.routing, segments > 0)
    chosen = None if router is None else router.experts
    if plan is not None:
        logp, entropy = unshare(plan, logp, length), unshare(plan, entropy, length)
        if chosen is not None:
            chosen = unshare(plan, chosen, length, empty=-1, prompt_too=True)
    return Scores(logp, entropy, chosen, sums)


def make_values(config: ModelConfig, group_size: int = 1) -> Callable[..., Array]:
    """The jitted pass that gives the critic's value before each of a batch's tokens.

    Args:
      config: The model.
      group_size: Responses of a prompt, where they share it.

    Returns:
      (critic, batch, shared) -> float32 [B, T]; `shared` as for `make_score`.
    """

    @functools.partial(jax.jit, static_argnums=2)
    def values(critic: Params, batch: Any, shared: tuple[int, int] | None = None) -> Array:
        mask, length, plan = batch.mask, batch.tokens.shape[1], None
        if shared is not None:
            plan, batch = _share(batch, group_size, shared)
        prefix = None if plan is None else plan.prefix
        found = models.token_values(
            critic, config, batch.tokens, batch.positions, batch.segments, prefix=prefix
        )
        found = found if plan is None else unshare(plan, found, length)
        return jnp.where(mask, found, 0.0)

    return processes.run_serially(values)


def _share(batch: Batch, group_size: int, shared: tuple[int, int]) -> tuple[Sharing, Batch]:
    assert batch.segments is not None
    plan = plan_sharing(batch.mask, batch.segments, group_size, *shared)
    return plan, share_batch(plan, batch)
