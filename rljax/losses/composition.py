"""Which transforms go together; what does not is refused when an objective is made."""

import warnings
from types import NoneType
from typing import Any

from rljax.errors import InputError
from rljax.losses import coupling
from rljax.losses.advantages import Advantage, uniform
from rljax.losses.base import parts
from rljax.losses.batch_terms import clip_cov, kl_cov
from rljax.losses.corrections import Correction
from rljax.losses.critic import value_loss
from rljax.losses.masks import Mask
from rljax.losses.ratios import Ratio, sequence_ratio
from rljax.losses.regularisers import Regulariser
from rljax.losses.shaping import Shaping
from rljax.losses.trust_regions import TrustRegion, trust_region
from rljax.losses.weights import Weights, sequence_mean

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


def check(objective: Any) -> None:
    """Refuses what does not go together, and warns of what rarely does.

    Args:
      objective: An `Objective`.

    Raises:
      ValueError: See `Objective`.
    """
    _refuse_misplaced(objective)
    _refuse_double_corrections(objective)
    _refuse_covariances_without_advantages(objective)
    _refuse_gates_on_coupled_tokens(objective)
    _warn_of_token_weights(objective)


def _refuse_misplaced(objective: Any) -> None:
    for name, kinds in _KINDS.items():
        value = getattr(objective, name)
        for transform in parts(*value) if isinstance(value, tuple) else parts(value):
            if not isinstance(transform, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                function = f"; L.{name}(fn) makes one of a function" if name == "advantage" else ""
                raise InputError(
                    f"{name} takes what derives from {wanted}, got {transform!r}: "
                    f"put it where it belongs{function}"
                )


def _refuse_double_corrections(objective: Any) -> None:
    for transform in parts(objective.policy):
        against = isinstance(transform, Ratio) and transform.anchor == "rollout"
        if objective.corrections and against:
            raise InputError(
                f"{transform!r} is taken against the rollout policy already, got "
                f"{objective.corrections[0]!r} on top: drop it or use anchor='old'"
            )
    weighing = [c for c in objective.corrections if c.weighs]
    if len(weighing) > 1:
        raise InputError(
            f"{weighing[0]!r} weighs by π_old/μ already, got {weighing[1]!r} on top: keep one of "
            "them"
        )


def _refuse_covariances_without_advantages(objective: Any) -> None:
    for term in objective.regularisers:
        constant = isinstance(parts(objective.advantage)[-1], uniform)
        if isinstance(term, clip_cov | kl_cov) and constant:
            raise InputError(
                f"{term!r} chooses by the covariance with the advantage, got "
                f"{objective.advantage!r}, which is the same for every token: leave it out"
            )


def _refuse_gates_on_coupled_tokens(objective: Any) -> None:
    terms = (*objective.corrections, *objective.masks, *objective.regularisers)
    gating = [t for t in terms if t.gates_tokens]
    policy = parts(objective.policy)
    functions = any(isinstance(t, trust_region) for t in policy)
    closing = any(isinstance(t, TrustRegion) and t.closes for t in policy)
    if not (gating or functions or closing):
        return  # nothing to judge by it
    found = coupling.of_policy(objective.policy)
    if found.couples_tokens and (gating or found.gates_tokens):
        judge = repr(gating[0]) if gating else "a gate"
        raise InputError(
            f"{judge} judges single tokens, {objective.policy!r} whole sequences, so that "
            "rejected tokens would keep a gradient: use sequence_token_ratio or judge sequences"
        )


def _warn_of_token_weights(objective: Any) -> None:
    for ratio in parts(objective.policy):
        whole = isinstance(ratio, sequence_ratio) and ratio.normalize
        if whole and not isinstance(objective.weights, sequence_mean):
            warnings.warn(
                f"{ratio!r} under {objective.weights!r} gives long responses more weight: "
                "sequence_mean() weighs every response once",
                stacklevel=5,
            )
