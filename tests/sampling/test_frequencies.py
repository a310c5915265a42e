"""How often the engine draws each token, against the exact distribution of the full forward."""

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.sampling import Engine, SamplingParams

PROMPT = [5, 9, 2]
N = 4096


@pytest.fixture(scope="module")
def engine(dense):
    config, params = dense
    engine = Engine(config, slots=256, max_length=8, page_size=8, chunk=1, least_rows=256, share=1)
    engine.load(params, version=0)
    return engine


@pytest.fixture(scope="module")
def logits(dense):
    config, params = dense
    return np.asarray(models.logits(params, config, np.asarray([PROMPT])), np.float64)[0, -1]


def distribution(logits, params):
    """The definition, token by token: top-k, then top-p of what is left, then min-p."""
    probs = np.exp(logits / params.temperature)
    order = np.argsort(-probs)[: params.top_k or None]
    kept, mass = [], 0.0
    for token in order:
        if mass < params.top_p * probs[order].sum():
            kept.append(token)
            mass += probs[token]
    kept = [t for t in kept if probs[t] >= params.min_p * probs.max()]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize(
    "cut,size",
    [
        ({}, 32),
        ({"temperature": 0.5}, 32),
        ({"temperature": 2.0}, 32),
        ({"top_k": 7}, 7),
        ({"top_p": 0.6, "temperature": 0.7}, None),
        ({"min_p": 0.3}, None),
        ({"top_k": 12, "top_p": 0.8, "min_p": 0.2}, None),
    ],
)
def test_frequencies_are_those_of_the_exact_distribution_each_time_anew(engine, logits, cut, size):
    params = SamplingParams(max_tokens=1, **cut)
    expected = distribution(logits, params)
    live = expected > 0
    assert live.sum() == (size or live.sum()) and 2 < live.sum() <= 32
    calls = []
    for draw in range(2):
        (group,) = engine.generate([PROMPT], N, params, draws=[draw])
        tokens = np.asarray([r.tokens[0] for r in group])
        logp = np.asarray([r.logp[0] for r in group])
        np.testing.assert_allclose(logp, np.log(expected[tokens]), atol=1e-5)
        counts = np.bincount(tokens, minlength=32)
        rare = live & (N * expected < 5)  # counted together, as the test's approximation wants
        cells = [(counts[i], N * expected[i]) for i in np.flatnonzero(live & ~rare)]
        if N * expected[rare].sum() >= 5:
            cells.append((counts[rare].sum(), N * expected[rare].sum()))
        chi_square = sum((c - e) ** 2 / e for c, e in cells)
        free = len(cells) - 1
        assert chi_square < free + 4.5 * np.sqrt(2 * free) + 8  # p < 1e-4
        calls.append(tokens)
    # The second call is independent of the first: they agree as often as chance has it.
    chance = (expected**2).sum()
    agree = (calls[0] == calls[1]).mean()
    assert abs(agree - chance) < 4.5 * np.sqrt(chance * (1 - chance) / N)


def test_no_two_samples_prompts_or_shards_draw_alike(dense):
    config, params = dense
    mesh = meshes.make(data=2, devices=jax.devices()[:2])
    engine = Engine(config, mesh, slots=16, max_length=24, page_size=8, chunk=8, least_rows=8)
    engine.load(params, version=0)
    # The same prompt four times: asked twice of each shard.
    groups = list(engine.generate([PROMPT] * 4, 4, SamplingParams(max_tokens=16)))
    assert {len(r.tokens) for group in groups for r in group} == {16}
    assert len({tuple(r.tokens) for group in groups for r in group}) == 16
