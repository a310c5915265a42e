"""Packed rows, prompts shared or not, give the scores, loss and gradient of padded rows."""

import dataclasses
import functools

import jax
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
    layout = lay_out(bins, lengths, (len(bins.rows) + 1, row_length), bins.most)
    taken = np.zeros((len(bins.rows) + 1) * row_length, int)
    for start, size in zip(layout.spans.start, layout.spans.size, strict=True):
        taken[start : start + size] += 1
    assert taken.max(initial=0) <= 1  # no two tokens in one place
    np.testing.assert_array_equal(
        np.bincount(layout.spans.source // 3, layout.spans.size * layout.spans.copies),
        lengths.totals.reshape(-1, 3).sum(1),
    )


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


def make_config(experts):
    return models.decoder(
        vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24,
        num_experts=experts,
    )  # fmt: skip


OBJECTIVE = dataclasses.replace(
    L.gspo(clip_low=0.1, clip_high=0.2), regularisers=(L.entropy_bonus(0.1),)
)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(experts, params, rows):
    """Loss, metrics, scores and router sums, and the gradient."""

    def loss(params):
        inputs = models.Inputs(
            rows.tokens, rows.positions, rows.segments, rows.prefix, rows.routing,
            copies=rows.copies,
        )  # fmt: skip
        logp, entropy, router = models.score_tokens(
            params, make_config(experts), inputs, score_mask=rows.mask
        )
        value, stats = OBJECTIVE.loss(L.PolicyOutputs(logp, entropy=entropy), rows)
        sums = None if router is None else (router.load, router.entropy, router.tokens)
        return value, (stats, logp, entropy, sums)

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def padded(experts):
    config = make_config(experts)
    params = models.init(jax.random.key(0), config)
    rows, _ = jax.jit(OBJECTIVE.prepare)(make_batch(config))
    return params, rows, evaluate(experts, params, rows)


# Experts, tokens of a row, and whether prompts are shared: divided groups, a group a row, responses
# alone.
@pytest.mark.parametrize(
    "experts,row_length,shared", [(0, 14, True), (4, 24, True), (0, 20, False), (4, 20, False)]
)
def test_scores_loss_gradient_and_metrics_are_equal(experts, row_length, shared):
    params, rows, ((value, (stats, *scores, sums)), gradient) = padded(experts)
    lengths = lengths_of(np.repeat(PROMPTS, G), LENGTHS, G if shared else 1)
    layout = lay_out(fill(lengths, row_length), lengths, (4, row_length), 8)
    packed = jax.jit(type(rows).lay_out)(rows, layout)
    by_hand = rows.pack(row_length, 4, 8, group_size=G if shared else 1)
    jax.tree.map(np.testing.assert_array_equal, packed, by_hand)
    assert (packed.prefix is not None) == shared and packed.tokens.shape == (4, row_length)
    (found, (others, *results, counts)), other = evaluate(experts, params, packed)
    np.testing.assert_allclose(found, value, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other, gradient
    )
    for expected, result in zip(scores, results, strict=True):
        back = layout.back(result, T)
        np.testing.assert_allclose(np.where(rows.mask, back, 0), expected, atol=1e-5)
    # A shared prompt counts as often as responses share it.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), counts, sums)
    one, another = L.finish(stats), L.finish(others)
    assert one.keys() == another.keys()
    for name, number in one.items():
        np.testing.assert_allclose(another[name], number, rtol=1e-4, atol=1e-6, err_msg=name)


def test_every_token_comes_back_to_its_place():
    lengths = lengths_of(np.repeat(PROMPTS, G), LENGTHS, G)
    marks = np.arange(2 * G * T).reshape(2 * G, T)
    own = np.arange(T) >= lengths.prompts[:, None]
    marks = np.where(own, marks, np.repeat(marks[::G], G, axis=0))  # the prompts of a group are one
    inside = np.arange(T) < lengths.totals[:, None]
    for row_length in (24, 14):
        layout = lay_out(fill(lengths, row_length), lengths, (4, row_length), 8)
        back = layout.back(layout.places().take(marks, -1), T, -1)
        np.testing.assert_array_equal(back, np.where(inside, marks, -1))


def test_groups_that_do_not_divide_the_rows_are_refused():
    _, rows, _ = padded(0)
    with pytest.raises(InputError, match="group_size=4 does not divide 6 rows"):
        rows.pack(24, group_size=4)
