"""The field's objectives by name, each a short composition.

Every docstring gives the objective J (maximised, for each token t of response i), where the
defaults come from, and what the caller supplies in the batch. r = π/π_old, μ is the policy that
sampled, ρ = π_old/μ, sg stops the gradient, |y| counts a response's own tokens.
"""

from rljax.losses.advantages import (
    group_center,
    group_normalize,
    uniform,
)
from rljax.losses.base import chain
from rljax.losses.estimators import Estimator
from rljax.losses.masks import drop_zero_variance
from rljax.losses.masks import mask_truncated as drop_truncated
from rljax.losses.objective import Objective
from rljax.losses.ratios import sequence_ratio, token_ratio
from rljax.losses.regularisers import kl
from rljax.losses.shaping import soft_overlong
from rljax.losses.trust_regions import policy_gradient, ppo_clip
from rljax.losses.weights import constant, sequence_mean, token_mean


def supervised() -> Objective:
    """Maximum likelihood of the masked tokens, for a supervised warm-up.

    J = log π_t, averaged over tokens. Supply nothing but tokens and mask; `rewards` and `group`
    are not looked at (zeros will do).
    """
    return Objective(uniform(1.0), policy_gradient(), token_mean())


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.04,
    kl_estimator: Estimator = "k3",
    kl_unbiased: bool = False,
    advantage_eps: float = 1e-6,
) -> Objective:
    """Group relative policy optimization (DeepSeekMath, arXiv:2402.03300).

    J = min(r_t·A, clip(r_t)·A) - β·k3(π, ref), A = (R - mean)/(std + eps) of the prompt's
    responses; every response weighs the same: 1/(B·|y|). Defaults: ε 0.2, β 0.04.
    Supply old_logp, and ref_logp unless beta is 0; at least 2 responses a prompt.
    """
    return Objective(
        advantage=group_normalize(advantage_eps),
        policy=chain(token_ratio(), ppo_clip(clip_low, clip_high, dual_clip)),
        weights=sequence_mean(),
        regularisers=_kl(beta, kl_estimator, kl_unbiased),
    )


def dr_grpo(
    length: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: Estimator = "k3",
    kl_unbiased: bool = False,
) -> Objective:
    """GRPO done right: without its length and difficulty biases (arXiv:2503.20783).

    J = min(r_t·A, clip(r_t)·A), A = R - mean of the prompt's responses; every token weighs the
    same, 1/(B·L) with the constant L = length, the generation budget.
    Supply old_logp; at least 2 responses a prompt.
    """
    return Objective(
        advantage=group_center(),
        policy=chain(token_ratio(), ppo_clip(clip_low, clip_high, dual_clip)),
        weights=constant(length),
        regularisers=_kl(beta, kl_estimator, kl_unbiased),
    )


def dapo(
    overlong_max: int | None = None,
    overlong_cache: int | None = None,
    mask_truncated: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: Estimator = "k3",
    kl_unbiased: bool = False,
    advantage_eps: float = 1e-6,
) -> Objective:
    """Decoupled clip and dynamic sampling (DAPO, arXiv:2503.14476).

    J = min(r_t·A, clip(r_t, 0.8, 1.28)·A), GRPO's A after the soft overlong penalty, a mean over
    the batch's tokens. Prompts whose raw scores are all equal are dropped, and truncated responses
    are masked from the loss while their rewards still enter their group's statistics. The paper's
    penalty is 20480/4096; None means none here.
    Supply old_logp, and truncated and completion_length where there is a limit.
    """
    if (overlong_max is None) != (overlong_cache is None):
        raise ValueError(
            f"overlong_max and overlong_cache go together, got {overlong_max} and "
            f"{overlong_cache}: give both or neither"
        )
    penalty = () if overlong_max is None else (soft_overlong(overlong_max, overlong_cache or 0),)
    return Objective(
        advantage=group_normalize(advantage_eps),
        policy=chain(token_ratio(), ppo_clip(clip_low, clip_high, dual_clip)),
        weights=token_mean(),
        shaping=penalty,
        masks=(*((drop_truncated(),) if mask_truncated else ()), drop_zero_variance()),
        regularisers=_kl(beta, kl_estimator, kl_unbiased),
    )


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: Estimator = "k3",
    kl_unbiased: bool = False,
    advantage_eps: float = 1e-6,
) -> Objective:
    """Group sequence policy optimization (arXiv:2507.18071).

    J = min(s·A, clip(s)·A) with one ratio for the response, s = exp(mean_t log r_t), and GRPO's A;
    every response weighs the same. The published window, 3e-4/4e-4, suits large models and long
    responses; small ones move further a step and need a wider one.
    Supply old_logp; at least 2 responses a prompt.
    """
    return Objective(
        advantage=group_normalize(advantage_eps),
        policy=chain(sequence_ratio(), ppo_clip(clip_low, clip_high, dual_clip)),
        weights=sequence_mean(),
        regularisers=_kl(beta, kl_estimator, kl_unbiased),
    )


def _kl(beta: float, estimator: Estimator, unbiased: bool) -> tuple[kl, ...]:
    """The KL penalty in the loss; none at beta 0, so that no reference is asked for."""
    return (kl(beta, estimator, unbiased),) if beta else ()
