"""Terms added to an objective that exists already, each put in its place and in its right form.

Where the policy half gives a response one ratio, terms that judge single tokens are taken in the
form that judges responses. `kl_cov` takes the place of what keeps the policy close otherwise.
"""

import dataclasses
from typing import Any

from rljax.errors import InputError
from rljax.losses.base import Chain, Transform, chain, parts
from rljax.losses.batch_terms import clip_cov, kl_cov
from rljax.losses.corrections import Correction, truncated_is
from rljax.losses.masks import Mask, top_entropy
from rljax.losses.regularisers import (
    Regulariser,
    adaptive_entropy,
    entropy_bonus,
    router_balance,
)
from rljax.losses.shaping import Shaping
from rljax.losses.trust_regions import (
    TrustRegion,
    clip_mask,
    dppo_tv,
    gmpo_clip,
    policy_gradient,
    ppo_clip,
    sapo_gate,
)

SETTINGS = (
    "truncated_is",
    "top_entropy",
    "entropy_coef",
    "entropy_target",
    "router_aux_loss_coef",
    "clip_cov",
    "kl_cov",
)
"""The settings of `additional`, which any objective may have."""


_PLACES: dict[type, str] = {
    Shaping: "shaping",
    Mask: "masks",
    Correction: "corrections",
    Regulariser: "regularisers",
}


def additional(
    truncated_is: float | None = None,
    top_entropy: float | None = None,
    entropy_coef: float | None = None,
    entropy_target: float | None = None,
    router_aux_loss_coef: float | None = None,
    clip_cov: float | None = None,
    kl_cov: float | None = None,
) -> tuple[Transform, ...]:
    """The terms that the settings of a command line stand for; give them to `Objective.adding`.

    Args:
      truncated_is: Cap of the importance weight π_old/μ.
      top_entropy: Share of the tokens that trains, by entropy.
      entropy_coef: Coefficient of an entropy bonus, or the first one with an entropy target.
      entropy_target: Entropy to hold, nats.
      router_aux_loss_coef: Coefficient of the load-balancing loss of the experts.
      clip_cov: Share of the tokens whose surrogate Clip-Cov takes away.
      kl_cov: Coefficient of KL-Cov.

    Returns:
      One transform for each, None leaves out.
    """
    return tuple(_made(dict(locals())))


def _made(given: dict[str, float | None]) -> list[Transform]:
    terms: list[Transform] = []
    if (cap := given["truncated_is"]) is not None:
        terms.append(truncated_is(cap))
    if (share := given["top_entropy"]) is not None:
        terms.append(top_entropy(share))
    coef = given["entropy_coef"]
    if (target := given["entropy_target"]) is not None:
        adaptive = adaptive_entropy(target)
        terms.append(adaptive if coef is None else dataclasses.replace(adaptive, initial=coef))
    elif coef is not None:
        terms.append(entropy_bonus(coef))
    if (balance := given["router_aux_loss_coef"]) is not None:
        terms.append(router_balance(balance))
    if (fraction := given["clip_cov"]) is not None:
        terms.append(clip_cov(fraction))
    if (strength := given["kl_cov"]) is not None:
        terms.append(kl_cov(strength))
    return terms


def without_window(policy: Any) -> Chain:
    """The policy half without what limits the ratio, for KL-Cov: plain policy gradients.

    Clips, soft gates and gates by distance go; a cap on an importance weight stays, since it
    bounds the variance and takes no gradient away.

    Args:
      policy: Ratio and trust region.

    Returns:
      The chain.
    """
    changed: list[Any] = []
    for part in parts(policy):
        if isinstance(part, ppo_clip | sapo_gate):
            changed.append(policy_gradient())
        elif isinstance(part, gmpo_clip):
            changed.append(gmpo_clip(float("inf"), float("inf")))
        elif not isinstance(part, clip_mask | dppo_tv):
            changed.append(part)
    return chain(*changed)


def placed(objective: Any, terms: tuple[Any, ...]) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Where further terms belong in an objective, and in which form (see `Objective.adding`).

    Args:
      objective: The `Objective` to add to.
      terms: Single transforms.

    Returns:
      The policy half, and the terms of each kind, old and new.

    Raises:
      ValueError: A term is of a kind that an objective has once.
    """
    policy = objective.policy
    judging = any(t.gates_tokens or isinstance(t, kl_cov) for t in terms)
    if judging and objective.couples_tokens:
        terms = tuple(t.for_sequences() or t for t in terms)
    if any(isinstance(t, kl_cov) for t in terms):
        policy = without_window(policy)
    added = {name: getattr(objective, name) for name in _PLACES.values()}
    for term in terms:
        name = next((name for kind, name in _PLACES.items() if isinstance(term, kind)), None)
        if name is not None:
            added[name] = (*added[name], term)
        elif isinstance(term, TrustRegion):
            policy = chain(policy, term)
        else:
            raise InputError(
                f"adding takes shaping, masks, corrections, regularisers and gates, got {term!r}: "
                "give it to Objective in its place"
            )
    return policy, added
