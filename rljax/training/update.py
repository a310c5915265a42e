"""The trainer's programs on the device: scoring a batch, and one optimizer step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from rljax import losses as L
from rljax import models, processes
from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.models import ModelConfig, Params
from rljax.rollouts.shared_prompts import plan_sharing, share_batch, unshare
from rljax.training.state import TrainState, move_moments, policy_weights


@struct.dataclass
class RouterSums:
    """What the routers did, summed over tokens, so that micro-batches add.

    Attributes:
      load: float32 [layers, E], tokens given to each expert.
      entropy: float32 [layers], nats, summed over tokens.
      flips: float32 [layers], tokens whose own experts differ from the sampler's.
      tokens: float32, tokens counted.
    """

    load: Float[Array, "layers E"]
    entropy: Float[Array, " layers"]
    flips: Float[Array, " layers"]
    tokens: Float[Array, ""]

    def metrics(self) -> dict[str, float]:
        """Under the names of the tag table."""
        load, entropy, flips, tokens = processes.fetch(
            (self.load, self.entropy, self.flips, self.tokens)
        )
        if not tokens:
            return {}
        over_mean = load.max(1) / load.mean(1)
        values = {
            "moe/load_max_over_mean": float(over_mean.mean()),
            "moe/router_entropy": float(entropy.mean() / tokens),
            "moe/dead_frac": float((load == 0).mean()),
            "mismatch/routing_flip_frac": float(flips.mean() / tokens),
        }
        for i, share in enumerate(load.max(1) / load.sum(1)):
            values[f"moe/expert_{i}_load"] = float(share)
        return values


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
    routing: Array | None
    router: RouterSums | None


def _sums(router: models.RouterOutputs | None, other: Array | None, counted: Array) -> Any:
    """Router sums; flips against another routing where that is known and was not replayed."""
    if router is None:
        return None
    flips = router.flips
    if other is not None:
        known = counted & (other[..., 0, 0] >= 0)
        differ = jnp.any(jnp.sort(router.experts, -1) != jnp.sort(other, -1), axis=-1)
        flips = flips + jnp.sum((known[..., None] & differ).astype(jnp.float32), axis=(0, 1))
    return RouterSums(router.load, router.entropy, flips, router.tokens)


def _cut(tree: Any, parts: int, unit: int = 1) -> Any:
    """[R, ...] to [parts, R / parts, ...], `unit` rows in turn, so that no row changes device."""

    def cut(x: Array) -> Array:
        turns = x.reshape(-1, parts, unit, *x.shape[1:]).swapaxes(0, 1)
        return turns.reshape(parts, -1, *x.shape[1:])

    return jax.tree.map(cut, tree)


def _join(x: Array, unit: int = 1) -> Array:
    """The inverse of `_cut`."""
    turns = x.reshape(x.shape[0], -1, unit, *x.shape[2:]).swapaxes(0, 1)
    return turns.reshape(-1, *x.shape[2:])


def micro_batches(rows: int, shards: int, micro_batch_size: int) -> int:
    """Into how many micro-batches `rows` are cut, `micro_batch_size` rows a device at most.

    Raises:
      ValueError: The rows do not divide.
    """
    if rows % shards:
        raise InputError(
            f"{rows} responses of an update do not divide over stage×data×fsdp×expert = {shards} "
            "devices; change mini_batch_size or the mesh"
        )
    each = rows // shards
    if not micro_batch_size or micro_batch_size >= each:
        return 1
    if each % micro_batch_size:
        raise InputError(
            f"micro_batch_size={micro_batch_size} must divide the {each} responses a device has "
            "of an update; choose one of their divisors"
        )
    return each // micro_batch_size


def make_score(
    config: ModelConfig,
    *,
    temperature: float,
    max_scored_tokens: int,
    parts: int = 1,
    replay: bool = False,
    group_size: int = 1,
) -> Callable[..., Scores]:
    """The jitted pass that gives the log-probabilities of a batch's own tokens.

    Args:
      config: The model.
      temperature: Divides the logits, as in sampling.
      max_scored_tokens: A bound on a response's tokens.
      parts: How many pieces the batch is cut into, for memory.
      replay: Whether the sampler's routing is used.
      group_size: Responses of a prompt, where prompts are shared.

    Returns:
      (params, batch, shared) -> scores; `shared` is None, or the room (prompt, response) of rows
      in which a group's prompt stands once.
    """

    def piece(params: Params, batch: Any, shared: tuple[int, int] | None) -> Scores:
        prefix, most, length = None, max_scored_tokens, batch.tokens.shape[1]
        if shared is not None:
            plan = plan_sharing(batch.mask, batch.segments, group_size, *shared)
            batch, prefix, most = share_batch(plan, batch), plan.prefix, group_size * shared[1]
        logp, entropy, router = models.score_tokens(
            params,
            config,
            models.Inputs(
                batch.tokens,
                batch.positions,
                batch.segments,
                prefix,
                batch.routing if replay else None,
                batch.support,
            ),
            temperature=temperature,
            score_mask=batch.mask,
            max_scored_tokens=most,
        )
        sums = _sums(router, None if replay else batch.routing, batch.segments > 0)
        chosen = None if router is None else router.experts
        if shared is not None:
            logp, entropy = unshare(plan, logp, length), unshare(plan, entropy, length)
            if chosen is not None:
                chosen = unshare(plan, chosen, length, empty=-1, prompt_too=True)
        return Scores(logp, entropy, chosen, sums)

    @functools.partial(jax.jit, static_argnums=2)
    def score(params: Params, batch: Batch, shared: tuple[int, int] | None = None) -> Scores:
        batch = Batch(
            tokens=batch.tokens,
            mask=batch.mask,
            group=batch.group,
            rewards=batch.rewards,
            positions=batch.positions,
            segments=batch.segments,
            routing=batch.routing,
            support=batch.support,
        )
        if parts == 1:
            return piece(params, batch, shared)
        found = jax.lax.map(
            lambda part: piece(params, part, shared), _cut(batch, parts, group_size)
        )

        return Scores(
            logp=_join(found.logp, group_size),
            entropy=_join(found.entropy, group_size),
            routing=None if found.routing is None else _join(found.routing, group_size),
            router=jax.tree.map(lambda x: x.sum(0), found.router),
        )

    return processes.run_serially(score)


def make_values(config: ModelConfig, *, group_size: int = 1) -> Callable[..., Array]:
    """The jitted pass that gives the critic's value before each of a batch's tokens.

    Args:
      config: The model.
      group_size: Responses of a prompt, where prompts are shared.

    Returns:
      (critic, batch, shared) -> float32 [B, T]; `shared` as for `make_score`.
    """

    @functools.partial(jax.jit, static_argnums=2)
    def values(critic: Params, batch: Any, shared: tuple[int, int] | None = None) -> Array:
        mask, length, prefix = batch.mask, batch.tokens.shape[1], None
        if shared is not None:
            plan = plan_sharing(mask, batch.segments, group_size, *shared)
            batch, prefix = share_batch(plan, batch), plan.prefix
        found = models.token_values(
            critic, config, batch.tokens, batch.positions, batch.segments, prefix=prefix
        )
        found = found if shared is None else unshare(plan, found, length)
        return jnp.where(mask, found, 0.0)

    return processes.run_serially(values)


def make_update(
    config: ModelConfig,
    objective: L.Objective,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float,
    max_scored_tokens: int,
    parts: int = 1,
    replay: bool = False,
    seed: int = 0,
    lora: models.Lora | None = None,
    bias_rate: float = 0.0,
    on_host: bool = False,
) -> Callable[[TrainState, Rows], tuple[TrainState, dict[str, Any], RouterSums | None]]:
    """One optimizer step as one jitted function; the state is donated.

    The loss is a sum over tokens whose weights were fixed from all rows of the step, so the
    gradients of micro-batches are added and nothing is divided.

    Args:
      config: The model.
      objective: What is minimised.
      optimizer: How.
      temperature: Divides the logits, as in sampling.
      max_scored_tokens: A bound on a row's own tokens.
      parts: Micro-batches the rows are cut into.
      replay: Whether `Rows.routing` is replayed.
      seed: For the terms of the objective that choose tokens at random.
      lora: The adapters that are trained; None: the weights themselves.
      bias_rate: By how much the routers' correction biases follow the load; 0: they stay.
      on_host: Whether the optimizer's moments come from the host's memory, and go back there.

    Returns:
      (state, rows) -> (state, mergeable metrics, router sums).
    """
    with_critic = objective.critic is not None

    def outputs(
        trained: Any, base: Params | None, rows: Rows, load: Array | None = None
    ) -> tuple[L.PolicyOutputs, models.RouterOutputs | None]:
        params, critic = trained if with_critic else (trained, None)
        params = policy_weights(params, base, lora)
        logp, entropy, router = models.score_tokens(
            params,
            config,
            models.Inputs(
                rows.tokens,
                rows.positions,
                rows.segments,
                rows.prefix,
                rows.routing if replay else None,
                rows.support,
            ),
            temperature=temperature,
            score_mask=rows.mask,
            max_scored_tokens=min(
                max_scored_tokens * max(rows.max_segments - 1, 1), rows.tokens.shape[1]
            ),
            load=load,
        )
        values = None
        if critic is not None:
            values = models.token_values(
                critic, config, rows.tokens, rows.positions, rows.segments, prefix=rows.prefix
            )
        auxiliary = None if router is None else router.auxiliary
        return L.PolicyOutputs(logp, entropy=entropy, values=values, router=auxiliary), router

    def loss(
        trained: Any, state: TrainState, rows: Rows, load: Array | None
    ) -> tuple[Array, tuple[dict[str, Any], Any]]:
        live, router = outputs(trained, state.base, rows, load)
        value, stats = objective.loss(live, rows, state.objective)
        if rows.old_logp is None and rows.rollout_logp is not None:
            # The live policy is the one at the start of the step: the only update on this batch.
            start = rows.replace(old_logp=jax.lax.stop_gradient(live.logp))
            stats = {**stats, **L.mismatch(start)}
        return value, (stats, _sums(router, None, rows.segments > 0))

    gradient = jax.value_and_grad(loss, has_aux=True)

    def look_ahead(state: TrainState, rows: Rows) -> tuple[Rows, Array | None]:
        """What the objective must know of the whole optimizer batch before it is cut.

        The tokens that its batch-scoped terms choose, and the load of the experts. Either may
        take a pass over all rows; replayed routing tells the load without one.
        """
        chooses, balances = ("batch_stats" in objective.needs), ("router" in objective.needs)
        load, routing = None, rows.routing if replay else None
        if balances and routing is not None:
            counted = (rows.segments > 0)[..., None, None]
            load = models.routed_load(jnp.where(counted, routing, -1), config.num_experts)
        if chooses or (balances and load is None):

            def look(part: Rows) -> tuple[L.PolicyOutputs, Array | None]:
                live, router = outputs(state.trained, state.base, part)
                return live, None if router is None else router.load

            live, loads = jax.lax.map(look, _cut(rows, parts))
            if balances and load is None:
                load = loads.sum(0)
            if chooses:
                key = jax.random.fold_in(jax.random.key(seed), state.step)
                rows = objective.with_batch_stats(jax.tree.map(_join, live), rows, key)
        return rows, load

    def accumulate(
        state: TrainState, rows: Rows, load: Array | None
    ) -> tuple[Array, Any, dict[str, Any], Any]:
        if parts == 1:
            (value, (stats, sums)), grads = gradient(state.trained, state, rows, load)
            return value, grads, stats, sums

        def add(total: tuple[Array, Params], micro: Rows) -> tuple[tuple[Array, Params], Any]:
            (value, aux), grads = gradient(state.trained, state, micro, load)
            return jax.tree.map(jnp.add, total, (value, grads)), aux

        zero = jax.tree.map(jnp.zeros_like, state.trained)
        (value, grads), (stats, sums) = jax.lax.scan(add, (jnp.float32(0), zero), _cut(rows, parts))
        each = [jax.tree.map(lambda x, i=i: x[i], stats) for i in range(parts)]
        return value, grads, L.merge(*each), jax.tree.map(lambda x: x.sum(0), sums)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, base: Params | None, rows: Rows
    ) -> tuple[TrainState, dict[str, Any], Any]:
        state = dataclasses.replace(state, base=base)
        rows, load = look_ahead(state, rows)
        value, grads, stats, sums = accumulate(state, rows, load)
        norm = optax.global_norm(grads)
        some = rows.trains
        good = jnp.isfinite(norm) & jnp.isfinite(value) & some
        before = state.opt_state
        if on_host:
            before = move_moments(before, jax.memory.Space.Device)
        changes, opt_state = optimizer.update(grads, before, state.trained)
        new = optax.apply_updates(state.trained, changes)
        params, critic = new if with_critic else (new, None)
        if bias_rate:
            params = models.move_corrections(params, config, sums.load, bias_rate)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        opt_state = choose(opt_state, before)
        if on_host:
            opt_state = move_moments(opt_state, jax.memory.Space.Host)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            base=None,
            params=choose(params, state.params),
            critic=choose(critic, state.critic),
            opt_state=opt_state,
            objective=choose(objective.update_state(state.objective, stats), state.objective),
            skipped=state.skipped + ~good,
            skipped_in_row=jnp.where(good, 0, state.skipped_in_row + 1),
        )
        return state, {**stats, "policy/grad_norm": L.Mean(norm, jnp.float32(1))}, sums

    def update(state: TrainState, rows: Rows) -> tuple[TrainState, dict[str, Any], Any]:
        base = state.base  # not donated: the reference model may be the same buffers
        state, stats, sums = step(dataclasses.replace(state, base=None), base, rows)
        return dataclasses.replace(state, base=base), stats, sums

    return processes.run_serially(update)
