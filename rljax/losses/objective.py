"""An objective: a composition of transforms, in two halves.

`prepare` holds everything that does not depend on the live policy and runs on the whole rollout
batch: shape rewards, mark what trains, advantages, corrections, token weights. `loss` is the
differentiable rest and runs on any cut of the rows: it is a sum over tokens,

    loss = Σ -w·c·J + Σ penalties,

with w fixed by the optimizer batch, so losses and gradients of micro-batches, packed rows and
devices add up to those of the whole.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.losses import additions, composition, coupling, reports, value_checks
from rljax.losses.advantages import Advantage
from rljax.losses.base import Chain, PolicyOutputs, parts
from rljax.losses.corrections import Correction
from rljax.losses.critic import value_loss
from rljax.losses.masks import Mask
from rljax.losses.metrics import Metric, Metrics, total
from rljax.losses.preparation import draft_of, finite, remark_on_overflow, rows_of, step_of
from rljax.losses.ratios import Ratio
from rljax.losses.regularisers import (
    Regulariser,
    State,
    by_name,
    initial_states,
    kl,
    own_state,
    updated_states,
)
from rljax.losses.sequences import SequenceLayout
from rljax.losses.shaping import Shaping
from rljax.losses.trust_regions import TrustRegion, policy_gradient
from rljax.losses.weights import Weights, prompt_mean, token_mean


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is maximised, as transforms; frozen and hashable.

    On the first, on-policy step every ratio is 1 and nothing is clipped; with centred advantages
    under `sequence_mean` the loss is then 0. That is no fault: the gradient is not 0.

    Attributes:
      advantage: How good each response or token was.
      policy: Ratio and trust region.
      weights: The weight of each token.
      shaping: Reward shaping, in order.
      masks: What trains, in order.
      corrections: For sampling by another policy, in order.
      regularisers: Penalties and batch-scoped terms.
      critic: The critic's loss, if there is one.

    Where several are taken, one alone, a tuple or a list will do.

    Raises:
      ValueError: A part is in the wrong place, or parts cannot be combined: a correction on
        a ratio against the rollout policy, two importance weights, or a term that judges single
        tokens where the policy half couples them.
    """

    advantage: Advantage | Chain
    policy: Ratio | TrustRegion | Chain
    weights: Weights
    shaping: tuple[Shaping, ...] = ()
    masks: tuple[Mask, ...] = ()
    corrections: tuple[Correction, ...] = ()
    regularisers: tuple[Regulariser, ...] = ()
    critic: value_loss | None = None

    def __post_init__(self) -> None:
        for name in ("shaping", "masks", "corrections", "regularisers"):
            value = getattr(self, name)
            listed = tuple(value) if isinstance(value, list | tuple) else (value,)
            object.__setattr__(self, name, parts(*listed))
        composition.check(self)

    @property
    def prepare_needs(self) -> frozenset[str]:
        """What the batch must have for `prepare`, by the names of `needs`."""
        return frozenset().union(*(t.prepare_needs for t in self._transforms()))

    @property
    def loss_needs(self) -> frozenset[str]:
        """What `loss` must have, in the rows or the live outputs, by the names of `needs`.

        'old' may be left out where a batch gives one on-policy update (see `loss`).
        """
        return frozenset().union(*(t.loss_needs for t in self._transforms()))

    @property
    def needs(self) -> frozenset[str]:
        """What must be supplied, so that nothing else is computed: for either half.

        Of 'old', 'rollout', 'ref', 'teacher', 'values', 'old_entropy', 'components', 'bootstrap'
        (fields of the batch), 'entropy', 'router' (live outputs) and 'batch_stats' (a call of
        `with_batch_stats`). 'values' are the batch's and the live ones.
        """
        return self.prepare_needs | self.loss_needs

    @property
    def couples_tokens(self) -> bool:
        """Whether the gradient of a token's J reaches other tokens of its response (found out)."""
        return coupling.of_policy(self.policy).couples_tokens

    @property
    def only_kl(self) -> bool:
        """Whether only a KL to the reference (k2, k3) has a gradient where all advantages are 0.

        If so, and the policy still is the reference, the exact gradient is 0. (k1's is not.)
        """
        others = [r for r in self.regularisers if r.penalises and not isinstance(r, kl)]
        k1 = any(isinstance(r, kl) and r.estimator == "k1" for r in self.regularisers)
        live = any(type(t).live is not Advantage.live for t in parts(self.advantage))
        quiet = not (others or k1 or live) and self.critic is None
        return quiet and coupling.of_policy(self.policy).needs_advantages

    def adding(self, *terms: Any) -> "Objective":
        """The objective with further terms, each put in its place by its type.

        Where the policy half couples the tokens of a response, terms that judge single tokens are
        taken in their sequence-level form. `kl_cov` takes the place of the clipping window.

        Args:
          *terms: Shaping, masks, corrections, regularisers, or trust regions that are gates.

        Returns:
          A new objective.

        Raises:
          ValueError: A term has no place beside the others, or does not go with them.
        """
        policy, added = additions.placed(self, parts(*terms))
        changes: dict[str, Any] = {"policy": policy, **added}
        return dataclasses.replace(self, **changes)

    def prepare(self, batch: Batch) -> tuple[Rows, Metrics]:
        """Does all that does not depend on the live policy; jit-compatible.

        Args:
          batch: The whole rollout batch.

        Returns:
          Rows that carry advantages, weights and corrections, one response a row, and metrics
          of the batch (`reward/*`, `score/*`, `group/*`, `completion/*`, `mismatch/*`).

        Raises:
          ValueError: A field is missing or misshapen, or, outside jit, what `check_values` refuses.
        """
        batch.check()
        if value_checks.on_host(batch):
            self.check_values(batch)
        draft = draft_of(batch)
        for shape in self.shaping:
            draft = shape(draft)
        for mask in self.masks:
            draft = mask(draft)
        draft = finite(self.advantage(draft.replace(advantages=draft.rewards)))
        for correction in self.corrections:
            draft = correction(draft)
        return jax.lax.stop_gradient((self.weigh(rows_of(draft)), draft.stats))

    def check_values(self, batch: Batch) -> None:
        """Refuses values that cannot be judged under jit: call it where `prepare` is jitted.

        Args:
          batch: The whole rollout batch, NumPy or JAX arrays known to this process.

        Raises:
          ValueError: A prompt has a single response where the advantage compares responses, or
            a reward is negative where it must not be.
        """
        values = value_checks.of_batch(batch, self.shaping)
        for transform in parts(self.advantage):
            transform.check_values(values)

    def check_minibatch(self, group: Int[np.ndarray, " B"], index: Int[np.ndarray, " n"]) -> None:
        """Refuses a cut into mini-batches under which weights would be wrong; on the host.

        Args:
          group: The prompt of each response of the rollout batch.
          index: Which responses are in the mini-batch.

        Raises:
          ValueError: The weights count prompts, and the cut parts a group.
        """
        if isinstance(self.weights, prompt_mean):
            value_checks.refuse_parted_groups(group, index)

    def weigh(self, rows: Rows) -> Rows:
        """Weighs the tokens of one optimizer batch.

        Args:
          rows: All of its rows.

        Returns:
          The rows with `weights` and `token_weights` set.
        """
        layout = SequenceLayout.of(rows)
        return rows.replace(
            weights=self.weights(rows.mask, rows.keep, rows.group, layout),
            token_weights=token_mean()(rows.mask, rows.keep, rows.group, layout),
        )

    def minibatch(self, ready: Rows, index: Int[Array, " n"]) -> Rows:
        """Cuts out the rows of one optimizer batch and weighs them again.

        Args:
          ready: What `prepare` gave.
          index: Which rows, int [n].

        Returns:
          Those rows, weighed as a whole of their own.

        Raises:
          ValueError: The cut parts a group, and the weights count prompts (outside jit only).
        """
        if value_checks.on_host(ready.group, ready.sequence, index):
            group, inside = np.asarray(ready.group), np.asarray(ready.sequence) >= 0
            self.check_minibatch(np.where(inside, group, -1).max(axis=1), np.asarray(index))
        return self.weigh(ready.take(index))

    def with_batch_stats(
        self,
        outputs: PolicyOutputs | Float[Array, "R T"],
        rows: Rows,
        key: PRNGKeyArray | None = None,
    ) -> Rows:
        """Lets the batch-scoped terms choose their tokens, given the whole optimizer batch.

        Args:
          outputs: The live policy's outputs on all of its rows, from an extra pass.
          rows: All of its rows.
          key: For the terms that choose at random.

        Returns:
          The rows with `batch_stats` set; any cut of them may go to `loss`.
        """
        step = self.policy(step_of(jax.lax.stop_gradient(outputs), rows, self.advantage))
        return rows.replace(
            batch_stats=tuple(term.choose(step, key) for term in self._batch_terms())
        )

    def remarks(self, values: dict[str, float]) -> list[str]:
        """One line for each part that had no effect, by the finished metrics of both halves."""
        found = [remark_on_overflow(values), *(term.remark(values) for term in self.regularisers)]
        return [line for line in found if line is not None]

    def init_state(self) -> State:
        """The state of all terms that keep one, as 'term/entry'; checkpoint it.

        A second term of the same kind is called term_2, and so on. Empty for most objectives.
        """
        return initial_states(self.regularisers)

    def update_state(self, state: State, stats: dict[str, Metric]) -> State:
        """The state after an optimizer step.

        Args:
          state: Before it.
          stats: The merged metrics of `loss` over the optimizer batch.

        Returns:
          The new state.
        """
        return updated_states(self.regularisers, state, stats)

    def loss(
        self,
        outputs: PolicyOutputs | Float[Array, "R T"],
        rows: Rows,
        state: State | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss of some rows: a sum over tokens, to be added over micro-batches.

        Without `rows.old_logp` the live policy is its own anchor: ratios are exactly 1, with the
        right gradient, which saves a pass where a batch gives one on-policy update.

        Args:
          outputs: The live policy's outputs on these rows, or its log-probabilities alone.
          rows: What `prepare` or `minibatch` gave, or any cut of it.
          state: The state of the terms that keep one.

        Returns:
          The loss, to be minimised, and metrics (`policy/*`, `critic/*`) that merge.

        Raises:
          ValueError: A field that the objective needs is missing, or shapes disagree.
        """
        step = self.policy(step_of(outputs, rows, self.advantage))
        if step.surrogate is None:
            step = policy_gradient()(step)
        chosen, state = self._chosen(rows), state or {}
        for (name, term), tokens in zip(by_name(self.regularisers), chosen, strict=True):
            step = term.surrogate(step.replace(state=own_state(state, name)), tokens)
        assert step.surrogate is not None
        gain = rows.weights * jax.lax.stop_gradient(rows.correction) * step.surrogate
        if step.gate is not None:
            gain = gain * step.gate
        loss = -total(jnp.where(rows.mask, gain, 0.0))
        for (name, term), tokens in zip(by_name(self.regularisers), chosen, strict=True):
            penalty = term.penalty(step.replace(state=own_state(state, name)), tokens)
            if penalty is not None:
                weights = rows.weights if term.weighing == "policy" else rows.token_weights
                loss = loss + total(jnp.where(rows.mask, weights * penalty, 0.0))
        stats = dict(step.stats)
        if self.critic is not None:
            errors = self.critic.errors(step)
            weights = rows.weights if self.critic.weights == "policy" else rows.token_weights
            loss = loss + self.critic.coef * total(jnp.where(rows.mask, weights * errors, 0.0))
            stats |= self.critic.stats(step, errors)
        stats |= reports.of_step(step, loss)
        return loss, jax.lax.stop_gradient(stats)

    def _transforms(self) -> tuple[Any, ...]:
        critic = () if self.critic is None else (self.critic,)
        return (
            *self.shaping,
            *self.masks,
            *parts(self.advantage),
            *parts(self.policy),
            *self.corrections,
            *self.regularisers,
            *critic,
        )

    def _batch_terms(self) -> tuple[Any, ...]:
        return tuple(r for r in self.regularisers if r.scope == "batch")

    def _chosen(self, rows: Rows) -> list[Array | None]:
        """What each regulariser chose; None for those that choose nothing."""
        terms = self._batch_terms()
        if len(rows.batch_stats) < len(terms):
            raise InputError(
                f"{terms[0]!r} looks at the whole optimizer batch, got no batch_stats: call "
                "with_batch_stats on all of its rows before cutting them"
            )
        stats = iter(rows.batch_stats)
        return [next(stats) if r.scope == "batch" else None for r in self.regularisers]
