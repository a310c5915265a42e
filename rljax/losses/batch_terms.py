"""Terms that choose tokens, or whole responses, by looking at the whole optimizer batch.

They choose once (`Objective.with_batch_stats`) and then act on any cut of the batch. With
`level='sequence'` they rank and choose responses: for policy halves whose responses have one ratio,
where taking single tokens away would leave them a gradient through the others.
"""

import dataclasses
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from rljax.errors import InputError
from rljax.losses import groups
from rljax.losses.base import Level, Scope, Step, check_level, is_traced
from rljax.losses.metrics import Mean
from rljax.losses.regularisers import Regulariser


@dataclasses.dataclass(frozen=True)
class BatchTerm(Regulariser):
    """Base of the terms that choose tokens over the whole optimizer batch."""

    scope: ClassVar[Scope] = "batch"

    @property
    def loss_needs(self) -> frozenset[str]:
        """The extra pass over the whole optimizer batch."""
        return frozenset({"batch_stats"})


@dataclasses.dataclass(frozen=True)
class clip_cov(BatchTerm):
    """Takes the surrogate of a few tokens of high covariance away (Clip-Cov, arXiv:2505.22617).

    With cov = (A - Ā)(log π - mean log π): of the tokens not already clipped whose cov lies in
    (low, high), as many as `fraction` of all, chosen at random by a key. As in the published code,
    at least one is chosen, if any qualifies. In a small batch often none does (advantages of ±1
    rarely reach a cov of 1), and the term then changes nothing: `policy/clip_cov_frac` is 0.

    At level 'sequence' it takes whole responses away, by the covariance of their advantage and
    their log-probability per token, as GSPO's ratio is per token: sums would rank by length.

    Args:
      fraction: Of all kept tokens, or of all kept responses.
      low: Smallest cov.
      high: Largest cov.
      level: 'token' or 'sequence'.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_level(self.level)

    @property
    def gates_tokens(self) -> bool:  # type: ignore[override]
        """At level 'token'."""
        return self.level == "token"

    def for_sequences(self) -> "clip_cov":
        """The same by responses."""
        return dataclasses.replace(self, level="sequence")

    def choose(self, step: Step, key: PRNGKeyArray | None) -> Bool[Array, "R T"]:
        """The tokens to take away."""
        if key is None:
            raise InputError(f"{self!r} chooses at random, got no key: pass key=jax.random.key(..)")
        cov, kept = _covariance(step, self.level)
        eligible = kept & (cov > self.low) & (cov < self.high) & ~_clipped(step, self.level)
        if not is_traced(eligible) and not bool(eligible.any()):
            warnings.warn(_nothing_chosen(self), stacklevel=2)
        draws = jnp.where(eligible, _draws(step, key, self.level), -1.0)
        number = groups.whole_share(kept.sum(), self.fraction)
        edge = jnp.sort(draws.reshape(-1), descending=True)[number - 1]
        return _to_tokens(step, eligible & (draws >= edge), self.level)

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """Takes J away where chosen."""
        assert chosen is not None
        found = {"policy/clip_cov_frac": Mean.of(chosen, step.counted())}
        return step.close(~chosen).replace(stats={**step.stats, **found})

    def remark(self, values: dict[str, float]) -> str | None:
        """That nothing was chosen."""
        return _nothing_chosen(self) if values.get("policy/clip_cov_frac") == 0 else None


@dataclasses.dataclass(frozen=True)
class kl_cov(BatchTerm):
    """Penalises coef·|log r| on the tokens of highest covariance (KL-Cov, arXiv:2505.22617).

    Takes the place of a clipping window (`Objective.adding` sees to it); r is the live token ratio
    to the start of the step. Only a positive covariance is penalised.

    At level 'sequence' it penalises coef·|mean_t log r_t| on every token of the responses whose
    advantage and log-probability per token have the highest covariance.

    Args:
      coef: Coefficient.
      fraction: Of all kept tokens, or of all kept responses; at least one is chosen.
      level: 'token' or 'sequence'.
    """

    coef: float = 1.0
    fraction: float = 2e-4
    level: Level = "token"

    def __post_init__(self) -> None:
        check_level(self.level)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The extra pass, and the anchor of the ratio."""
        return frozenset({"batch_stats", "old"})

    def for_sequences(self) -> "kl_cov":
        """The same by responses."""
        return dataclasses.replace(self, level="sequence")

    def choose(self, step: Step, key: PRNGKeyArray | None) -> Bool[Array, "R T"]:
        """The tokens to penalise."""
        cov, kept = _covariance(step, self.level)
        chosen = groups.top_share(cov, kept, self.fraction) & (cov > 0)
        return _to_tokens(step, chosen, self.level)

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """Reports the share of tokens; J stays."""
        assert chosen is not None
        found = {"policy/kl_cov_frac": Mean.of(chosen, step.counted())}
        return step.replace(stats={**step.stats, **found})

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"]:
        """What is added to the loss of each token."""
        assert chosen is not None
        moved = step.logp - step.anchor("old", self)
        if self.level == "sequence":
            moved = step.layout.means(moved, step.rows.mask)
        return jnp.where(chosen, self.coef * jnp.abs(moved), 0.0)


@dataclasses.dataclass(frozen=True)
class live_top_entropy(BatchTerm):
    """Trains only the tokens of highest entropy under the live policy.

    `top_entropy` does so by the entropy at the start of the step, without an extra pass.

    Args:
      quantile: Share of the kept tokens, or of the kept responses by mean entropy, that trains.
      level: 'token' or 'sequence'.
    """

    quantile: float
    level: Level = "token"

    def __post_init__(self) -> None:
        check_level(self.level)

    @property
    def gates_tokens(self) -> bool:  # type: ignore[override]
        """At level 'token'."""
        return self.level == "token"

    @property
    def loss_needs(self) -> frozenset[str]:
        """The extra pass, and the live entropy."""
        return frozenset({"batch_stats", "entropy"})

    def for_sequences(self) -> "live_top_entropy":
        """The same by responses."""
        return dataclasses.replace(self, level="sequence")

    def choose(self, step: Step, key: PRNGKeyArray | None) -> Bool[Array, "R T"]:
        """The tokens that train."""
        entropy = jax.lax.stop_gradient(step.output("entropy", self))
        kept = step.counted()
        if self.level == "sequence":
            entropy, kept = step.layout.averages(entropy, kept), step.layout.any(kept)
        chosen = groups.top_share(entropy, kept, self.quantile)
        return _to_tokens(step, chosen, self.level)

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """Keeps J only where chosen."""
        assert chosen is not None
        return step.close(chosen)


def _covariance(step: Step, level: Level) -> tuple[Float[Array, "R _"], Bool[Array, "R _"]]:
    """(A - mean A)(log π - mean log π) of kept tokens or responses, and which are kept."""
    kept, a, logp = step.counted(), step.advantages, step.logp
    if level == "sequence":
        a, logp = step.layout.averages(a, kept), step.layout.averages(logp, kept)
        kept = step.layout.any(kept)
    count = jnp.maximum(kept.sum(), 1)

    def centered(x: Float[Array, "R _"]) -> Float[Array, "R _"]:
        return x - jnp.where(kept, x, 0.0).sum() / count

    return centered(a) * centered(logp), kept


def _clipped(step: Step, level: Level) -> Bool[Array, "R _"]:
    """Tokens that the trust region clipped, or responses of which it clipped every token."""
    clipped = jnp.zeros((1, 1), bool)
    for flags in (step.clipped_low, step.clipped_high):
        clipped = clipped if flags is None else clipped | flags
    if level == "token":
        return clipped
    return ~step.layout.any(step.counted() & ~clipped)


def _draws(step: Step, key: PRNGKeyArray, level: Level) -> Float[Array, "R _"]:
    """Uniform noise that belongs to a token (its response and position), not to its row."""
    sequence, position = step.rows.sequence, step.rows.positions
    if level == "sequence":
        sequence = step.layout.constant(sequence)
        position = jnp.zeros_like(sequence)
    place = jnp.stack([sequence, position], axis=-1).reshape(-1, 2)

    def draw(at: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, at[0]), at[1]))

    return jax.vmap(draw)(place).reshape(sequence.shape)


def _to_tokens(step: Step, chosen: Bool[Array, "R _"], level: Level) -> Bool[Array, "R T"]:
    """What was chosen, as kept tokens."""
    if level == "sequence":
        chosen = step.layout.spread(chosen)
    return chosen & step.counted()


def _nothing_chosen(term: clip_cov) -> str:
    unit = "token" if term.level == "token" else "response"
    return (
        f"clip_cov changed nothing: no unclipped {unit} has a covariance between {term.low:g} and "
        f"{term.high:g}; use more responses or another (low, high)"
    )
