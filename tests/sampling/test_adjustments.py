"""Biases, penalties, forbidden sequences and end ids that wait."""

import itertools

import jax
import numpy as np
import pytest

from rljax import models
from rljax.monitoring import compilations
from rljax.sampling import Engine, SamplingParams
from rljax.sampling.adjustments import AdjustmentShape

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def engine(dense):
    config, params = dense
    engine = Engine(
        config, slots=16, page_size=8, max_length=32, chunk=3, least_rows=16, share=1,
        gathered=False, detokenize=lambda ids: "".join(chr(97 + i) for i in ids),
    )  # fmt: skip
    engine.load(params, version=0)
    return engine


def run(engine, sampling, g=8):
    (group,) = engine.generate([PROMPT], g, sampling, draws=[0])
    return group


def logits_after(dense, tokens):
    config, params = dense
    padded = np.pad(np.asarray([[*PROMPT, *tokens]]), ((0, 0), (0, 29 - len(tokens))))
    return np.array(_logits(params, config, padded)[0], np.float64)


_logits = jax.jit(models.logits, static_argnums=1)


def expected_logp(dense, response, params):
    """The log-probabilities by the definitions, token by token."""
    found, tokens = [], response.tokens.tolist()
    rows = logits_after(dense, tokens)
    for i, token in enumerate(tokens):
        z, drawn = rows[len(PROMPT) - 1 + i].copy(), tokens[:i]
        for t, bias in params.logit_bias:
            z[t] += bias
        for t in {*PROMPT, *drawn}:
            factor = params.repetition_penalty
            z[t] = z[t] / factor if z[t] > 0 else z[t] * factor
        for t in set(drawn):
            z[t] -= params.presence_penalty
        forbidden = set(params.end_ids) if i < params.min_tokens else set()
        for *start, end in params.bad_words:
            if drawn[len(drawn) - len(start) :] == start:
                forbidden.add(end)
        z[list(forbidden)] = -np.inf
        z /= params.temperature
        found.append(z[token] - np.logaddexp.reduce(z))
    return np.asarray(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {3: 2.0, 7: -100.0}},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "logit_bias": {4: 1.0}},
        {"bad_words": ((6,), (3, 4), (8, 9, 10))},
        {"min_tokens": 9, "stop_token_ids": tuple(range(8))},
        {
            "min_tokens": 5, "stop_token_ids": (1, 2), "repetition_penalty": 0.8,
            "bad_words": [[4]], "presence_penalty": -0.5, "logit_bias": {6: 1.5},
        },
    ],
)  # fmt: skip
def test_logprobs_are_those_of_the_changed_distribution(engine, dense, changes):
    params = SamplingParams(max_tokens=14, temperature=0.9, **changes)
    for response in run(engine, params):
        expected = expected_logp(dense, response, params)
        np.testing.assert_allclose(response.logp, expected, rtol=0, atol=1e-4)


def test_a_forbidden_sequence_is_never_completed(engine):
    plain = [r.tokens.tolist() for r in run(engine, SamplingParams(max_tokens=16))]
    pairs = {(a, b) for t in plain for a, b in itertools.pairwise(t)}
    words = tuple(sorted(pairs))[:12]
    changed = [
        r.tokens.tolist() for r in run(engine, SamplingParams(max_tokens=16, bad_words=words))
    ]
    assert changed != plain
    assert not {(a, b) for t in changed for a, b in itertools.pairwise(t)} & {*words}


def test_end_ids_wait_for_min_tokens_and_are_nothing_special_if_ignored(engine):
    many = tuple(range(8))
    short = run(engine, SamplingParams(max_tokens=14, stop_token_ids=many))
    assert min(len(r.tokens) for r in short) < 5
    for r in run(engine, SamplingParams(max_tokens=14, stop_token_ids=many, min_tokens=5)):
        assert len(r.tokens) > 5 and not np.isin(r.tokens[:5], many).any()
    ignoring = run(engine, SamplingParams(max_tokens=14, stop_token_ids=many, ignore_eos=True))
    plain = run(engine, SamplingParams(max_tokens=14))
    for r, p in zip(ignoring, plain, strict=True):
        assert r.finish_reason == "length"
        np.testing.assert_array_equal(r.tokens, p.tokens)
    assert any(np.isin(r.tokens, many).any() for r in ignoring)


def test_stop_strings_wait_for_min_tokens_and_may_be_left_out(engine):
    plain = run(engine, SamplingParams(max_tokens=14), 1)[0].tokens.tolist()
    text = "".join(chr(97 + i) for i in plain)
    stop = text[4:6]
    kept = run(engine, SamplingParams(max_tokens=14, stop=stop), 1)[0]
    end = text.index(stop)
    assert kept.tokens.tolist() == plain[: end + 2]
    cut = run(engine, SamplingParams(max_tokens=14, stop=stop, include_stop_str=False), 1)[0]
    assert (cut.tokens.tolist(), cut.finish_reason) == (plain[:end], "stop")
    assert len(cut.logp) == len(cut.version) == end
    late = run(engine, SamplingParams(max_tokens=14, stop=stop, min_tokens=end + 3), 1)[0]
    assert len(late.tokens) > end + 2


def test_requests_that_change_nothing_draw_the_same_beside_some_that_do(engine):
    alone = run(engine, SamplingParams(max_tokens=9), 2)
    shaped = SamplingParams(max_tokens=9, logit_bias={3: 5.0}, repetition_penalty=1.3)
    beside = run(engine, [SamplingParams(max_tokens=9), shaped], 2)
    np.testing.assert_array_equal(alone[0].tokens, beside[0].tokens)
    assert (alone[1].tokens != beside[1].tokens).any()


def test_unused_parameters_cost_no_program_and_used_ones_can_be_compiled_before(dense):
    plain = SamplingParams(max_tokens=9)
    assert AdjustmentShape.of([plain, SamplingParams(max_tokens=5, top_k=3, seed=2)]) is None
    shaped = SamplingParams(max_tokens=9, logit_bias={3: 5.0}, bad_words=[[4, 5]])
    config, params = dense
    engine = Engine(config, slots=4, page_size=8, max_length=16, chunk=3, kernels="off")
    engine.load(params, version=0)
    engine.warm_up(sampling=[plain, shaped], max_prompt_length=3)
    before = compilations.count()
    list(engine.generate([PROMPT] * 4, 2, [plain, shaped] * 4))
    assert compilations.count() == before
