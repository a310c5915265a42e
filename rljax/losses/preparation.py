"""The records of the two halves: batch to draft to rows in `prepare`, rows to step in `loss`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.losses import groups, reports
from rljax.losses.base import Draft, PolicyOutputs, Step, parts
from rljax.losses.metrics import Mean
from rljax.losses.sequences import SequenceLayout


def draft_of(batch: Batch) -> Draft:
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


def finite(draft: Draft) -> Draft:
    """Takes advantages that overflowed float32 as 0, and reports their responses."""
    bad = ~jnp.isfinite(draft.advantages)
    advantages = jnp.where(bad, 0.0, draft.advantages)
    per_response = bad if bad.ndim == 1 else (bad & draft.mask).any(axis=1)
    found = {"reward/overflow_frac": Mean.of(per_response, draft.valid)}
    return draft.replace(advantages=advantages, stats={**draft.stats, **found})


def remark_on_overflow(values: dict[str, float]) -> str | None:
    """One line where advantages overflowed, by the finished metrics; else None."""
    share = values.get("reward/overflow_frac", 0.0)
    if share <= 0:
        return None
    return (
        f"rewards are so large that advantages overflow float32: {share:.1%} of the responses "
        "train on nothing; scale the rewards down"
    )


def rows_of(draft: Draft) -> Rows:
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


def step_of(outputs: PolicyOutputs | Float[Array, "R T"], rows: Rows, advantage: Any) -> Step:
    """What `loss` works on: live outputs and rows, clean, with the advantages of the live policy.

    Args:
      outputs: The live policy's outputs on the rows, or its log-probabilities alone.
      rows: The rows.
      advantage: The objective's.

    Returns:
      The step, before the policy half.

    Raises:
      ValueError: Shapes disagree.
    """
    if not isinstance(outputs, PolicyOutputs):
        outputs = PolicyOutputs(outputs)
    rows.check()
    shape = jnp.shape(outputs.logp)
    if shape != jnp.shape(rows.mask):
        raise InputError(
            f"logp must have the rows' shape {jnp.shape(rows.mask)}, got {shape}: "
            "give one log-probability for each token of the same rows"
        )
    step = Step(
        rows=rows,
        layout=SequenceLayout.of(rows),
        outputs=outputs,
        logp=jnp.where(rows.mask, outputs.logp, 0.0).astype(jnp.float32),
        advantages=jax.lax.stop_gradient(jnp.where(rows.mask, rows.advantages, 0.0)),
        state={},
    )
    for transform in parts(advantage):
        step = transform.live(step)
    return step
