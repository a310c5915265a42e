"""Drawing: kept sets, frequencies, log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.sampling.draw import draw, keep_mask, row_keys

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
    ids = jnp.stack([jnp.zeros(N, jnp.int32), jnp.arange(N), *jnp.zeros((2, N), jnp.int32)], 1)
    token, logp = _draw(ids, jnp.broadcast_to(LOGITS, (N, 5)), jnp.ones(N), mask)
    probs = np.where(kept, np.exp(LOGITS), 0)
    probs = probs / probs.sum()
    counts = np.bincount(np.asarray(token), minlength=5)
    live = probs > 0
    assert counts[~live].sum() == 0
    chi_square = ((counts - N * probs)[live] ** 2 / (N * probs[live])).sum()
    assert chi_square < 23.5  # beyond it with probability 1e-4 at 4 degrees of freedom
    np.testing.assert_allclose(np.exp(logp), probs[np.asarray(token)], rtol=1e-5)


_draw = jax.jit(lambda ids, z, t, mask: draw(jax.random.key_data(row_keys(ids)), z, t, mask))


def test_greedy_rows_take_the_likeliest_and_report_the_whole_distribution():
    kept = jnp.array([[True, False, False, False, False]])
    token, logp = draw(jnp.zeros((1, 2), jnp.uint32), LOGITS[None], jnp.zeros(1), kept)
    assert int(token[0]) == 0
    np.testing.assert_allclose(float(logp[0]), np.log(0.4), rtol=1e-6)


def test_each_part_of_the_key_matters():
    ids = jnp.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    data = np.asarray(jax.random.key_data(row_keys(ids)))
    assert len({tuple(row) for row in data}) == 5
