"""Packed rows, prompts shared or not, give the scores, loss and gradient of padded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax import losses as L
from rljax import models
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.packing import Lengths, fill, lay_out

G, T = 3, 14
PROMPTS, LENGTHS = [4, 6], [5, 1, 8, 3, 4, 2]


def lengths_of(prompts, own, group_size=1):
    prompts = np.asarray(prompts)
    return Lengths(prompts, prompts + np.asarray(own), group_size)


SIZES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=3, max_size=3)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.sampled_from([21, 30, 48]), st.booleans())
def test_every_response_stands_in_one_row_with_room_for_it(groups, row_length, shared):
    prompts = [p for p, own in groups for _ in own]
    lengths = lengths_of(prompts, [n for _, own in groups for n in own], 3 if shared else 1)
    bins = fill(lengths, row_length)
    placed = sorted(m for row in bins.rows for f in row for m in f)
    assert placed == list(range(len(prompts)))
    for row in bins.rows:
        used = 0
        for fragment in row:
            assert len({m // 3 for m in fragment}) == 1 and (shared or len(fragment) == 1)
            used += prompts[fragment[0]] + sum(lengths.totals[m] - prompts[m] for m in fragment)
        assert used <= row_length
    # Every token comes back to its place, whatever the layout.
    layout = lay_out(bins, lengths, (len(bins.rows) + 1, row_length), bins.most)
    marks = jnp.arange(len(prompts) * 21).reshape(-1, 21)
    if shared:  # the prompts of a group are one
        own = np.arange(21) >= lengths.prompts[:, None]
        marks = jnp.where(own, marks, jnp.repeat(marks[::3], 3, axis=0))
    back = layout.back(layout.places().take(marks, -1), 21, -1)
    inside = np.arange(21) < lengths.totals[:, None]
    np.testing.assert_array_equal(back, np.where(inside, marks, -1))


def test_groups_stay_together_where_they_fit():
    lengths = lengths_of([4] * 9, [6, 5, 4, 3, 3, 2, 1, 1, 1], 3)  # groups of 19, 12 and 7 tokens
    bins = fill(lengths, 19)
    assert [[list(f) for f in row] for row in bins.rows] == [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8]]]


def test_a_group_too_large_for_a_row_falls_into_several_each_with_its_prompt():
    lengths = lengths_of([4] * 3, [6, 5, 4], 3)
    bins = fill(lengths, 14)
    assert sorted(f for row in bins.rows for f in row) == [(0, 2), (1,)]
    assert lengths.tokens == 19
    layout = lay_out(bins, lengths, (2, 14), 4)
    assert int(layout.spans.size.sum()) == 4 + 6 + 4 + 4 + 5


def test_too_few_rows_are_told():
    lengths = lengths_of([1] * 4, [5, 5, 5, 5])
    assert fill(lengths, 12, 1) is None
    assert len(fill(lengths, 12, 2).rows) == 2
    with pytest.raises(InputError, match="row_length must hold the longest response, got 5 for 6"):
        fill(lengths, 5)


def make_batch(config):
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 16, (2 * G, T)).astype(np.int32)
    mask, segments = np.zeros((2 * G, T), bool), np.zeros((2 * G, T), np.int32)
    for b, length in enumerate(LENGTHS):
        n = PROMPTS[b // G]
        tokens[b, :n] = tokens[b // G * G, :n]
        mask[b, n : n + length], segments[b, : n + length] = True, 1
    layers = len(config.mixture_layers)
    return Batch(
        tokens=tokens, mask=mask, segments=segments,
        positions=np.tile(np.arange(T, dtype=np.int32), (2 * G, 1)),
        group=np.repeat(np.arange(2, dtype=np.int32), G),
        rewards=np.array([1, 0, 0, 1, 1, 0], np.float32),
        old_logp=np.where(mask, rng.normal(-2.7, 0.3, (2 * G, T)), 0).astype(np.float32),
        rollout_logp=np.where(mask, -2.7, 0).astype(np.float32),
        routing=np.full((2 * G, T, layers, 2), -1, np.int32) if layers else None,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[0, 4])
def case(request):
    config = models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24,
        num_experts=request.param,
    )  # fmt: skip
    return config, models.init(jax.random.key(0), config), make_batch(config)


def score(config, params, rows):
    """Log-probabilities and entropies, as the trainer computes them."""
    return models.score_tokens(
        params,
        config,
        models.Inputs(rows.tokens, rows.positions, rows.segments, rows.prefix, rows.routing),
        score_mask=rows.mask,
    )[:2]


# Tokens of a row, and whether prompts are shared: a group a row, divided groups, responses alone.
PACKED = [(24, True), (14, True), (20, False)]


@pytest.mark.parametrize("row_length,shared", PACKED)
def test_log_probabilities_and_entropy_are_equal(case, row_length, shared):
    config, params, batch = case
    rows, _ = L.grpo(beta=0.0).prepare(batch)
    lengths = lengths_of(np.repeat(PROMPTS, G), LENGTHS, G if shared else 1)
    layout = lay_out(fill(lengths, row_length), lengths, (6, row_length), 8)
    packed = rows.lay_out(layout)
    for one, other in zip(score(config, params, rows), score(config, params, packed), strict=True):
        back = np.where(batch.mask, layout.back(other, T), 0)
        np.testing.assert_allclose(back, one, atol=1e-5)


@pytest.mark.parametrize("row_length,shared", PACKED)
def test_loss_gradient_and_metrics_are_equal(case, row_length, shared):
    config, params, batch = case
    objective = L.gspo(clip_low=0.1, clip_high=0.2)
    rows, _ = objective.prepare(batch)

    @jax.jit
    def evaluate(params, rows):
        def loss(params):
            return objective.loss(score(config, params, rows)[0], rows)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, stats), gradient = evaluate(params, rows)
    packed = rows.pack(row_length, 4, 8, group_size=G if shared else 1)
    assert (packed.prefix is not None) == shared and packed.tokens.shape == (4, row_length)
    (packed_value, packed_stats), packed_gradient = evaluate(params, packed)
    np.testing.assert_allclose(packed_value, value, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        packed_gradient, gradient,
    )  # fmt: skip
    one, other = L.finish(stats), L.finish(packed_stats)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_groups_that_do_not_divide_the_rows_are_refused(case):
    rows, _ = L.grpo(beta=0.0).prepare(case[2])
    with pytest.raises(InputError, match="group_size=4 does not divide 6 rows"):
        rows.pack(24, group_size=4)
