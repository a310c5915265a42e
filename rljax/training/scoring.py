"""The trainer's own pass over a batch: log-probabilities, entropies, routing, values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax import models, processes
from rljax.batch import Batch
from rljax.mesh import constrain_rows
from rljax.models import ModelConfig, Params
from rljax.packing import Cut, Layout
from rljax.training.microbatches import join, map_parts
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
      parts: How many pieces the batch is cut into, for memory, where it is not packed.
      replay: Whether the sampler's routing is used.
    """

    temperature: float
    max_scored_tokens: int
    parts: int = 1
    replay: bool = False


@struct.dataclass
class _Scored:
    """Rows that are scored: the batch's own, or packed; see `Batch` and `Rows`."""

    tokens: Int[Array, "R T"]
    mask: Bool[Array, "R T"]
    positions: Int[Array, "R T"]
    segments: Int[Array, "R T"]
    prefix: Int[Array, "R T"] | None
    copies: Int[Array, "R T"] | None
    routing: Int[Array, "R T layers k"] | None
    support: Int[Array, "R T S"] | None
    packed: bool = struct.field(pytree_node=False, default=True)

    def inputs(self, replay: bool) -> models.Inputs:
        """What the model is told."""
        return models.Inputs(
            self.tokens,
            self.positions,
            self.segments,
            prefix=self.prefix,
            routing=self.routing if replay else None,
            support=self.support,
            copies=self.copies,
            packed=self.packed,
        )


@jax.jit
def _rows_of(batch: Batch, layout: Layout | None) -> _Scored:
    """The rows of a batch."""
    routing, support = batch.routing, batch.support
    if layout is None:
        assert batch.segments is not None and batch.positions is not None
        return _Scored(
            tokens=batch.tokens,
            mask=batch.mask,
            positions=batch.positions,
            segments=batch.segments,
            prefix=None,
            copies=None,
            routing=routing,
            support=support,
            packed=False,
        )
    places = layout.places()
    rows = _Scored(
        places.take(batch.tokens),
        places.take(batch.mask, False),
        places.take(batch.positions),
        places.segments,
        places.prefix,
        places.copies,
        None if routing is None else places.take(routing, -1),
        None if support is None else places.take(support, -1),
    )
    return jax.tree.map(constrain_rows, rows)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _back(found: Any, layout: Layout | None, length: int, empty: float = 0) -> Any:
    """Results of rows as those of responses [B, length, ...]."""
    if layout is None:
        return found
    return jax.tree.map(lambda x: constrain_rows(layout.back(x, length, empty)), found)


def make_score(config: ModelConfig, options: ScoreOptions) -> Callable[..., Scores]:
    """The jitted pass that gives the log-probabilities of a batch's own tokens.

    Args:
      config: The model.
      options: How it is scored.

    Returns:
      (params, batch, layout) -> scores; `layout` packs the batch, None leaves its rows as they are.
    """

    @jax.jit
    def run(params: Params, rows: _Scored, cut: Cut | None) -> Scores:
        piece = functools.partial(_score_piece, config, options, params, cut)
        parts, live = (options.parts, None) if cut is None else (cut.parts, cut.live)
        found = map_parts(piece, rows, parts, live)
        return Scores(
            logp=join(found.logp),
            entropy=join(found.entropy),
            routing=None if found.routing is None else join(found.routing),
            router=jax.tree.map(lambda x: x.sum(0), found.router),
        )

    def score(params: Params, batch: Batch, layout: Layout | None = None) -> Scores:
        rows = _rows_of(Batch(**{name: getattr(batch, name) for name in _READ}), layout)
        found = run(params, rows, None if layout is None else layout.cut)
        length = batch.tokens.shape[1]
        logp, entropy = _back((found.logp, found.entropy), layout, length)
        return Scores(logp, entropy, _back(found.routing, layout, length, -1), found.router)

    return processes.run_serially(score)


def _score_piece(
    config: ModelConfig, options: ScoreOptions, params: Params, cut: Cut | None, rows: _Scored
) -> Scores:
    most = options.max_scored_tokens if cut is None else cut.scored
    logp, entropy, router = models.score_tokens(
        params,
        config,
        rows.inputs(options.replay),
        temperature=options.temperature,
        score_mask=rows.mask,
        max_scored_tokens=most,
    )
    counted = rows.segments > 0 if rows.copies is None else rows.copies
    sums = router_sums(router, None if options.replay else rows.routing, counted)
    chosen = None if router is None else router.experts
    return Scores(logp, entropy, chosen, sums)


def make_values(config: ModelConfig, parts: int = 1) -> Callable[..., Array]:
    """The jitted pass that gives the critic's value before each of a batch's tokens.

    Args:
      config: The model.
      parts: As in `ScoreOptions`.

    Returns:
      (critic, batch, layout) -> float32 [B, T]; `layout` as for `make_score`.
    """

    @jax.jit
    def run(critic: Params, rows: _Scored, cut: Cut | None) -> Array:
        def piece(rows: _Scored) -> Array:
            found = models.token_values(
                critic, config, rows.tokens, rows.positions, rows.segments, prefix=rows.prefix
            )
            return jnp.where(rows.mask, found, 0.0)

        live = None if cut is None else cut.live
        return join(map_parts(piece, rows, parts if cut is None else cut.parts, live))

    def values(critic: Params, batch: Batch, layout: Layout | None = None) -> Array:
        batch = Batch(**{name: getattr(batch, name) for name in _READ})
        rows = _rows_of(batch.replace(routing=None, support=None), layout)
        found = run(critic, rows, None if layout is None else layout.cut)
        return _back(found, layout, batch.tokens.shape[1])

    return processes.run_serially(values)
