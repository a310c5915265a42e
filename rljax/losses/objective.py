"""An objective: a composition of transforms, in two halves.

`prepare` holds everything that does not depend on the live policy and runs on the whole rollout
batch: shape rewards, mark what trains, advantages, corrections, token weights. `loss` is the
differentiable rest and runs on any cut of the rows: it is a sum over tokens,

    loss = Σ -w·c·J + Σ penalties,

with w fixed by the optimizer batch, so losses and gradients of micro-batches, packed rows and
devices add up to those of the whole.
"""

import dataclasses
import warnings
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.losses import groups, reports
from rljax.losses.advantages import Advantage
from rljax.losses.base import Chain, Draft, PolicyOutputs, Step, is_traced, parts
from rljax.losses.corrections import Correction
from rljax.losses.critic import value_loss
from rljax.losses.masks import Mask
from rljax.losses.metrics import Metric, Metrics, total
from rljax.losses.ratios import Ratio, sequence_ratio
from rljax.losses.regularisers import Regulariser
from rljax.losses.sequences import Layout
from rljax.losses.shaping import Shaping
from rljax.losses.trust_regions import TrustRegion, policy_gradient
from rljax.losses.weights import Weights, prompt_mean, sequence_mean, token_mean

_KINDS: dict[str, tuple[type, ...]] = {
    "advantage": (Advantage,),
    "policy": (Ratio, TrustRegion),
    "weights": (Weights,),
    "shaping": (Shaping,),
    "masks": (Mask,),
    "corrections": (Correction,),
    "regularisers": (Regulariser,),
    "critic": (value_loss, NoneType),
}


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

    Where several may stand, one alone, a tuple or a list will do.

    Raises:
        ValueError: A part stands in the wrong place, or parts do not go together: a correction on
            a ratio against the rollout policy, or one that judges tokens on a sequence's ratio.
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
        self._refuse_misplaced()
        self._refuse_double_corrections()
        self._refuse_gates_on_coupled_tokens()
        self._warn_of_token_weights()
        stateful = [r for r in self.regularisers if r.init_state()]
        if len(stateful) > 1:
            raise InputError(f"one regulariser may keep state, got {stateful}: keep one of them")

    def _refuse_misplaced(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            for transform in parts(*value) if isinstance(value, tuple) else parts(value):
                if not isinstance(transform, kinds):
                    wanted = " or ".join(kind.__name__ for kind in kinds)
                    raise InputError(
                        f"{name} takes what derives from {wanted}, got {transform!r}: "
                        "put it where it belongs"
                    )

    def _refuse_double_corrections(self) -> None:
        for transform in parts(self.policy):
            if self.corrections and isinstance(transform, Ratio) and transform.anchor == "rollout":
                raise InputError(
                    f"{transform!r} is taken against the rollout policy already, got "
                    f"{self.corrections[0]!r} on top: drop it or use anchor='old'"
                )

    def _refuse_gates_on_coupled_tokens(self) -> None:
        policy = parts(self.policy)
        coupling = [t for t in policy if t.couples_tokens]
        gating = [
            t
            for t in (*self.corrections, *self.masks, *self.regularisers, *policy)
            if t.gates_tokens
        ]
        if coupling and gating:
            raise InputError(
                f"{gating[0]!r} judges single tokens, {coupling[0]!r} whole sequences, so that "
                "rejected tokens would keep a gradient: use sequence_token_ratio or judge sequences"
            )

    def _warn_of_token_weights(self) -> None:
        for ratio in parts(self.policy):
            whole = isinstance(ratio, sequence_ratio) and ratio.normalize
            if whole and not isinstance(self.weights, sequence_mean):
                warnings.warn(
                    f"{ratio!r} under {self.weights!r} gives long responses more weight: "
                    "sequence_mean() weighs every response once",
                    stacklevel=4,
                )

    @property
    def needs(self) -> frozenset[str]:
        """What must be supplied, so that nothing else is computed.

        Of 'old', 'rollout', 'ref', 'teacher', 'values', 'old_entropy', 'components', 'bootstrap'
        (fields of the batch), 'entropy', 'router' (live outputs) and 'batch_stats' (a call of
        `with_batch_stats`). 'values' stands for the batch's and the live ones. 'old' may be left
        out by whoever takes one on-policy update from each batch, unless `prepare` needs it.
        """
        return frozenset().union(*(t.needs for t in self._transforms()))

    def prepare(self, batch: Batch) -> tuple[Rows, Metrics]:
        """Does all that does not depend on the live policy; jit-compatible.

        Args:
            batch: The whole rollout batch.

        Returns:
            Rows that carry advantages, weights and corrections, one response a row, and metrics
            of the batch (`reward/*`, `score/*`, `group/*`, `completion/*`, `mismatch/*`).

        Raises:
            ValueError: A field is missing or misshapen, or a prompt has a single response where
                the advantage compares responses (judged outside jit only).
        """
        batch.check()
        draft = _draft(batch)
        for shape in self.shaping:
            draft = shape(draft)
        for mask in self.masks:
            draft = mask(draft)
        draft = self.advantage(draft.replace(advantages=draft.rewards))
        for correction in self.corrections:
            draft = correction(draft)
        return jax.lax.stop_gradient((self.weigh(_rows(draft)), draft.stats))

    def weigh(self, rows: Rows) -> Rows:
        """Weighs the tokens of one optimizer batch.

        Args:
            rows: All of its rows.

        Returns:
            The rows with `weights` and `token_weights` set.
        """
        layout = Layout.of(rows)
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
        if isinstance(self.weights, prompt_mean) and not is_traced(ready, index):
            group, inside = np.asarray(ready.group), np.asarray(ready.sequence) >= 0
            chosen = np.zeros(len(group), bool)
            chosen[np.asarray(index)] = True
            parted = np.intersect1d(group[chosen][inside[chosen]], group[~chosen][inside[~chosen]])
            if parted.size:
                raise InputError(
                    f"prompt_mean needs whole groups in a mini-batch, got parts of {parted.size}: "
                    "choose mini_batch_size as a multiple of num_generations"
                )
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
        step = self.policy(self._step(jax.lax.stop_gradient(outputs), rows, {}))
        return rows.replace(
            batch_stats=tuple(term.choose(step, key) for term in self._batch_terms())
        )

    def init_state(self) -> dict[str, Array]:
        """The state of the terms that keep one; empty for most objectives. Checkpoint it."""
        return {k: v for r in self.regularisers for k, v in r.init_state().items()}

    def update_state(self, state: dict[str, Array], stats: dict[str, Metric]) -> dict[str, Array]:
        """The state after an optimizer step.

        Args:
            state: Before it.
            stats: The merged metrics of `loss` over the optimizer batch.

        Returns:
            The new state.
        """
        return {k: v for r in self.regularisers for k, v in r.update_state(state, stats).items()}

    def loss(
        self,
        outputs: PolicyOutputs | Float[Array, "R T"],
        rows: Rows,
        state: dict[str, Array] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss of some rows: a sum over tokens, to be added over micro-batches.

        Without `rows.old_logp` the live policy is its own anchor: ratios are exactly 1, with the
        right gradient. That is right for the one on-policy update of a batch and saves a pass.

        Args:
            outputs: The live policy's outputs on these rows, or its log-probabilities alone.
            rows: What `prepare` or `minibatch` gave, or any cut of it.
            state: The state of the terms that keep one.

        Returns:
            The loss, to be minimised, and metrics (`policy/*`, `critic/*`) that merge.

        Raises:
            ValueError: A field that the objective needs is missing, or shapes disagree.
        """
        step = self.policy(self._step(outputs, rows, state or {}))
        if step.surrogate is None:
            step = policy_gradient()(step)
        chosen = self._chosen(rows)
        for term in self.regularisers:
            step = term.surrogate(step, chosen.get(term))
        assert step.surrogate is not None
        gain = rows.weights * jax.lax.stop_gradient(rows.correction) * step.surrogate
        if step.gate is not None:
            gain = gain * step.gate
        loss = -total(jnp.where(rows.mask, gain, 0.0))
        for term in self.regularisers:
            penalty = term.penalty(step, chosen.get(term))
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

    def _chosen(self, rows: Rows) -> dict[Any, Array]:
        """What each batch-scoped term chose."""
        terms = self._batch_terms()
        if len(rows.batch_stats) < len(terms):
            raise InputError(
                f"{terms[0]!r} looks at the whole optimizer batch, got no batch_stats: call "
                "with_batch_stats on all of its rows before cutting them"
            )
        return dict(zip(terms, rows.batch_stats, strict=False))

    def _step(
        self,
        outputs: PolicyOutputs | Float[Array, "R T"],
        rows: Rows,
        state: dict[str, Array],
    ) -> Step:
        if not isinstance(outputs, PolicyOutputs):
            outputs = PolicyOutputs(outputs)
        shape = jnp.shape(outputs.logp)
        if shape != jnp.shape(rows.mask):
            raise InputError(
                f"logp must have the rows' shape {jnp.shape(rows.mask)}, got {shape}: "
                "give one log-probability for each token of the same rows"
            )
        logp = jnp.where(rows.mask, outputs.logp, 0.0).astype(jnp.float32)
        step = Step(
            rows=rows,
            layout=Layout.of(rows),
            outputs=outputs,
            logp=logp,
            advantages=jax.lax.stop_gradient(jnp.where(rows.mask, rows.advantages, 0.0)),
            state=state,
        )
        for transform in parts(self.advantage):
            step = transform.live(step)
        return step


def _draft(batch: Batch) -> Draft:
    """Fills absent fields in and takes NaN out."""
    mask = jnp.asarray(batch.mask).astype(bool)
    columns = jnp.arange(mask.shape[1])
    if batch.segments is None:
        inside = columns <= jnp.max(jnp.where(mask, columns, 0), axis=1, keepdims=True)
    else:
        inside = (batch.segments > 0) | mask
    rewards = jnp.asarray(batch.rewards).astype(jnp.float32)
    scores = rewards if batch.scores is None else jnp.asarray(batch.scores).astype(jnp.float32)
    valid = jnp.isfinite(rewards) & jnp.isfinite(scores)
    if batch.valid is not None:
        valid &= jnp.asarray(batch.valid).astype(bool)
    token_rewards = batch.token_rewards
    if token_rewards is not None:
        token_rewards = jnp.where(mask & valid[:, None], token_rewards, 0.0).astype(jnp.float32)
    length = mask.sum(axis=1) if batch.completion_length is None else batch.completion_length
    truncated = jnp.zeros_like(valid) if batch.truncated is None else batch.truncated
    rewards = jnp.where(valid, rewards, 0.0)
    draft = Draft(
        batch=batch,
        mask=mask,
        inside=inside,
        valid=valid,
        group=groups.numbered(jnp.asarray(batch.group)),
        scores=jnp.where(valid, scores, 0.0),
        rewards=rewards,
        length=jnp.asarray(length),
        truncated=jnp.asarray(truncated).astype(bool),
        keep=inside & valid[:, None],
        token_rewards=token_rewards,
        advantages=rewards,
        returns=None,
        correction=jnp.ones(mask.shape, jnp.float32),
        stats={},
    )
    return draft.replace(stats=reports.of_draft(draft))


def _rows(draft: Draft) -> Rows:
    """Expands everything to tokens."""
    batch, mask, inside = draft.batch, draft.mask, draft.inside
    shape = mask.shape

    def along(x: Array, outside: int) -> Array:
        return jnp.where(inside, x[:, None], outside).astype(jnp.int32)

    def per_token(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(mask, x, 0.0).astype(jnp.float32)

    positions = jnp.arange(shape[1]) if batch.positions is None else batch.positions
    zeros = jnp.zeros(shape, jnp.float32)
    return Rows(
        tokens=jnp.asarray(batch.tokens),
        mask=mask,
        positions=jnp.broadcast_to(positions, shape).astype(jnp.int32),
        segments=inside.astype(jnp.int32),
        sequence=along(jnp.arange(shape[0]), -1),
        group=along(draft.group, -1),
        keep=draft.keep,
        advantages=jnp.where(mask & draft.valid[:, None], draft.per_token(), 0.0),
        weights=zeros,
        token_weights=zeros,
        correction=draft.correction,
        old_logp=per_token(batch.old_logp),
        rollout_logp=per_token(batch.rollout_logp),
        ref_logp=per_token(batch.ref_logp),
        teacher_logp=per_token(batch.teacher_logp),
        values=per_token(batch.values),
        returns=draft.returns,
        old_entropy=per_token(batch.old_entropy),
        routing=batch.routing,
        support=batch.support,
    )
