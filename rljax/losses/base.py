"""What transforms are and what flows through them.

A transform is a frozen dataclass with a `__call__`, named like a function, so that
an objective made of them is hashable, prints as the code that made it, and can be a static
argument of `jax.jit`. Two records flow: `Draft` through `prepare`, on the whole rollout batch, and
`Step` through `loss`, on any cut of the rows.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.losses.metrics import Mean, Metrics
from rljax.losses.sequences import SequenceLayout

Scope = Literal["token", "sequence", "batch"]
Anchor = Literal["old", "rollout", "self"]
Level = Literal["token", "sequence"]

EXPONENT_LIMIT = 20.0
"""Exponents are held within ± this: e²⁰ ≈ 5e8 is past every clip, and e¹²⁰ is past float32."""


def clamped(exponent: Float[Array, "..."]) -> Float[Array, "..."]:
    """Holds an exponent within ±20; beyond, the gradient is 0.

    Written with `where`, since JAX gives half the gradient at the ends of `clip`.
    """
    held = jnp.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    return jnp.where(held == exponent, exponent, jax.lax.stop_gradient(held))


def safe_exp(exponent: Float[Array, "..."]) -> Float[Array, "..."]:
    """Exp of the clamped exponent: finite, with finite gradients, for any finite input."""
    return jnp.exp(clamped(exponent))


def check_level(level: str) -> None:
    """Refuses an unknown level."""
    if level not in ("token", "sequence"):
        raise InputError(f"level must be 'token' or 'sequence', got {level!r}")


def is_traced(*values: Any) -> bool:
    """Whether any value is unknown yet, so that it cannot be judged."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


class PolicyOutputs(struct.PyTreeNode):
    """What the live policy gives for some rows; only `logp` is always needed.

    Attributes:
      logp: Log-probability (nats) of each token, under the sampling temperature and support.
      entropy: Entropy (nats) of the same distribution.
      values: The live critic's values.
      router: Auxiliary router loss of each token, with the experts' loads taken over the whole
        optimizer batch and gradient-stopped.
    """

    logp: Float[Array, "R T"]
    entropy: Float[Array, "R T"] | None = None
    values: Float[Array, "R T"] | None = None
    router: Float[Array, "R T"] | None = None


@dataclasses.dataclass(frozen=True)
class Draft:
    """A rollout batch on its way through `prepare`; clean: no NaN, absent fields filled in.

    Attributes:
      batch: As given, for the fields that only some transforms want.
      mask: The policy's own tokens, bool [B, T].
      inside: Positions that belong to a response (not padding), bool [B, T].
      valid: Scored, with a finite reward, bool [B].
      group: Group numbers 0 .. B-1, int32 [B].
      scores, rewards: f32 [B], 0 where invalid; rewards as shaped so far.
      length: Completion tokens, int32 [B].
      truncated: bool [B].
      keep: Counts in the denominators, bool [B, T]; the whole response, prompt included.
      token_rewards: f32 [B, T] or None.
      advantages: f32 [B] as long as one number serves a response, then [B, T].
      returns: The critic's targets, f32 [B, T] or None.
      correction: c, f32 [B, T].
      stats: Metrics so far.
    """

    batch: Batch
    mask: Bool[Array, "B T"]
    inside: Bool[Array, "B T"]
    valid: Bool[Array, " B"]
    group: Int[Array, " B"]
    scores: Float[Array, " B"]
    rewards: Float[Array, " B"]
    length: Int[Array, " B"]
    truncated: Bool[Array, " B"]
    keep: Bool[Array, "B T"]
    token_rewards: Float[Array, "B T"] | None
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    returns: Float[Array, "B T"] | None
    correction: Float[Array, "B T"]
    stats: Metrics

    def replace(self, **changes: Any) -> "Draft":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def field(self, name: str, user: Any) -> Float[Array, "B T"]:
        """A per-token field of the batch, 0 outside the mask; refused by name if it is missing."""
        value = getattr(self.batch, name)
        if value is None:
            raise missing(name, user, "Batch")
        return jnp.where(self.mask, value, 0.0).astype(jnp.float32)

    def counted(self) -> Bool[Array, "B T"]:
        """Tokens that train and count."""
        return self.mask & self.keep

    def per_token(self) -> Float[Array, "B T"]:
        """The advantages, one for each token."""
        a = self.advantages
        return jnp.broadcast_to(a[:, None], self.mask.shape) if a.ndim == 1 else a

    def drop(self, dropped: Bool[Array, "B _"], keep_denominator: bool) -> "Draft":
        """Takes tokens out: of the surrogate alone, or of denominators and all terms too."""
        dropped = jnp.broadcast_to(dropped, self.mask.shape)
        if keep_denominator:
            return self.replace(correction=jnp.where(dropped, 0.0, self.correction))
        return self.replace(keep=self.keep & ~dropped)


@dataclasses.dataclass(frozen=True)
class Step:
    """Rows and the live policy on their way through `loss`; clean: 0 outside the mask.

    Attributes:
      rows: The rows.
      layout: How sequences lie in them.
      outputs: What the policy gave.
      logp: Live log-probabilities, 0 outside the mask, f32 [R, T].
      advantages: A, f32 [R, T], without gradient.
      state: The state of the regulariser at work; empty for one that keeps none.
      log_ratio: log of the ratio, f32 [R, T] or [R, 1] where one serves a row; None before any.
      counts: Whether ratio and clipping are reported for each token or each sequence.
      surrogate: J, f32 [R, T]; None before a trust region has set it.
      gate: Live gradient-stopped factors on J, or None.
      clipped_low, clipped_high: Where the trust region took the gradient away, or None.
      stats: Further metrics by name.
    """

    rows: Rows
    layout: SequenceLayout
    outputs: PolicyOutputs
    logp: Float[Array, "R T"]
    advantages: Float[Array, "R T"]
    state: dict[str, Array]
    log_ratio: Float[Array, "R _"] | None = None
    counts: Level = "token"
    surrogate: Float[Array, "R T"] | None = None
    gate: Float[Array, "R _"] | None = None
    clipped_low: Bool[Array, "R _"] | None = None
    clipped_high: Bool[Array, "R _"] | None = None
    stats: Metrics = dataclasses.field(default_factory=dict)

    def replace(self, **changes: Any) -> "Step":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def ratio(self) -> Float[Array, "R _"]:
        """Exp of the log-ratio, or 1 where no ratio was taken."""
        if self.log_ratio is None:
            return jnp.ones_like(self.logp)
        return safe_exp(self.log_ratio)

    def field(self, name: str, user: Any) -> Float[Array, "R T"]:
        """A per-token field of the rows, 0 outside the mask; refused by name if it is missing."""
        value = getattr(self.rows, name)
        if value is None:
            raise missing(name, user, "Rows")
        return jax.lax.stop_gradient(jnp.where(self.rows.mask, value, 0.0).astype(jnp.float32))

    def output(self, name: str, user: Any) -> Float[Array, "R T"]:
        """A live output, 0 outside the mask; refused by name if it is missing."""
        value = getattr(self.outputs, name)
        if value is None:
            raise missing(name, user, "PolicyOutputs")
        return jnp.where(self.rows.mask, value, 0.0).astype(jnp.float32)

    def anchor(self, anchor: Anchor, user: Any) -> Float[Array, "R T"]:
        """The log-probabilities that a ratio is taken against.

        'old' without old_logp is the live policy itself: right for the one on-policy update.
        """
        if anchor == "rollout":
            return self.field("rollout_logp", user)
        if anchor == "self" or self.rows.old_logp is None:
            return jax.lax.stop_gradient(self.logp)
        return self.field("old_logp", user)

    def counted(self) -> Bool[Array, "R T"]:
        """Tokens that train and count."""
        return self.rows.mask & self.rows.keep

    def counter(self, counts: Level) -> Float[Array, "R T"]:
        """Weights that count one for each kept token, or one for each kept sequence."""
        kept = self.counted().astype(jnp.float32)
        if counts == "token":
            return kept
        return kept / jnp.maximum(self.layout.totals(kept), 1.0)

    def note(self, name: str, where: Bool[Array, "R _"], counts: Level) -> "Step":
        """Reports the fraction of tokens, or of sequences, for which something holds."""
        return self.replace(stats={**self.stats, name: Mean.of(where, self.counter(counts))})

    def with_surrogate(self, surrogate: Float[Array, "R T"], **changes: Any) -> "Step":
        """Sets J; one trust region may do so."""
        if self.surrogate is not None:
            raise InputError(
                "a policy chain takes one transform that sets the surrogate, got a second: "
                "keep one of policy_gradient, ppo_clip, cispo_weight, gmpo_clip, sapo_gate, "
                "vespo_weight"
            )
        return self.replace(surrogate=surrogate, **changes)

    def clip(self, low: Bool[Array, "R _"] | None, high: Bool[Array, "R _"] | None) -> "Step":
        """Notes where the gradient was taken away, for the clip fractions."""
        return self.replace(
            clipped_low=_either(self.clipped_low, low),
            clipped_high=_either(self.clipped_high, high),
        )

    def close(self, passes: Bool[Array, "R _"]) -> "Step":
        """Lets the surrogate through only where `passes`."""
        gate = passes.astype(jnp.float32)
        return self.replace(gate=gate if self.gate is None else self.gate * gate)


def _either(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a | b


def missing(name: str, user: Any, record: str) -> InputError:
    """The refusal of a missing field, by name."""
    return InputError(f"{user!r} needs {name}, got None: set {record}.{name}")


@dataclasses.dataclass(frozen=True)
class Transform:
    """Base of all transforms.

    Attributes:
      scope: What one result depends on: its token, its sequence, or the whole batch.
      gates_tokens: Whether it may take single tokens out of a sequence's surrogate. Of masks,
        corrections and regularisers; for the policy half it is found out (see `coupling`).
    """

    scope: ClassVar[Scope] = "token"
    gates_tokens: ClassVar[bool] = False

    @property
    def prepare_needs(self) -> frozenset[str]:
        """What `prepare` reads for it (see `Objective.needs`)."""
        return frozenset()

    @property
    def loss_needs(self) -> frozenset[str]:
        """What `loss` reads for it (see `Objective.needs`)."""
        return frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """What must be supplied for it, in either half."""
        return self.prepare_needs | self.loss_needs

    def for_sequences(self) -> "Transform | None":
        """The form that judges whole sequences, for a policy half that couples their tokens.

        None if there is no such form; itself where it does not judge single tokens.
        """
        return None if self.gates_tokens else self


@dataclasses.dataclass(frozen=True)
class Chain(Transform):
    """Transforms one after another (see `chain`)."""

    transforms: tuple[Any, ...] = ()

    def __call__(self, x: Any) -> Any:
        """Applies each in turn."""
        for transform in self.transforms:
            x = transform(x)
        return x

    @property
    def prepare_needs(self) -> frozenset[str]:
        """What `prepare` reads for any of them."""
        return frozenset().union(*(t.prepare_needs for t in self.transforms))

    @property
    def loss_needs(self) -> frozenset[str]:
        """What `loss` reads for any of them."""
        return frozenset().union(*(t.loss_needs for t in self.transforms))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"


def chain(*transforms: Any) -> Chain:
    """Applies transforms one after another: of advantages, or of the policy half.

    Args:
      *transforms: In the order in which they act.

    Returns:
      One transform.
    """
    return Chain(parts(*transforms))


def parts(*transforms: Any) -> tuple[Any, ...]:
    """The single transforms, chains opened."""
    flat: list[Any] = []
    for transform in transforms:
        flat.extend(parts(*transform.transforms) if isinstance(transform, Chain) else [transform])
    return tuple(flat)


def needs_of_anchor(anchor: str) -> frozenset[str]:
    """What a ratio against that anchor needs."""
    if anchor not in ("old", "rollout", "self"):
        raise InputError(f"anchor must be 'old', 'rollout' or 'self', got {anchor!r}")
    return frozenset() if anchor == "self" else frozenset({anchor})
