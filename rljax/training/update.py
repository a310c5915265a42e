"""One optimizer step as one program on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from rljax import losses as L
from rljax import models, processes
from rljax.batch import Rows
from rljax.models import ModelConfig, Params
from rljax.packing import Cut
from rljax.training.microbatches import fold, join, map_parts
from rljax.training.router import RouterSums, router_sums
from rljax.training.state import TrainState, move_moments, policy_weights

Update = Callable[..., tuple[TrainState, dict[str, Any], RouterSums | None]]


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """How an optimizer step is computed.

    Attributes:
      temperature: Divides the logits, as in sampling.
      max_scored_tokens: A bound on a response's own tokens.
      parts: Micro-batches that rows are cut into, where they are not packed.
      replay: Whether `Rows.routing` is replayed.
      seed: For the terms of the objective that choose tokens at random.
      lora: The adapters that are trained; None: the weights themselves.
      bias_rate: Step by which the routers' correction biases follow the load; 0: none.
      on_host: Whether the optimizer's moments come from host memory, and go back there.
    """

    temperature: float
    max_scored_tokens: int
    parts: int = 1
    replay: bool = False
    seed: int = 0
    lora: models.Lora | None = None
    bias_rate: float = 0.0
    on_host: bool = False


def make_update(
    config: ModelConfig,
    objective: L.Objective,
    optimizer: optax.GradientTransformation,
    options: UpdateOptions,
) -> Update:
    """One optimizer step as one jitted function; the state is donated.

    The loss is a sum over tokens whose weights were fixed from all rows of the step, so the
    gradients of micro-batches are added and nothing is divided.

    An update whose gradient is not finite, or in which no token has a weight, is skipped and
    counted. While no token has an advantage and the policy is still the reference, the gradient
    of a KL penalty is 0 but for rounding, which Adam would scale up to whole steps: such an update
    is held, which changes nothing and is reported as `policy/held`.

    Args:
      config: The model.
      objective: What is minimised.
      optimizer: How.
      options: How it is computed.

    Returns:
      (state, rows, cut) -> (state, mergeable metrics, router sums); `cut` says how packed rows are
      cut into micro-batches, None cuts rows as the options say.
    """
    # Found out here, by trying the objective on numbers: where the step is traced, the devices at
    # hand may be others than those that it is compiled for.
    only_kl = objective.only_kl and "ref" in objective.loss_needs
    program = _Update(config, objective, optimizer, options, only_kl)
    step = jax.jit(program.step, donate_argnums=0)

    def update(
        state: TrainState, rows: Rows, cut: Cut | None = None
    ) -> tuple[TrainState, dict[str, Any], Any]:
        base = state.base  # not donated: the reference policy may be the same buffers
        state, stats, sums = step(dataclasses.replace(state, base=None), base, rows, cut)
        return dataclasses.replace(state, base=base), stats, sums

    return processes.run_serially(update)


@dataclasses.dataclass(frozen=True)
class _Update:
    """The parts of an optimizer step; see `make_update`."""

    config: ModelConfig
    objective: L.Objective
    optimizer: optax.GradientTransformation
    options: UpdateOptions
    only_kl: bool

    def step(
        self, state: TrainState, base: Params | None, rows: Rows, cut: Cut | None = None
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """The whole step, from the old state to the new."""
        state = dataclasses.replace(state, base=base)
        if cut is None:
            most = self.options.max_scored_tokens * max(rows.max_segments - 1, 1)
            cut = Cut(None, self.options.parts, min(most, rows.tokens.shape[1]))
        rows, load = self._look_ahead(state, rows, cut)
        value, grads, stats, sums = self._accumulate(state, rows, cut, load)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(norm) & jnp.isfinite(value) & rows.trains
        held = self._held(state, rows)
        state = self._apply(state, grads, stats, sums, good & ~held)
        state = dataclasses.replace(
            state,
            step=state.step + ~held,
            base=None,
            skipped=state.skipped + (~good & ~held),
            skipped_in_row=jnp.where(good | held, 0, state.skipped_in_row + 1),
        )
        one = jnp.float32(1)
        stats = stats | {
            "policy/grad_norm": L.Mean(norm, one),
            "policy/held": L.Mean(held.astype(jnp.float32), one),
        }
        return state, stats, sums

    def _held(self, state: TrainState, rows: Rows) -> Bool[Array, ""]:
        """Whether the exact gradient is 0, and what there is of it is rounding."""
        if not self.only_kl:
            return jnp.bool_(False)
        return (state.applied == 0) & ~(rows.mask & (rows.weights * rows.advantages != 0)).any()

    def _apply(
        self, state: TrainState, grads: Any, stats: dict[str, Any], sums: Any, good: Array
    ) -> TrainState:
        """The state after the optimizer, or as it was where the update is not good."""
        before, space = state.opt_state, jax.memory.Space
        if self.options.on_host:
            before = move_moments(before, space.Device)
        changes, opt_state = self.optimizer.update(grads, before, state.trained)
        new = optax.apply_updates(state.trained, changes)
        params, critic = new if self.objective.critic is not None else (new, None)
        if self.options.bias_rate:
            params = models.move_corrections(params, self.config, sums.load, self.options.bias_rate)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        opt_state = choose(opt_state, before)
        if self.options.on_host:
            opt_state = move_moments(opt_state, space.Host)
        remembered = self.objective.update_state(state.objective, stats)
        return dataclasses.replace(
            state,
            params=choose(params, state.params),
            critic=choose(critic, state.critic),
            opt_state=opt_state,
            objective=choose(remembered, state.objective),
        )

    def _accumulate(
        self, state: TrainState, rows: Rows, cut: Cut, load: Array | None
    ) -> tuple[Array, Any, dict[str, Any], Any]:
        """Loss, gradients, metrics and router sums, added over micro-batches."""

        def loss(trained: Any, micro: Rows) -> tuple[Array, tuple[dict[str, Any], Any]]:
            return self._loss(trained, state, micro, cut.scored, load)

        if cut.parts == 1:
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, (stats, sums)), grads = gradient(state.trained, rows)
            return value, grads, stats, sums

        loss = jax.jit(loss)  # so that it is traced once
        # The backward pass adds to these in place: a second gradient is never held.
        totals = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), state.trained)

        def add(carried: Any, micro: Rows) -> Any:
            first, value, stats, sums = carried
            backward: Any  # whose method for references JAX's types do not know
            more, backward, (new, others) = jax.vjp(
                lambda trained: loss(trained, micro), state.trained, has_aux=True
            )
            backward.with_refs(totals)(jnp.ones_like(more))  # type: ignore[attr-defined]
            merged = jax.tree.map(lambda a, b: jnp.where(first, a, b), new, L.merge(stats, new))
            return jnp.bool_(False), value + more, merged, jax.tree.map(jnp.add, sums, others)

        each = jnp.arange(rows.tokens.shape[0] // cut.parts)
        micro = jax.eval_shape(lambda rows: rows.take(each), rows)
        _, aux = jax.eval_shape(loss, state.trained, micro)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), aux)
        start = (jnp.bool_(True), jnp.float32(0), *zeros)
        _, value, stats, sums = fold(add, start, rows, cut.parts, cut.live)
        return value, jax.tree.map(lambda total: total[...], totals), stats, sums

    def _loss(
        self, trained: Any, state: TrainState, rows: Rows, scored: int, load: Array | None
    ) -> tuple[Array, tuple[dict[str, Any], Any]]:
        live, router = self._outputs(trained, state.base, rows, scored, load)
        value, stats = self.objective.loss(live, rows, state.objective)
        if rows.old_logp is None and rows.rollout_logp is not None:
            # The live policy is the one at the start of the step: the only update on this batch.
            start = rows.replace(old_logp=jax.lax.stop_gradient(live.logp))
            stats = {**stats, **L.mismatch(start)}
        return value, (stats, router_sums(router, None, rows.segments > 0))

    def _outputs(
        self,
        trained: Any,
        base: Params | None,
        rows: Rows,
        scored: int,
        load: Array | None = None,
    ) -> tuple[L.PolicyOutputs, models.RouterOutputs | None]:
        """The live policy's forward pass over some rows."""
        options = self.options
        params, critic = trained if self.objective.critic is not None else (trained, None)
        logp, entropy, router = models.score_tokens(
            policy_weights(params, base, options.lora),
            self.config,
            models.Inputs(
                rows.tokens,
                rows.positions,
                rows.segments,
                prefix=rows.prefix,
                routing=rows.routing if options.replay else None,
                support=rows.support,
                copies=rows.copies,
                packed=rows.packed,
            ),
            temperature=options.temperature,
            score_mask=rows.mask,
            max_scored_tokens=scored,
            load=load,
        )
        values = None
        if critic is not None:
            values = models.token_values(
                critic, self.config, rows.tokens, rows.positions, rows.segments, prefix=rows.prefix
            )
        auxiliary = None if router is None else router.auxiliary
        return L.PolicyOutputs(logp, entropy=entropy, values=values, router=auxiliary), router

    def _look_ahead(self, state: TrainState, rows: Rows, cut: Cut) -> tuple[Rows, Array | None]:
        """What the objective must know of the whole optimizer batch before it is cut.

        The tokens that its batch-scoped terms choose, and the load of the experts. Either may
        take a pass over all rows; replayed routing gives the load without one.
        """
        needs = self.objective.needs
        chooses, balances = "batch_stats" in needs, "router" in needs
        load, routing = None, rows.routing if self.options.replay else None
        if balances and routing is not None:
            counted = (rows.segments > 0)[..., None, None]
            known = jnp.where(counted, routing, -1)
            load = models.routed_load(known, self.config.num_experts, rows.copies)
        if chooses or (balances and load is None):

            def look(part: Rows) -> tuple[L.PolicyOutputs, Array | None]:
                live, router = self._outputs(state.trained, state.base, part, cut.scored)
                return live, None if router is None else router.load

            live, loads = map_parts(look, rows, cut.parts, cut.live)
            if balances and load is None:
                load = loads.sum(0)
            if chooses:
                key = jax.random.fold_in(jax.random.key(self.options.seed), state.step)
                rows = self.objective.with_batch_stats(jax.tree.map(join, live), rows, key)
        return rows, load
