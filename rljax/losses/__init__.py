"""Objectives of reinforcement learning for language models, as composable transforms.

An `Objective` is put together from small parts: where advantages come from, which ratio, which
trust region, how tokens are weighed. The named ones (`grpo`, `gspo`, ...) are such compositions;
a new one is a few lines:

    from rljax import losses as L

    mine = L.Objective(
        advantage=L.group_normalize(),
        policy=L.chain(L.sequence_ratio(), L.ppo_clip(low=3e-4, high=4e-4)),
        weights=L.sequence_mean(),
    )
    ready, stats = mine.prepare(batch)      # rljax.batch.Batch -> Rows
    loss, stats = mine.loss(logp, ready)    # logp: f32 [B, T]; jit, grad and vmap as usual

`L.trust_region(fn)` and `L.advantage(fn)` make parts of plain functions; other parts are frozen
dataclasses that derive from `Ratio`, `Mask`, `Regulariser`, ... and have a `__call__`; see
`notebooks/losses.ipynb`.
"""

from rljax.losses.additions import SETTINGS, additional
from rljax.losses.advantages import (
    Advantage,
    advantage,
    batch_whiten,
    gdpo_normalize,
    group_center,
    group_normalize,
    leave_one_out,
    mean_normalize,
    uniform,
)
from rljax.losses.base import PolicyOutputs, Step, Transform, chain
from rljax.losses.batch_terms import clip_cov, kl_cov, live_top_entropy
from rljax.losses.corrections import (
    Correction,
    geometric_mask_is,
    icepop,
    sequence_mask_is,
    truncated_is,
)
from rljax.losses.critic import value_loss
from rljax.losses.estimators import kl_estimate
from rljax.losses.groups import equal_scores
from rljax.losses.groups import statistics as group_statistics
from rljax.losses.masks import Mask, drop_zero_variance, mask_truncated, top_entropy
from rljax.losses.metrics import Histogram, Max, Mean, Min, Moments, all_reduce, finish, merge
from rljax.losses.named import (
    cispo,
    dapo,
    decoupled_ppo,
    deepseek_v32,
    distillation,
    dppo,
    dr_grpo,
    gdpo,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    maxrl,
    minirl,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    sapo,
    scalerl,
    supervised,
    vespo,
)
from rljax.losses.objective import Objective
from rljax.losses.ratios import Ratio, sequence_ratio, sequence_token_ratio, token_ratio
from rljax.losses.regularisers import (
    Regulariser,
    adaptive_entropy,
    entropy_bonus,
    kl,
    router_balance,
)
from rljax.losses.reports import mismatch, staleness
from rljax.losses.sequences import SequenceLayout
from rljax.losses.shaping import Shaping, kl_in_reward, soft_overlong
from rljax.losses.token_advantages import gae, returns_to_go, teacher_gap
from rljax.losses.trust_regions import (
    TrustRegion,
    cispo_weight,
    clip_mask,
    dppo_tv,
    gmpo_clip,
    off_policy_mask,
    policy_gradient,
    ppo_clip,
    sapo_gate,
    trust_region,
    vespo_weight,
)
from rljax.losses.views import (
    describe,
    settings_matrix,
    settings_table,
    table,
    token_gradient,
)
from rljax.losses.weights import (
    Weights,
    constant,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
)

__all__ = [
    "SETTINGS",
    "Advantage",
    "Correction",
    "Histogram",
    "Mask",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "Objective",
    "PolicyOutputs",
    "Ratio",
    "Regulariser",
    "SequenceLayout",
    "Shaping",
    "Step",
    "Transform",
    "TrustRegion",
    "Weights",
    "adaptive_entropy",
    "additional",
    "advantage",
    "all_reduce",
    "batch_whiten",
    "chain",
    "cispo",
    "cispo_weight",
    "clip_cov",
    "clip_mask",
    "constant",
    "dapo",
    "decoupled_ppo",
    "deepseek_v32",
    "describe",
    "distillation",
    "dppo",
    "dppo_tv",
    "dr_grpo",
    "drop_zero_variance",
    "entropy_bonus",
    "equal_scores",
    "finish",
    "gae",
    "gdpo",
    "gdpo_normalize",
    "geometric_mask_is",
    "gmpo",
    "gmpo_clip",
    "group_center",
    "group_normalize",
    "group_statistics",
    "grpo",
    "gspo",
    "gspo_token",
    "icepop",
    "kl",
    "kl_cov",
    "kl_estimate",
    "kl_in_reward",
    "leave_one_out",
    "live_top_entropy",
    "mask_truncated",
    "maxrl",
    "mean_normalize",
    "merge",
    "minirl",
    "mismatch",
    "off_policy_mask",
    "policy_gradient",
    "ppo",
    "ppo_clip",
    "prompt_mean",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "returns_to_go",
    "rloo",
    "router_balance",
    "sapo",
    "sapo_gate",
    "scalerl",
    "sequence_mask_is",
    "sequence_mean",
    "sequence_ratio",
    "sequence_token_ratio",
    "settings_matrix",
    "settings_table",
    "soft_overlong",
    "staleness",
    "supervised",
    "table",
    "teacher_gap",
    "token_gradient",
    "token_mean",
    "token_ratio",
    "token_sum",
    "top_entropy",
    "truncated_is",
    "trust_region",
    "uniform",
    "value_loss",
    "vespo",
    "vespo_weight",
]
