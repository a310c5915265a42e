"""The field's objectives by name, each a short composition.

Every docstring gives the objective J (maximised, for each token t of response i), where the
defaults come from, and what the caller supplies in the batch. r = π/π_old, μ is the policy that
sampled, ρ = π_old/μ, sg stops the gradient, |y| counts a response's own tokens. The keyword
arguments that most of them share are described in `rljax.losses.keywords.Keywords`.
"""

import math
from inspect import Parameter

from rljax.errors import InputError
from rljax.losses.advantages import (
    batch_whiten,
    gdpo_normalize,
    group_center,
    leave_one_out,
    mean_normalize,
    uniform,
)
from rljax.losses.base import chain
from rljax.losses.corrections import truncated_is
from rljax.losses.critic import value_loss
from rljax.losses.keywords import Keywords, named
from rljax.losses.masks import drop_zero_variance
from rljax.losses.masks import mask_truncated as drop_truncated
from rljax.losses.objective import Objective
from rljax.losses.ratios import sequence_ratio, sequence_token_ratio, token_ratio
from rljax.losses.shaping import kl_in_reward, soft_overlong
from rljax.losses.token_advantages import gae, returns_to_go, teacher_gap
from rljax.losses.trust_regions import (
    cispo_weight,
    clip_mask,
    dppo_tv,
    gmpo_clip,
    off_policy_mask,
    policy_gradient,
    sapo_gate,
    vespo_weight,
)
from rljax.losses.weights import constant, prompt_mean, sequence_mean, token_mean


def supervised() -> Objective:
    """Maximum likelihood of the masked tokens, for a supervised warm-up.

    J = log π_t, averaged over tokens. Supply tokens and mask; `rewards` and `group`
    are not used (zeros will do).
    """
    return Objective(uniform(1.0), policy_gradient(), token_mean())


@named(0.2, 0.2, beta=0.04)
def grpo(k: Keywords) -> Objective:
    """Group relative policy optimization (DeepSeekMath, arXiv:2402.03300).

    J = min(r_t·A, clip(r_t)·A) - β·k3(π, ref), A = (R - mean)/(std + eps) of the prompt's
    responses; every response weighs the same: 1/(B·|y|). Defaults: ε 0.2, β 0.04.
    Supply old_logp, and ref_logp unless beta is 0; at least 2 responses a prompt.
    """
    return k.objective(k.normalize, chain(token_ratio(), k.window), sequence_mean())


@named(0.2, 0.2, eps=False)
def dr_grpo(k: Keywords, length: float) -> Objective:
    """GRPO done right: without its length and difficulty biases (arXiv:2503.20783).

    J = min(r_t·A, clip(r_t)·A), A = R - mean of the prompt's responses; every token weighs the
    same, 1/(B·L) with the constant L = length, the generation budget.
    Supply old_logp; at least 2 responses a prompt.
    """
    return k.objective(group_center(), chain(token_ratio(), k.window), constant(length))


@named(0.2, 0.28)
def dapo(
    k: Keywords,
    overlong_max: int | None = None,
    overlong_cache: int | None = None,
    mask_truncated: bool = True,
) -> Objective:
    """Decoupled clip and dynamic sampling (DAPO, arXiv:2503.14476).

    J = min(r_t·A, clip(r_t, 0.8, 1.28)·A), GRPO's A after the soft overlong penalty, a mean over
    the batch's tokens. Prompts whose raw scores are all equal are dropped, and truncated responses
    are masked from the loss while their rewards still enter their group's statistics. The paper's
    penalty is 20480/4096; None means none here.
    Supply old_logp, and truncated and completion_length where there is a limit.
    """
    if (overlong_max is None) != (overlong_cache is None):
        raise InputError(
            f"overlong_max and overlong_cache go together, got {overlong_max} and "
            f"{overlong_cache}: give both or neither"
        )
    penalty = () if overlong_max is None else (soft_overlong(overlong_max, overlong_cache or 0),)
    masks = (*((drop_truncated(),) if mask_truncated else ()), drop_zero_variance())
    policy = chain(token_ratio(), k.window)
    return k.objective(k.normalize, policy, token_mean(), shaping=penalty, masks=masks)


@named(3e-4, 4e-4)
def gspo(k: Keywords) -> Objective:
    """Group sequence policy optimization (arXiv:2507.18071).

    J = min(s·A, clip(s)·A) with one ratio for the response, s = exp(mean_t log r_t), and GRPO's A;
    every response weighs the same. The published window, 3e-4/4e-4, suits large models and long
    responses; small ones move further a step and need a wider one.
    Supply old_logp; at least 2 responses a prompt.
    """
    return k.objective(k.normalize, chain(sequence_ratio(), k.window), sequence_mean())


@named(3e-4, 4e-4)
def gspo_token(k: Keywords) -> Objective:
    """GSPO with a gradient of each token's own (arXiv:2507.18071, section 4.3).

    J = min(s_t·A_t, clip(s_t)·A_t), s_t = sg(s)·π_t/sg(π_t): the value of the response's ratio.
    Its gradient equals GSPO's where A is the same all along a response.
    Supply old_logp; at least 2 responses a prompt.
    """
    return k.objective(k.normalize, chain(sequence_token_ratio(), k.window), sequence_mean())


@named()
def cispo(k: Keywords, cap: float = 5.0) -> Objective:
    """Clipped importance-sampling weights (CISPO, MiniMax-M1, arXiv:2506.13585).

    J = sg(min(r_t, cap))·A·log π_t, a mean over the batch's tokens: a large ratio bounds a token's
    weight and never drops it. cap is absolute, 5.0 and not 1 + ε; there is no lower bound.
    Supply old_logp; at least 2 responses a prompt.
    """
    return k.objective(k.normalize, chain(token_ratio(), cispo_weight(cap)), token_mean())


@named(0.4, 0.4, dual=False)
def gmpo(k: Keywords) -> Objective:
    """Geometric-mean policy optimization (arXiv:2507.20673).

    J = A·exp(mean_t of log r_t, each held below clip_high where A > 0 and above -clip_low where
    A < 0); every response weighs the same. The window is in log space, ±0.4. GSPO, which it
    resembles, clips after the mean.
    Supply old_logp; at least 2 responses a prompt.
    """
    policy = chain(token_ratio(), gmpo_clip(k.clip_low, k.clip_high))
    return k.objective(k.normalize, policy, sequence_mean())


@named()
def sapo(k: Keywords, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Objective:
    """Soft adaptive policy optimization (arXiv:2511.20347).

    J = (4/τ)·σ(τ(r_t - 1))·A, τ = tau_pos where A > 0 and tau_neg elsewhere; every response weighs
    the same. The gate fades where PPO's clip cuts. Defaults: 1 and 1.05.
    Supply old_logp; at least 2 responses a prompt.
    """
    policy = chain(token_ratio(), sapo_gate(tau_pos, tau_neg))
    return k.objective(k.normalize, policy, sequence_mean())


@named(0.2, 0.2, eps=False)
def rloo(k: Keywords) -> Objective:
    """REINFORCE leave-one-out (arXiv:2402.14740).

    J = min(s·A, clip(s)·A) with s = Π_t r_t, the ratio of the whole response, and A = R - mean of
    the prompt's other responses; every response weighs once, 1/B. Default ε 0.2.
    Supply old_logp; at least 2 responses a prompt.
    """
    policy = chain(sequence_ratio(normalize=False), k.window)
    return k.objective(leave_one_out(), policy, sequence_mean())


@named(0.2, 0.2, eps=False, kl_estimator="k1", kl_unbiased=Parameter.empty)
def reinforce_plus_plus(k: Keywords, *, gamma: float = 1.0) -> Objective:
    """REINFORCE++ (arXiv:2501.03262).

    J = min(r_t·A_t, clip(r_t)·A_t), A_t the returns to go of the token rewards, -β·k1 to the
    reference each and R at the last, whitened over the rollout batch's tokens; a mean over tokens.
    Supply old_logp, and ref_logp unless beta is 0. One response a prompt is enough.
    """
    penalty = (kl_in_reward(k.beta, k.kl_estimator),) if k.beta else ()
    advantage = chain(returns_to_go(gamma), batch_whiten(per="token"))
    return Objective(advantage, chain(token_ratio(), k.window), token_mean(), shaping=penalty)


@named(0.2, 0.2, eps=False, kl_estimator="k2")
def reinforce_plus_plus_baseline(k: Keywords) -> Objective:
    """REINFORCE++ with a group baseline (arXiv:2501.03262).

    J = min(r_t·A, clip(r_t)·A) - β·k2(π, ref), A = R - mean of the prompt's responses, whitened
    over the rollout batch's tokens; a mean over tokens.
    Supply old_logp, and ref_logp unless beta is 0; at least 2 responses a prompt.
    """
    advantage = chain(group_center(), batch_whiten(per="token"))
    return k.objective(advantage, chain(token_ratio(), k.window), token_mean())


@named(0.2, 0.27, dual=False, eps=False)
def minirl(k: Keywords, *, cap: float = 5.0) -> Objective:
    """MiniRL, the first-order approximation made plain (arXiv:2512.01374).

    J = M·sg(min(π_t/μ_t, cap))·A·log π_t, A = R - mean of the prompt's responses; M drops tokens
    whose π_t/π_old is past the window in the direction of A. A sum over tokens, divided by the
    number of responses. Defaults: window 0.2/0.27, cap 5.
    Supply old_logp and rollout_logp; at least 2 responses a prompt.
    """
    gate = clip_mask(k.clip_low, k.clip_high)
    policy = chain(token_ratio("rollout"), cispo_weight(cap), gate)
    return k.objective(group_center(), policy, constant(1))


@named(eps=False)
def scalerl(k: Keywords, cap: float = 5.0) -> Objective:
    """The loss of the ScaleRL recipe (arXiv:2510.13786).

    J = sg(min(π_t/μ_t, cap))·A·log π_t, A = R - mean of the prompt's responses, divided by the
    standard deviation over the batch, after prompts without variance are dropped; every prompt
    weighs the same. The recipe's rest is the trainer's: prompts passed at 0.9 or more are not
    drawn again, and logits are float32.
    Supply rollout_logp; at least 2 responses a prompt.
    """
    advantage = chain(group_center(), batch_whiten(per="response", center=False))
    policy = chain(token_ratio("rollout"), cispo_weight(cap))
    return k.objective(advantage, policy, prompt_mean(), masks=drop_zero_variance())


@named()
def dppo(k: Keywords, delta: float = 0.15, cap: float = 20.0) -> Objective:
    """Divergence proximal policy optimization (arXiv:2602.04879).

    J = sg(min(π_t/μ_t, cap))·A·log π_t, a token dropped where A > 0 and π_t - μ_t > δ, or A < 0
    and π_t - μ_t < -δ: differences of probabilities, where a ratio is too strict with rare tokens
    and too lax with common ones. A mean over tokens. Defaults: δ 0.15, cap 20.
    Supply rollout_logp; at least 2 responses a prompt.
    """
    policy = chain(token_ratio("rollout"), cispo_weight(cap), dppo_tv(delta, delta))
    return k.objective(k.normalize, policy, token_mean())


@named(0.2, 0.2)
def decoupled_ppo(k: Keywords, *, cap: float = math.inf) -> Objective:
    """PPO with the proximal policy set apart from the behaviour policy (arXiv:2110.00641).

    J = sg(π_old/μ)·min(r_t·A, clip(r_t)·A), r = π/π_old: nothing but `ppo_clip` with an importance
    correction, used for stale rollouts (AReaL, arXiv:2505.24298); cap bounds the correction. A mean
    over tokens.
    Supply old_logp (of the proximal policy) and rollout_logp; at least 2 responses a prompt.
    """
    policy = chain(token_ratio(), k.window)
    return k.objective(k.normalize, policy, token_mean(), corrections=truncated_is(cap))


@named(0.2, 0.2, kl_unbiased=True)
def deepseek_v32(k: Keywords, *, delta: float = 0.5) -> Objective:
    """GRPO as DeepSeek-V3.2 stabilises it (arXiv:2512.02556, section 3.1).

    J = M·min(r_t·A, clip(r_t)·A) - β·r_t·k3(π, ref): the live ratio, with its gradient, makes the
    KL's gradient unbiased off-policy; M drops responses with A < 0 and mean_t(log μ - log π) > δ.
    Every response weighs the same. The paper gives no δ. Routing and sampling masks are kept by
    the trainer.
    Supply old_logp and rollout_logp, and ref_logp unless beta is 0; at least 2 responses a prompt.
    """
    policy = chain(token_ratio(), k.window, off_policy_mask(delta))
    return k.objective(k.normalize, policy, sequence_mean())


@named(0.2, 0.2, eps=False)
def maxrl(k: Keywords) -> Objective:
    """Maximum-likelihood reinforcement learning (MaxRL, arXiv:2602.02710).

    J = min(r_t·A, clip(r_t)·A), A = (R - mean)/mean of the prompt's responses, 0 where the mean is
    0: hard prompts weigh more, as under log-likelihood of success. A mean over tokens.
    Supply old_logp and rewards of at least 0; at least 2 responses a prompt.
    """
    return k.objective(mean_normalize(), chain(token_ratio(), k.window), token_mean())


@named(0.2, 0.2)
def gdpo(k: Keywords, reward_weights: tuple[float, ...] | None = None) -> Objective:
    """Group reward-decoupled normalization (GDPO, arXiv:2601.05242).

    J = min(r_t·A, clip(r_t)·A), A the component rewards, each normalised in its group, summed with
    reward_weights (None: all 1) and whitened over responses, so that none drowns the others; every
    response weighs the same.
    Supply old_logp and score_components; at least 2 responses a prompt.
    """
    advantage = gdpo_normalize(reward_weights, k.advantage_eps)
    return k.objective(advantage, chain(token_ratio(), k.window), sequence_mean())


@named()
def vespo(
    k: Keywords, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0
) -> Objective:
    """Variational sequence-level soft policy optimization (VESPO, arXiv:2602.10693).

    J = sg(W^k·exp(λ(1 - W)))·A·log π_t, W = Π_t π_t/μ_t, so that W holds the correction for the
    rollout policy too; (k, λ) = (2, 3) where A ≥ 0, else (3, 2). A mean over tokens.
    Supply rollout_logp; at least 2 responses a prompt.
    """
    ratio = sequence_ratio("rollout", normalize=False)
    policy = chain(ratio, vespo_weight(k_pos, lam_pos, k_neg, lam_neg))
    return k.objective(k.normalize, policy, token_mean())


def distillation() -> Objective:
    """On-policy distillation: reverse KL to a teacher on the policy's own samples.

    J = r_t·A_t, A_t = sg(log ν_t - log π_t), ν the teacher: its expected gradient is that of
    -KL(π‖ν), token by token (arXiv:2306.13649). A mean over tokens; rewards are not used.
    Supply old_logp and teacher_logp.
    """
    return Objective(teacher_gap(), chain(token_ratio(), policy_gradient()), token_mean())


@named(0.2, 0.2, eps=False)
def ppo(
    k: Keywords, *, gamma: float = 1.0, lam: float = 0.95, value_clip: float | None = 0.2
) -> Objective:
    """Proximal policy optimization with a critic (arXiv:1707.06347).

    J = min(r_t·A_t, clip(r_t)·A_t), A_t from generalised advantage estimation, whitened over the
    rollout batch's tokens; a mean over tokens. Critic: ½·max of the squared errors of V and of V
    clipped around its old value, against the returns A + V before whitening. Defaults: ε 0.2, γ 1,
    λ 0.95. `kl_in_reward` puts the KL into the rewards instead.
    Supply old_logp, values (at the start of the step) and the live values in `PolicyOutputs`. One
    response a prompt is enough.
    """
    advantage = chain(gae(gamma, lam), batch_whiten(per="token"))
    policy = chain(token_ratio(), k.window)
    return k.objective(advantage, policy, token_mean(), critic=value_loss(value_clip))


# fmt: off
ALL = (
    ppo, grpo, dr_grpo, dapo, gspo, gspo_token, cispo, gmpo, sapo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, minirl, scalerl, dppo, decoupled_ppo, deepseek_v32, maxrl, gdpo,
    vespo, distillation, supervised,
)
# fmt: on
"""Every named objective, in the order of the documentation's table."""
