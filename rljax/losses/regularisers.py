"""Terms beside the surrogate: penalties on tokens, and coefficients that change over a run.

A penalty has weights of its own and never c: 'policy' takes the objective's w, 'token' a mean over
the kept tokens of the optimizer batch. Terms of scope 'batch', which choose tokens by looking at
the whole optimizer batch, are in `batch_terms`.
"""

import dataclasses
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from rljax.errors import InputError
from rljax.losses.base import Step, Transform, safe_exp
from rljax.losses.estimators import Estimator, check_estimator, kl_estimate
from rljax.losses.metrics import Mean, Metric

Weighing = Literal["policy", "token"]
State: TypeAlias = dict[str, Array]
"""The state of an objective: of each term that keeps one, as 'term/entry'."""


@dataclasses.dataclass(frozen=True)
class Regulariser(Transform):
    """Base of the regularisers; each may penalise, choose tokens, or change the surrogate.

    A term that keeps state finds its own in `step.state`; several such terms may be used together.
    """

    @property
    def weighing(self) -> Weighing:
        """Which weights the penalty takes."""
        return "policy"

    @property
    def penalises(self) -> bool:
        """Whether it has a penalty."""
        return type(self).penalty is not Regulariser.penalty

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"] | None:
        """What is added to the loss of each token, before its weight; None for nothing."""
        return None

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """May change J."""
        return step

    def choose(self, step: Step, key: PRNGKeyArray | None) -> Bool[Array, "R T"]:
        """For scope 'batch': the tokens to act on, given the whole optimizer batch."""
        raise NotImplementedError

    def remark(self, values: dict[str, float]) -> str | None:
        """One line where the finished metrics show that the term did nothing; else None."""
        return None

    def init_state(self) -> dict[str, Array]:
        """Coefficients that change from step to step; empty for a term without any."""
        return {}

    def update_state(self, state: dict[str, Array], stats: dict[str, Metric]) -> dict[str, Array]:
        """Those coefficients after an optimizer step with these merged metrics."""
        return state


@dataclasses.dataclass(frozen=True)
class kl(Regulariser):
    """Penalises β·KL to the reference, with its gradient, weighed by w without c.

    Args:
      beta: Coefficient.
      estimator: 'k1', 'k2' or 'k3' (k3's gradient is 0 where |log π - log ref| > 20).
      unbiased: Multiply by the live ratio π/π_old of the token, not gradient-stopped, also under
        a sequence-level objective (DeepSeek-V3.2, arXiv:2512.02556): then the gradient is
        that of KL(π‖ref) off-policy too.
    """

    beta: float
    estimator: Estimator = "k3"
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_estimator(self.estimator)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The reference, and the anchor of the ratio."""
        return frozenset({"ref", "old"} if self.unbiased else {"ref"})

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"]:
        """What is added to the loss of each token."""
        estimate = kl_estimate(step.logp, step.field("ref_logp", self), self.estimator)
        if self.unbiased:
            estimate = estimate * safe_exp(step.logp - step.anchor("old", self))
        return self.beta * estimate


@dataclasses.dataclass(frozen=True)
class entropy_bonus(Regulariser):
    """Rewards entropy: -coef·H of each token (needs `PolicyOutputs.entropy`, with gradient).

    Args:
      coef: Coefficient.
      weights: 'token' for a mean over kept tokens, 'policy' for the objective's own weights.
    """

    coef: float
    weights: Weighing = "token"

    @property
    def weighing(self) -> Weighing:
        """As given."""
        return self.weights

    @property
    def loss_needs(self) -> frozenset[str]:
        """The live entropy."""
        return frozenset({"entropy"})

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"]:
        """What is added to the loss of each token."""
        return -self.coef * step.output("entropy", self)


@dataclasses.dataclass(frozen=True)
class adaptive_entropy(Regulariser):
    """An entropy bonus whose coefficient moves by a step towards a target (arXiv:2505.22312).

    After each optimizer step the coefficient rises where the batch's entropy is not above the
    target, and falls where it is; it acts only in the former case. The coefficient is state:
    `Objective.init_state`, `Objective.update_state`; checkpoint it.

    Args:
      target: Entropy to hold, nats.
      initial: First coefficient.
      step: Change after each optimizer step.
      largest: Bound on the coefficient; the lower bound is 0.
      weights: As in `entropy_bonus`.
    """

    target: float
    initial: float = 5e-3
    step: float = 5e-3
    largest: float = 1.0
    weights: Weighing = "token"

    @property
    def weighing(self) -> Weighing:
        """As given."""
        return self.weights

    @property
    def loss_needs(self) -> frozenset[str]:
        """The live entropy."""
        return frozenset({"entropy"})

    def init_state(self) -> dict[str, Array]:
        """The first coefficient, active."""
        return {
            "entropy_coef": jnp.float32(self.initial),
            "entropy_last": jnp.float32(self.target),
        }

    def update_state(self, state: dict[str, Array], stats: dict[str, Metric]) -> dict[str, Array]:
        """Moves the coefficient by the entropy of `stats['policy/entropy']`."""
        measured = stats["policy/entropy"]
        assert isinstance(measured, Mean)
        counted = measured.denominator > 0
        last = measured.numerator / jnp.maximum(measured.denominator, 1e-30)
        move = jnp.where(last <= self.target, self.step, -self.step)
        coef = jnp.clip(state["entropy_coef"] + move, 0.0, self.largest)
        return {
            "entropy_coef": jnp.where(counted, coef, state["entropy_coef"]),
            "entropy_last": jnp.where(counted, last, state["entropy_last"]),
        }

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """Reports the coefficient; J stays."""
        coef = {"policy/entropy_coef": Mean(self._coef(step), jnp.float32(1))}
        return step.replace(stats={**step.stats, **coef})

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"]:
        """What is added to the loss of each token."""
        return -self._coef(step) * step.output("entropy", self)

    def _coef(self, step: Step) -> Float[Array, ""]:
        """The coefficient as it acts now."""
        if "entropy_coef" not in step.state:
            raise InputError(
                f"{self!r} needs its state, got none: pass state=objective.init_state()"
            )
        active = step.state["entropy_last"] <= self.target
        return jnp.where(active, step.state["entropy_coef"], 0.0)


@dataclasses.dataclass(frozen=True)
class router_balance(Regulariser):
    """Adds the load-balancing loss of a mixture's routers: coef·`PolicyOutputs.router`.

    The load in it is that of the whole optimizer batch (`models.balance_loss`).

    Args:
      coef: Coefficient.
    """

    coef: float

    @property
    def weighing(self) -> Weighing:
        """A mean over kept tokens."""
        return "token"

    @property
    def loss_needs(self) -> frozenset[str]:
        """The router's auxiliary loss of each token."""
        return frozenset({"router"})

    def surrogate(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Step:
        """Reports the loss; J stays."""
        found = {"moe/balance_loss": Mean.of(step.output("router", self), step.counted())}
        return step.replace(stats={**step.stats, **found})

    def penalty(self, step: Step, chosen: Bool[Array, "R T"] | None) -> Float[Array, "R T"]:
        """What is added to the loss of each token."""
        return self.coef * step.output("router", self)


def by_name(terms: tuple[Regulariser, ...]) -> list[tuple[str, Regulariser]]:
    """Terms, each with a name of its own: that of its class, numbered from the second on."""
    named: dict[str, Regulariser] = {}
    for term in terms:
        name, number = type(term).__name__, 2
        while name in named:
            name, number = f"{type(term).__name__}_{number}", number + 1
        named[name] = term
    return list(named.items())


def own_state(state: State, name: str) -> State:
    """The entries of one term, without its name."""
    start = f"{name}/"
    return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}


def initial_states(terms: tuple[Regulariser, ...]) -> State:
    """The state of all terms that keep one, before the first optimizer step."""
    states = ((name, term.init_state()) for name, term in by_name(terms))
    return {f"{name}/{k}": v for name, own in states for k, v in own.items()}


def updated_states(terms: tuple[Regulariser, ...], state: State, stats: dict[str, Metric]) -> State:
    """The state of all terms after an optimizer step with these merged metrics."""
    states = (
        (name, term.update_state(own_state(state, name), stats)) for name, term in by_name(terms)
    )
    return {f"{name}/{k}": v for name, own in states for k, v in own.items()}
