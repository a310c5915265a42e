"""Metrics of a rollout batch, of the mismatch between sampler and trainer, and of a loss."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.batch import Batch, Rows
from rljax.losses import groups
from rljax.losses.base import Draft, Step, missing, safe_exp
from rljax.losses.estimators import kl_estimate
from rljax.losses.metrics import Max, Mean, Metrics, Min, Moments

CORRECT = 0.5
"""A score above this counts as correct: it parts 0 from 1 and -1 from 1."""


def of_draft(draft: Draft) -> Metrics:
    """Rewards, groups and lengths of a rollout batch, before shaping and masking."""
    valid = draft.valid
    correct = valid & (draft.scores > CORRECT)
    stats = groups.statistics(draft.scores, valid, draft.group)
    once = valid / jnp.maximum(stats.count, 1.0)  # every group counts one
    right = groups.sums(correct.astype(jnp.float32), draft.group)
    length = draft.length.astype(jnp.float32)
    everyone = draft.inside.any(axis=1)
    return {
        "reward/mean": Mean.of(draft.rewards, valid),
        "reward/std": Moments.of(draft.rewards, valid, report="std"),
        "score/mean": Mean.of(draft.scores, valid),
        "group/frac_zero_std": Mean.of(stats.equal, once),
        "group/frac_all_correct": Mean.of(right == stats.count, once),
        "group/frac_all_wrong": Mean.of(right == 0, once),
        "completion/length_mean": Mean.of(length, everyone),
        "completion/length_max": Max.of(length, everyone),
        "completion/length_min": Min.of(length, everyone),
        "completion/truncated_frac": Mean.of(draft.truncated, everyone),
        "completion/length_correct": Mean.of(length, correct),
        "completion/length_incorrect": Mean.of(length, valid & ~correct),
    }


def mismatch(batch: Batch | Rows) -> Metrics:
    """How far sampler and trainer disagree about the sampled tokens.

    Args:
      batch: With `rollout_logp` (μ) and `old_logp` (π_old).

    Returns:
      Over the policy's own tokens: `mismatch/kl` (mean of log μ - log π_old, which estimates
      KL(μ‖π_old)), `mismatch/k3` (the same without negative terms), `mismatch/logp_diff_mean`
      and `mismatch/logp_diff_max` (absolute differences, nats), `mismatch/pearson` (of the
      probabilities) and `mismatch/ess` (effective sample size of π_old/μ, as a fraction).

    Raises:
      ValueError: One of the two is missing.
    """
    if batch.rollout_logp is None or batch.old_logp is None:
        name = "old_logp" if batch.rollout_logp is not None else "rollout_logp"
        raise missing(name, "mismatch", type(batch).__name__)
    mask = jnp.asarray(batch.mask).astype(bool)
    if isinstance(batch, Batch) and batch.valid is not None:
        mask = mask & jnp.asarray(batch.valid).astype(bool)[:, None]
    rollout = jnp.where(mask, batch.rollout_logp, 0.0).astype(jnp.float32)
    old = jnp.where(mask, batch.old_logp, 0.0).astype(jnp.float32)
    distance = jnp.abs(rollout - old)
    return {
        "mismatch/kl": Mean.of(rollout - old, mask),
        "mismatch/k3": Mean.of(kl_estimate(rollout, old), mask),
        "mismatch/logp_diff_mean": Mean.of(distance, mask),
        "mismatch/logp_diff_max": Max.of(distance, mask),
        "mismatch/pearson": Moments.of(jnp.exp(old), mask, jnp.exp(rollout), report="pearson"),
        "mismatch/ess": Moments.of(safe_exp(old - rollout), mask, report="ess"),
    }


def staleness(batch: Batch, version: int) -> Metrics:
    """How many policy versions behind its tokens were sampled.

    Args:
      batch: With `version`.
      version: The version about to be trained.

    Returns:
      `staleness/mean` and `staleness/max` over the policy's own tokens.

    Raises:
      ValueError: `version` is missing.
    """
    if batch.version is None:
        raise missing("version", "staleness", "Batch")
    behind = (version - jnp.asarray(batch.version)).astype(jnp.float32)
    return {
        "staleness/mean": Mean.of(behind, jnp.asarray(batch.mask)),
        "staleness/max": Max.of(behind, jnp.asarray(batch.mask)),
    }


def of_step(step: Step, loss: Float[Array, ""]) -> Metrics:
    """Ratio, clipping, divergence and entropy of a loss."""
    stop = jax.lax.stop_gradient
    step = step.replace(
        logp=stop(step.logp), log_ratio=stop(step.log_ratio), outputs=stop(step.outputs)
    )
    loss = stop(loss)
    rows, kept = step.rows, step.counted()
    counter = step.counter(step.counts)
    logp = step.logp
    stats: Metrics = {
        "policy/loss": Mean(loss, rows.token_weights.sum()),
        "policy/mean_prob": Mean.of(jnp.exp(logp), kept),
    }
    if step.log_ratio is not None:
        ratio = step.ratio
        stats["policy/ratio_mean"] = Mean.of(ratio, counter)
        stats["policy/ratio_max"] = Max.of(ratio, kept)
        never = jnp.zeros((1, 1), bool)
        low = never if step.clipped_low is None else step.clipped_low
        high = never if step.clipped_high is None else step.clipped_high
        stats["policy/clip_frac_low"] = Mean.of(low, counter)
        stats["policy/clip_frac_high"] = Mean.of(high, counter)
        stats["policy/clipped_high_prob"] = Mean.of(jnp.exp(logp), kept & high)
    if rows.old_logp is not None:
        stats["policy/kl_old"] = Mean.of(kl_estimate(step.anchor("old", "kl_old"), logp), kept)
    if rows.ref_logp is not None:
        stats["policy/kl_ref"] = Mean.of(kl_estimate(logp, step.field("ref_logp", "kl")), kept)
    if rows.teacher_logp is not None:
        gap = logp - step.field("teacher_logp", "kl_teacher")
        stats["policy/kl_teacher"] = Mean.of(gap, kept)
    if step.outputs.entropy is not None:
        stats["policy/entropy"] = Mean.of(step.output("entropy", "entropy"), kept)
    return stats
