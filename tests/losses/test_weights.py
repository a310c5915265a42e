"""The weight of a token under each aggregator, and what counts in the denominators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L


def masks(*lengths):
    return np.arange(max(lengths)) < np.array(lengths)[:, None]


def weigh(weights, lengths, keep=None, group=None):
    n = len(lengths)
    keep = np.ones(n, bool) if keep is None else np.asarray(keep)
    return np.asarray(weights(masks(*lengths), keep, np.zeros(n, int) if group is None else group))


def test_sequence_mean_halves_with_length():
    weights = weigh(L.sequence_mean(), [50, 500, 5, 5])
    np.testing.assert_allclose(weights[:2, 0], [0.005, 0.0005], rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregator", "each", "shares"),
    [
        (L.sequence_mean(), [0.005, 0.000556], [0.5, 0.5]),
        (L.token_mean(), [0.001, 0.001], [0.1, 0.9]),
        (L.constant(1000), [0.0005, 0.0005], None),
    ],
)
def test_responses_of_100_and_900_tokens(aggregator, each, shares):
    weights = weigh(aggregator, [100, 900])
    np.testing.assert_allclose(weights[:, 0], each, atol=1e-6)
    if shares:
        np.testing.assert_allclose(weights.sum(1), shares, rtol=1e-5)


def test_constant_divides_by_responses_too_empty_ones_included():
    assert weigh(L.constant(10), [4, 3, 2, 2, 0, 0, 0, 0]).sum() == pytest.approx(0.1375)


def test_prompt_mean_weighs_prompts_once():
    weights = weigh(L.prompt_mean(), [1, 3, 2, 6, 5], group=[9, 9, 4, 4, 4])
    np.testing.assert_allclose(weights.sum(1), [1 / 8, 3 / 8, 2 / 26, 6 / 26, 5 / 26], rtol=1e-6)


def test_prompt_mean_counts_surviving_prompts():
    weights = weigh(L.prompt_mean(), [1, 3, 2, 2], [True, True, False, False], [0, 0, 1, 1])
    np.testing.assert_allclose(weights.sum(1), [0.25, 0.75, 0, 0])


def test_token_sum_has_no_denominator():
    np.testing.assert_array_equal(weigh(L.token_sum(), [2, 3]), masks(2, 3))


@pytest.mark.parametrize(
    "aggregator", [L.token_mean(), L.sequence_mean(), L.prompt_mean(), L.constant(3)]
)
def test_dropped_and_empty_responses(aggregator):
    kept = weigh(aggregator, [2, 3], group=[0, 1])
    with_dropped = weigh(aggregator, [2, 3, 3], [True, True, False], [0, 1, 0])
    np.testing.assert_allclose(with_dropped[:2], kept)
    assert (with_dropped[2] == 0).all()
    nothing = weigh(aggregator, [2, 3], [False, False])
    assert (nothing == 0).all()


@pytest.mark.parametrize(
    "aggregator",
    [L.token_mean(), L.sequence_mean(), L.prompt_mean(), L.constant(3), L.token_sum()],
)
def test_packed_weights_equal_padded_ones(make_batch, aggregator):
    batch = make_batch([1, 0, 0, 1, 1, 0], [4, 2, 3, 1, 2, 2], [3, 3, 3, 8, 8, 8])
    objective = L.Objective(L.group_center(), L.policy_gradient(), aggregator)
    rows = objective.prepare(batch)[0]
    packed = rows.pack(6)
    again = objective.weigh(packed.replace(weights=jnp.zeros_like(packed.weights)))
    np.testing.assert_allclose(again.weights, packed.weights, rtol=1e-6)
    np.testing.assert_allclose(again.token_weights, packed.token_weights, rtol=1e-6)


def test_a_mini_batch_is_weighed_as_a_whole(make_batch):
    objective = L.grpo(beta=0.0)
    rows, _ = objective.prepare(make_batch([1, 0, 0, 1], [4, 2, 3, 1], [0, 0, 1, 1]))
    mini = jax.jit(objective.minibatch)(rows, jnp.array([2, 3]))
    np.testing.assert_allclose(mini.weights.sum(1), [0.5, 0.5])
    np.testing.assert_allclose(mini.advantages, rows.advantages[2:])


def test_prompt_mean_refuses_parted_groups(make_batch):
    objective = L.Objective(L.group_center(), L.policy_gradient(), L.prompt_mean())
    rows, _ = objective.prepare(make_batch([1, 0, 0, 1], [4, 2, 3, 1], [0, 0, 1, 1]))
    objective.minibatch(rows, jnp.array([2, 3]))
    with pytest.raises(ValueError, match="multiple of num_generations"):
        objective.minibatch(rows, jnp.array([1, 2]))


def test_token_weights_under_a_sequence_ratio_are_warned_of():
    with pytest.warns(UserWarning, match="long responses more weight"):
        L.Objective(L.group_normalize(), L.sequence_ratio(), L.token_mean())


def test_micro_batches_add_up_to_the_token_mean(make_batch):
    """Rows of 1 token (loss 1) and 9 tokens (loss 0): 0.1 together, where means average to 0.5."""
    objective = L.supervised()
    rows, _ = objective.prepare(make_batch([0, 0], [1, 9]))
    logp = jnp.zeros((2, 9)).at[0, 0].set(-1.0)
    cuts = [slice(0, 1), slice(1, 2)]
    parts = [objective.loss(logp[c], jax.tree.map(lambda x: x[c], rows))[0] for c in cuts]  # noqa: B023
    assert sum(parts) == pytest.approx(0.1)
