"""Drawing: kept sets, frequencies, log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.sampling.token_sampling import (
    exponential,
    keep_mask,
    key_words,
    keys_at,
    row_keys,
    sample_tokens,
)

LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))
N = 20_000


@pytest.mark.parametrize(
    "top_p,top_k,min_p,kept",
    [
        (1.0, 0, 0.0, [1, 1, 1, 1, 1]),
        (1.0, 2, 0.0, [1, 1, 0, 0, 0]),
        (0.7, 0, 0.0, [1, 1, 0, 0, 0]),
        (0.71, 0, 0.0, [1, 1, 1, 0, 0]),
        (1e-6, 0, 0.0, [1, 0, 0, 0, 0]),
        (1.0, 0, 0.3, [1, 1, 1, 0, 0]),
        (0.9, 3, 0.0, [1, 1, 1, 0, 0]),  # .4 and .3 are .82 of the three, so the third is needed
        (0.8, 3, 0.0, [1, 1, 0, 0, 0]),
        (1.0, 9, 0.0, [1, 1, 1, 1, 1]),
    ],
)
def test_the_kept_set(top_p, top_k, min_p, kept):
    mask = _keep(LOGITS[None], jnp.array([top_p]), jnp.array([top_k]), jnp.array([min_p]))
    np.testing.assert_array_equal(np.asarray(mask)[0], np.array(kept, bool))


_keep = jax.jit(keep_mask)


@pytest.mark.parametrize("kept", [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
def test_frequencies_and_logprobs_are_those_of_the_distribution(kept):
    mask = jnp.broadcast_to(jnp.array(kept, bool), (N, 5))
    ids = key_words([(0, i, 0, 0) for i in range(N)])
    token, logp = _draw(ids, jnp.broadcast_to(LOGITS, (N, 5)), jnp.ones(N), mask)
    probs = np.where(kept, np.exp(LOGITS), 0)
    probs = probs / probs.sum()
    counts = np.bincount(np.asarray(token), minlength=5)
    live = probs > 0
    assert counts[~live].sum() == 0
    chi_square = ((counts - N * probs)[live] ** 2 / (N * probs[live])).sum()
    assert chi_square < 23.5  # beyond it with probability 1e-4 at 4 degrees of freedom
    np.testing.assert_allclose(np.exp(logp), probs[np.asarray(token)], rtol=1e-5)


_draw = jax.jit(
    lambda ids, z, t, mask: sample_tokens(jax.random.key_data(row_keys(ids)), z, t, mask)
)


def test_greedy_rows_take_the_likeliest_and_report_the_whole_distribution():
    kept = jnp.array([[True, False, False, False, False]])
    token, logp = sample_tokens(jnp.zeros((1, 2), jnp.uint32), LOGITS[None], jnp.zeros(1), kept)
    assert int(token[0]) == 0
    np.testing.assert_allclose(float(logp[0]), np.log(0.4), rtol=1e-6)


def test_each_part_of_the_key_matters_in_all_its_64_bits():
    parts = [0, 1, -1, 2**31, 2**31 - 1, 2**32, 2**63 - 1, -(2**63)]
    keys = [(0, 0, 0, 0), (0, 0, 0, 1)]
    keys += [(*[0] * i, part, *[0] * (3 - i)) for i in range(3) for part in parts[1:]]
    keys += [(0, 5, 2**32 * 7, 0), (0, 5 + 2**32 * 7, 0, 0)]
    data = np.asarray(jax.random.key_data(row_keys(key_words(keys))))
    assert len({tuple(row) for row in data}) == len(keys)


def test_keys_of_31_bits_are_folded_in_one_after_the_other():
    keys = [(0, 0, 0, 0), (7, 123456, 2, 5), (2**31 - 1, 2**31 - 1, 2**31 - 1, 3)]
    data = np.asarray(jax.random.key_data(row_keys(key_words(keys))))
    for row, (seed, *rest) in zip(data, keys, strict=True):
        key = jax.random.key(seed, impl="threefry2x32")
        for part in rest:
            key = jax.random.fold_in(key, part)
        np.testing.assert_array_equal(row, jax.random.key_data(key))
    known = [[683029726, 1624662641], [1560067075, 4089061652], [1848265484, 3785304745]]
    assert data.tolist() == known


def test_the_noise_is_exponential_and_independent_across_rows_places_and_positions():
    ids = key_words([(0, i, 0, 0) for i in range(256)])
    one, next_one = (np.asarray(_noise(ids, jnp.full(256, p)), np.float64) for p in (5, 6))
    uniform = np.exp(-one)
    counts, _ = np.histogram(uniform, 64, (0, 1))
    n = uniform.size
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 120  # 63 degrees of freedom, p = 2e-5
    smallest = one.min(1) * one.shape[1]  # of 4096: exponential too, the tail that decides a draw
    assert abs(smallest.mean() - 1) < 5 / 16 and abs((smallest < 0.1).mean() - 0.095) < 0.09
    bound = 5 / np.sqrt(n)
    for other in (next_one, np.roll(one, 1, 0), np.roll(one, 1, 1), np.roll(one, 64, 1)):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < bound


_noise = jax.jit(lambda ids, p: exponential(keys_at(row_keys(ids), p), 4096))


def test_frequencies_over_a_large_vocabulary():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=4096) * 2, jnp.float32)
    counts = np.zeros(4096)
    for start in range(0, N, 1000):
        ids = key_words([(3, start + i, 0, 0) for i in range(1000)])
        mask = jnp.ones((1000, 4096), bool)
        token, _ = _draw(ids, jnp.broadcast_to(logits, (1000, 4096)), jnp.ones(1000), mask)
        counts += np.bincount(np.asarray(token), minlength=4096)
    expected = N * np.asarray(jax.nn.softmax(logits))
    large = expected > 10
    chi_square = ((counts - expected)[large] ** 2 / expected[large]).sum()
    free = large.sum()
    assert abs(chi_square - free) < 4.5 * np.sqrt(2 * free)
    rest = N - expected[large].sum()
    assert abs((N - counts[large].sum()) - rest) < 4.5 * np.sqrt(rest)
