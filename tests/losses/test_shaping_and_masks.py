"""Rewards are shaped once, masks drop without touching group statistics."""

import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L


def shaped(batch, *shaping, masks=(), advantage=None, weights=None):
    objective = L.Objective(
        advantage or L.returns_to_go(),
        L.policy_gradient(),
        weights or L.token_mean(),
        shaping=shaping,
        masks=masks,
    )
    return objective.prepare(batch)[0]


def last(rows):
    """The reward where it lands: at the only trained token."""
    return np.asarray(rows.advantages[:, 0])


LIMITS = [16384, 17000, 18432, 19456, 20480, 20481]
PENALTIES = [0, -0.150391, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_soft_overlong_worked(make_batch, reward):
    batch = make_batch([reward] * 6, completion_length=LIMITS)
    rows = shaped(batch, L.soft_overlong(20480, 4096))
    np.testing.assert_allclose(last(rows), np.array(PENALTIES) + reward, atol=1e-6)


def test_soft_overlong_small(make_batch):
    batch = make_batch([0.0] * 6, completion_length=[16, 17, 18, 20, 21, 1])
    rows = shaped(batch, L.soft_overlong(20, 4))
    np.testing.assert_allclose(last(rows), [0, -0.25, -0.5, -1, -1, 0], atol=1e-6)
    doubled = shaped(batch, L.soft_overlong(20, 4, factor=2.0))
    np.testing.assert_allclose(last(doubled), 2 * last(rows))


def test_a_truncated_response_gets_the_penalty_alone(make_batch):
    batch = make_batch([-1.0, 1.0, 1.0], completion_length=[20480] * 3, truncated=[1, 1, 0])
    alone = shaped(batch, L.soft_overlong(20480, 4096))
    np.testing.assert_allclose(last(alone), [-1, -1, 0])
    added = shaped(batch, L.soft_overlong(20480, 4096, truncated="add"))
    np.testing.assert_allclose(last(added), [-2, 0, 0])


def test_kl_in_reward_is_paid_at_every_token(make_batch):
    old, ref = np.log([[0.07, 0.07, 0.5]]), np.log([[0.04, 0.07, 0.1]])
    batch = make_batch([1.0], mask=[[1, 1, 0]], old_logp=old, ref_logp=ref)
    rows = shaped(batch, L.kl_in_reward(0.5, "k1"))
    np.testing.assert_allclose(rows.advantages, [[1 - 0.5 * 0.559616, 1, 0]], rtol=1e-5)


def test_overlong_filtering_masks_the_loss_but_not_the_statistics(make_batch):
    batch = make_batch([1, 0, 0, 1], [2, 3, 1, 2], truncated=[0, 1, 0, 0])
    rows = shaped(batch, masks=(L.mask_truncated(),), advantage=L.group_normalize())
    whole = shaped(batch, advantage=L.group_normalize())
    np.testing.assert_allclose(rows.advantages, whole.advantages)
    assert (rows.weights[1] == 0).all()
    np.testing.assert_allclose(rows.weights[0, 0], 1 / 5)


def test_keep_denominator_decides_who_counts(make_batch):
    batch = make_batch([1, 0, 0, 1], [2, 3, 1, 2], truncated=[0, 1, 0, 0])
    kept = shaped(batch, masks=(L.mask_truncated(keep_denominator=True),))
    np.testing.assert_allclose(kept.weights[0, 0], 1 / 8)
    assert (kept.correction[1] == 0).all() and kept.keep[1].all()
    np.testing.assert_allclose(kept.weights[1, 0], 1 / 8)  # the KL still pulls on it


def test_degenerate_groups_are_found_by_the_raw_score(make_batch):
    batch = make_batch(
        [1, 1, 1, 0],
        group=[0, 0, 1, 1],
        completion_length=[10, 20, 10, 10],
        scores=[1, 1, 1, 0],
    )
    rows, stats = L.dapo(20, 10).prepare(batch)
    assert rows.advantages[0, 0] != rows.advantages[1, 0]  # the penalty parts them,
    np.testing.assert_allclose(rows.weights[:, 0], [0, 0, 0.5, 0.5])  # yet they are dropped
    values = L.finish(stats)
    assert values["group/frac_zero_std"] == values["group/frac_all_correct"] == 0.5
    assert values["group/frac_all_wrong"] == 0


def test_zero_variance_may_stay_in_the_denominator(make_batch):
    batch = make_batch([1, 1, 1, 0], group=[0, 0, 1, 1])
    rows = shaped(batch, masks=(L.drop_zero_variance(keep_denominator=True),))
    np.testing.assert_allclose(rows.weights[:, 0], 0.25)
    np.testing.assert_allclose(rows.correction[:, 0], [0, 0, 1, 1])


@pytest.mark.parametrize("keep", [True, False])
def test_top_entropy_trains_the_top_share(make_batch, keep):
    entropy = np.arange(12.0).reshape(2, 6)
    batch = make_batch([1, 0], [5, 5], width=6, old_entropy=np.where(entropy == 5, 99, entropy))
    rows = shaped(batch, masks=(L.top_entropy(0.3, keep_denominator=keep),))
    chosen = np.isin(entropy, [8, 9, 10])
    if keep:
        np.testing.assert_array_equal(rows.correction * rows.mask, chosen)
        np.testing.assert_allclose(rows.weights[0, 0], 0.1)
    else:
        np.testing.assert_allclose(rows.weights, chosen / 3)


def test_top_entropy_under_sequence_mean_divides_by_what_is_kept(make_batch):
    entropy = np.array([[3.0, 0, 0, 0], [2, 1, 0, 0]])
    batch = make_batch([1, 0], [4, 4], old_entropy=entropy)
    masks = (L.top_entropy(0.4, keep_denominator=False),)
    rows = shaped(batch, masks=masks, weights=L.sequence_mean())
    np.testing.assert_allclose(rows.weights, [[0.5, 0, 0, 0], [0.25, 0.25, 0, 0]])


def test_a_token_mask_does_not_go_with_a_sequence_ratio():
    for policy in (L.sequence_ratio(), L.chain(L.token_ratio(), L.gmpo_clip())):
        with pytest.raises(ValueError, match="use sequence_token_ratio"):
            L.Objective(L.group_center(), policy, L.sequence_mean(), masks=L.top_entropy(0.2))


def test_completion_metrics(make_batch):
    batch = make_batch(
        [1, 0, 0, np.nan],
        [1, 2, 3, 4],
        completion_length=[10, 20, 40, 70],
        truncated=[0, 0, 1, 1],
        scores=[1, 0, 0, 0],
    )
    values = L.finish(L.grpo(beta=0.0).prepare(batch)[1])
    assert values["completion/length_mean"] == 35 and values["completion/length_max"] == 70
    assert values["completion/length_min"] == 10 and values["completion/truncated_frac"] == 0.5
    assert values["completion/length_correct"] == 10
    assert values["completion/length_incorrect"] == 30
    assert values["reward/mean"] == pytest.approx(1 / 3)
    assert values["reward/std"] == pytest.approx(0.57735, rel=1e-4)


def test_staleness(make_batch):
    batch = make_batch([1, 0], [2, 1], version=[[3, 5], [4, 0]])
    values = L.finish(L.staleness(batch, 6))
    assert values == {"staleness/mean": 2.0, "staleness/max": 3.0}


def test_missing_truncation_and_scores_have_their_defaults(make_batch):
    rows = shaped(make_batch([1, 1], [1, 2]), masks=(L.mask_truncated(),))
    assert jnp.isclose(rows.weights.sum(), 1)
