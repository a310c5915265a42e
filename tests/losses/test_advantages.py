"""Advantages against worked values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L


def advantages(batch, advantage, first_token=True):
    """The advantages of a batch, computed at one shape whatever its own: 128 responses of 8."""
    size, width = batch.mask.shape
    valid = jnp.ones(size, bool) if batch.valid is None else batch.valid
    pad = {1: (0, 128 - size), 2: (0, 8 - width)}

    def widen(leaf):
        columns = pad[2] if leaf.shape[1:] == (width,) else (0, 0)
        return jnp.pad(leaf, (pad[1], columns)[: leaf.ndim])

    whole = jax.tree.map(widen, batch.replace(valid=valid))
    whole = whole.replace(group=whole.group.at[size:].set(-1000))
    objective = L.Objective(advantage, L.policy_gradient(), L.token_mean())
    rows, _ = objective.prepare(whole)
    return np.asarray(rows.advantages[:size, 0] if first_token else rows.advantages[:size, :width])


EXACT = L.group_normalize(eps=0.0)


@pytest.mark.parametrize(
    ("rewards", "advantage", "expected"),
    [
        ([1, 1, -1, -1], EXACT, [0.866025, 0.866025, -0.866025, -0.866025]),
        ([1, 1, -1, -1], L.group_normalize(eps=0.0, ddof=0), [1, 1, -1, -1]),
        ([1, 1, 1, -1], EXACT, [0.5, 0.5, 0.5, -1.5]),
        ([1, -1], EXACT, [0.707107, -0.707107]),
        ([1] * 8 + [0] * 8, EXACT, [0.968246] * 8 + [-0.968246] * 8),
        ([1] * 15 + [0], EXACT, [0.25] * 15 + [-3.75]),
        ([1] + [0] * 15, EXACT, [3.75] + [-0.25] * 15),
        ([1] + [0] * 15, L.group_center(), [0.9375] + [-0.0625] * 15),
        ([1, 1, 1, -1], L.leave_one_out(), [0.666667] * 3 + [-2]),
        ([1] + [0] * 15, L.mean_normalize(), [15] + [-1] * 15),
    ],
)
def test_worked_groups(make_batch, rewards, advantage, expected):
    np.testing.assert_allclose(advantages(make_batch(rewards), advantage), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "lone"),
    zip(
        [2, 4, 8, 16, 32, 64, 128],
        [-0.707107, -1.5, -2.474874, -3.75, -5.480078, -7.875, -11.225320],
        strict=True,
    ),
)
def test_one_wrong_of_a_group(make_batch, size, lone):
    values = advantages(make_batch([0] + [1] * (size - 1)), EXACT)
    np.testing.assert_allclose(values[0], lone, atol=2e-6)
    np.testing.assert_allclose(values[1:], size**-0.5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "expected"),
    zip([4, 8, 16, 32, 64], [0.866025, 0.935414, 0.968246, 0.984251, 0.992157], strict=True),
)
def test_half_right(make_batch, size, expected):
    values = advantages(make_batch([1, 0] * (size // 2)), EXACT)
    np.testing.assert_allclose(np.abs(values), expected, atol=1e-6)


def test_the_default_eps_moves_the_lone_outlier(make_batch):
    values = advantages(make_batch([0] + [1] * 127), L.group_normalize())
    np.testing.assert_allclose(values[0], -11.225320 + 1.3e-4, atol=2e-5)


@pytest.mark.parametrize(
    "advantage",
    [L.group_normalize(), EXACT, L.group_center(), L.leave_one_out(), L.mean_normalize()],
)
@pytest.mark.parametrize("value", [0.7, 0.0, 1.0, 1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(make_batch, advantage, value):
    assert (advantages(make_batch([value] * 8), advantage) == 0).all()


def test_whitening_equal_rewards_gives_exactly_zero(make_batch):
    for per in ("token", "response"):
        assert (advantages(make_batch([0.7] * 8), L.batch_whiten(per=per)) == 0).all()


@pytest.mark.parametrize("mark", ["nan", "valid", "score"])
def test_a_failed_score_excludes_its_response_not_its_group(make_batch, mark):
    whole = make_batch([1, 0, 0, 1, 1, 0], group=[0, 0, 0, 1, 1, 1])
    expected = advantages(make_batch([1, 0, 1, 1, 0], group=[0, 0, 1, 1, 1]), EXACT)
    if mark == "nan":
        failed = whole.replace(rewards=whole.rewards.at[1].set(jnp.nan))
    elif mark == "score":
        failed = whole.replace(scores=whole.rewards.at[1].set(jnp.nan))
    else:
        failed = whole.replace(valid=jnp.array([True, False, True, True, True, True]))
    rows, stats = L.Objective(EXACT, L.policy_gradient(), L.token_mean()).prepare(failed)
    np.testing.assert_allclose(np.delete(rows.advantages[:, 0], 1), expected, atol=1e-6)
    assert rows.advantages[1, 0] == 0 and rows.weights[1, 0] == 0 and not rows.keep[1].any()
    np.testing.assert_allclose(rows.weights.sum(), 1, rtol=1e-6)
    assert L.finish(stats)["reward/mean"] == pytest.approx(0.6)


def test_one_valid_reward_left_gives_zero(make_batch):
    batch = make_batch([1, np.nan, np.nan], group=[5, 5, 5])
    for advantage in (EXACT, L.group_center(), L.leave_one_out(), L.mean_normalize()):
        assert (advantages(batch, advantage) == 0).all()


@pytest.mark.parametrize("advantage", [EXACT, L.group_center(), L.leave_one_out()])
def test_a_single_response_a_prompt_is_refused(make_batch, advantage):
    with pytest.raises(ValueError, match="at least 2 responses a prompt"):
        advantages(make_batch([1, 0, 1], group=[0, 0, 1]), advantage)


def test_group_numbers_may_be_any_integers_under_jit(make_batch):
    rewards = [1, 0, 0, 1, 1, 0]
    plain = make_batch(rewards, group=[0, 0, 0, 1, 1, 1])
    odd = make_batch(rewards, group=[90001, 90001, 90001, -4, -4, -4])
    objective = L.Objective(EXACT, L.policy_gradient(), L.prompt_mean())
    prepare = jax.jit(objective.prepare)
    np.testing.assert_allclose(prepare(odd)[0].advantages, prepare(plain)[0].advantages)
    np.testing.assert_allclose(prepare(odd)[0].weights, objective.prepare(plain)[0].weights)


def test_gae_worked(make_batch):
    batch = make_batch([0], mask=[[1, 1, 1]], token_rewards=[[0.0, 0, 1]], values=[[0.6, 0.7, 0.9]])
    rows, _ = L.Objective(L.gae(0.99, 0.95), L.policy_gradient(), L.token_mean()).prepare(batch)
    np.testing.assert_allclose(rows.advantages[0], [0.361090, 0.285050, 0.1], atol=1e-6)
    np.testing.assert_allclose(rows.returns[0], [0.961090, 0.985050, 1.0], atol=1e-6)
    whitened = advantages(batch, L.chain(L.gae(0.99, 0.95), L.batch_whiten()), False)
    np.testing.assert_allclose(whitened[0], [0.836855, 0.270597, -1.107452], atol=2e-6)
    flat = batch.replace(values=jnp.full((1, 3), 0.1))
    np.testing.assert_allclose(
        advantages(flat, L.gae(0.99, 0.95), False)[0], [0.794146, 0.845450, 0.9], atol=1e-6
    )


def test_the_terminal_reward_lands_on_the_last_trainable_token(make_batch):
    mask = [[0, 1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    batch = make_batch([2, 3], mask=mask, values=np.zeros((2, 7)))
    values = advantages(batch, L.gae(0.5, 1.0), False)
    np.testing.assert_allclose(values, [[0, 0.5, 1, 0, 2, 0, 0], [0, 3, 0, 0, 0, 0, 0]])


def test_gae_skips_masked_tokens(make_batch):
    batch = make_batch([0], mask=[[1, 1, 0]], token_rewards=[[0.0, 1, 0]], values=[[0.0, 0, 100]])
    np.testing.assert_allclose(advantages(batch, L.gae(1.0, 0.95), False)[0], [0.95, 1, 0])


def test_gae_bootstraps_after_truncation(make_batch):
    batch = make_batch(
        [0, 0],
        mask=[[1, 1]] * 2,
        values=np.zeros((2, 2)),
        truncated=[True, False],
        bootstrap_value=[8.0, 8.0],
    )
    values = advantages(batch, L.gae(0.5, 1.0, truncated="bootstrap"), False)
    np.testing.assert_allclose(values, [[2, 4], [0, 0]])
    with pytest.raises(ValueError, match="bootstrap_value"):
        advantages(batch.replace(bootstrap_value=None), L.gae(truncated="bootstrap"), False)


def test_returns_to_go_discount_over_the_mask(make_batch):
    batch = make_batch([1], mask=[[1, 0, 1, 1]])
    values = advantages(batch, L.returns_to_go(0.5), False)
    np.testing.assert_allclose(values, [[0.25, 0, 0.5, 1]])


def test_whitening_one_token_does_not_raise(make_batch):
    assert advantages(make_batch([3.0]), L.batch_whiten())[0] == 0


def test_whitening_weighs_tokens_or_responses(make_batch):
    batch = make_batch([1.0, 0.0, 0.0], lengths=[1, 3, 2])
    per_response = advantages(batch, L.batch_whiten(per="response"))
    np.testing.assert_allclose(per_response, np.array([2, -1, -1]) / np.sqrt(3), atol=1e-6)
    per_token = advantages(batch, L.batch_whiten(per="token"), False)
    tokens = per_token[np.asarray(batch.mask)]
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [0, 1], atol=1e-6)


def test_negative_rewards_are_refused_by_mean_normalize(make_batch):
    with pytest.raises(ValueError, match=r"rewards of at least 0, got -1\.0"):
        advantages(make_batch([1, -1]), L.mean_normalize())
