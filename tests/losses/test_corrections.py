"""Corrections for the rollout policy: c by hand, gradients stopped, denominators kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

OLD = np.array([[-1.0, -1.0, -1.0, 7.0], [-1.0, -1.0, 7.0, 7.0]], np.float32)
RHO = np.array([[1.2, 6.0, 0.4, 9.0], [0.9999, 1.0, 9.0, 9.0]], np.float32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch([1, 0], mask=MASK, old_logp=OLD, rollout_logp=OLD - np.log(RHO))


def corrected(batch, correction, weights=None):
    objective = L.Objective(
        L.group_center(), L.token_ratio(), weights or L.token_mean(), corrections=correction
    )
    rows, stats = objective.prepare(batch)
    return np.where(MASK, rows.correction, 1), rows, L.finish(stats)


def expected(values):
    return np.where(MASK, values, 1)


@pytest.mark.parametrize(
    ("correction", "values", "rejected"),
    [
        (L.truncated_is(), [[1.2, 2, 0.4, 1], [0.9999, 1, 1, 1]], None),
        (L.truncated_is(float("inf")), [[1.2, 6, 0.4, 1], [0.9999, 1, 1, 1]], None),
        (L.truncated_is(2.5, "sequence"), [[2.5] * 4, [0.9999] * 4], None),
        (L.icepop(), [[1.2, 0, 0, 1], [0.9999, 1, 1, 1]], 2 / 5),
        (L.sequence_mask_is(), [[1] * 4, [1] * 4], 0),
        (L.sequence_mask_is(2.0), [[0] * 4, [1] * 4], 3 / 5),
        (L.sequence_mask_is(weigh=True), [[2.88] * 4, [0.9999] * 4], 0),
        (L.sequence_mask_is(low=0.99999), [[1] * 4, [0] * 4], 2 / 5),
        (L.geometric_mask_is(), [[0] * 4, [1] * 4], 3 / 5),
    ],
)
def test_worked(batch, correction, values, rejected):
    c, rows, stats = corrected(batch, correction)
    np.testing.assert_allclose(c, expected(values), rtol=1e-5)
    np.testing.assert_allclose(rows.weights.sum(), 1, rtol=1e-6)  # the rejected still count
    assert stats.get("mismatch/masked_frac") == (
        None if rejected is None else pytest.approx(rejected)
    )


def test_rejected_tokens_may_leave_the_denominator(batch):
    _, rows, _ = corrected(batch, L.icepop(keep_denominator=False))
    np.testing.assert_allclose(rows.weights, [[1 / 3, 0, 0, 0], [1 / 3, 1 / 3, 0, 0]])
    for correction in (
        L.sequence_mask_is(2.0, keep_denominator=False),
        L.geometric_mask_is(keep_denominator=False),
    ):
        _, rows, _ = corrected(batch, correction)
        np.testing.assert_allclose(rows.weights, [[0] * 4, [0.5, 0.5, 0, 0]])


def test_corrections_multiply(batch):
    c, _, _ = corrected(batch, (L.truncated_is(), L.geometric_mask_is()))
    np.testing.assert_allclose(c, expected([[0] * 4, [0.9999, 1, 1, 1]]), rtol=1e-5)


def test_c_scales_the_surrogate_and_not_the_kl(batch):
    """KL takes w without c; c and its inputs carry no gradient."""
    objective = L.Objective(
        L.group_center(),
        L.token_ratio(),
        L.token_mean(),
        corrections=L.icepop(),
        regularisers=L.kl(1.0, "k1"),
    )
    full = batch.replace(ref_logp=jnp.zeros_like(batch.old_logp))
    rows, _ = objective.prepare(full)
    gradient = jax.grad(lambda x: objective.loss(x, rows)[0])(jnp.asarray(OLD))
    c = np.where(MASK, [[1.2, 0, 0, 1], [0.9999, 1, 1, 1]], 0)
    advantages = np.array([[0.5], [-0.5]])
    np.testing.assert_allclose(gradient, (MASK - c * advantages) / 5, rtol=1e-5, atol=1e-7)

    def through(rollout):
        rows, _ = objective.prepare(full.replace(rollout_logp=rollout))
        return objective.loss(jnp.asarray(OLD), rows)[0]

    rows_gradient = jax.grad(through)(batch.rollout_logp)
    np.testing.assert_array_equal(rows_gradient, 0)


def test_decoupled_ppo_is_ppo_clip_with_an_importance_correction(batch):
    new = jnp.asarray(OLD + 0.1)
    plain, decoupled = L.grpo(beta=0.0), L.decoupled_ppo()
    rows, _ = decoupled.prepare(batch)
    weighed = plain.prepare(batch)[0].replace(
        weights=jnp.asarray(np.where(MASK, RHO, 0) / 5, jnp.float32)
    )
    np.testing.assert_allclose(decoupled.loss(new, rows)[0], plain.loss(new, weighed)[0], rtol=1e-5)


def test_mismatch(batch):
    values = L.finish(L.mismatch(batch))
    log_rho = np.log(RHO[MASK])
    rho = RHO[MASK]
    old, rollout = np.exp(OLD[MASK]), np.exp(OLD[MASK]) / rho
    assert values["mismatch/kl"] == pytest.approx(-log_rho.mean(), rel=1e-5)
    assert values["mismatch/k3"] == pytest.approx((rho - 1 - log_rho).mean(), rel=1e-5)
    assert values["mismatch/logp_diff_mean"] == pytest.approx(np.abs(log_rho).mean(), rel=1e-5)
    assert values["mismatch/logp_diff_max"] == pytest.approx(np.log(6), rel=1e-5)
    assert values["mismatch/ess"] == pytest.approx(rho.sum() ** 2 / (5 * (rho**2).sum()), rel=1e-5)
    assert "mismatch/pearson" not in values  # the trainer's are all the same here
    moved = batch.replace(old_logp=batch.old_logp.at[0, 0].add(-1.0))
    old[0] *= np.exp(-1)
    pearson = L.finish(L.mismatch(moved))["mismatch/pearson"]
    assert pearson == pytest.approx(np.corrcoef(old, rollout)[0, 1], rel=1e-4)


def test_equal_policies_do_not_mismatch(batch):
    values = L.finish(L.mismatch(batch.replace(rollout_logp=batch.old_logp)))
    assert values["mismatch/kl"] == values["mismatch/k3"] == values["mismatch/logp_diff_max"] == 0
    assert values["mismatch/ess"] == pytest.approx(1)


def test_mismatch_names_what_is_missing(batch):
    with pytest.raises(ValueError, match="needs rollout_logp"):
        L.mismatch(batch.replace(rollout_logp=None))
