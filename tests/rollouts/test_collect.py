"""Collecting groups: order, dynamic sampling, its cap, surplus and staleness, faulty rewards."""

import datetime
import json
import logging

import numpy as np
import pytest

from rljax.data import CharTokenizer, PromptStream
from rljax.rewards import Scorer
from rljax.rollouts import (
    CollectSettings,
    CollectState,
    GroupSource,
    collect,
    component_metrics,
    make_batch,
)
from rljax.sampling import Response, SamplingParams

TOKENIZER = CharTokenizer("0123456789")
SAMPLING = SamplingParams(max_tokens=4)


class FakeEngine:
    """Answers each prompt by a rule of its id, and hands groups over in reverse order."""

    def __init__(self, answers, version=0):
        self.answers, self.version, self.asked = answers, version, []

    def generate(self, prompts, num_generations, sampling, seed, prompt_ids, draws):
        self.asked.append(list(zip(prompt_ids, draws, strict=True)))
        for index in reversed(range(len(prompts))):
            texts = self.answers(prompt_ids[index])
            yield [
                Response(
                    prompt_index=index, sample_index=k,
                    tokens=np.array([*TOKENIZER.encode(texts[k % len(texts)]), 1], np.int32),
                    logp=np.full(len(texts[k % len(texts)]) + 1, -0.5, np.float32),
                    finish_reason="stop", truncated=False,
                    version=np.full(len(texts[k % len(texts)]) + 1, self.version, np.int32),
                )
                for k in range(num_generations)
            ]  # fmt: skip


def rows(n):
    return [{"question": str(i), "answer": "7"} for i in range(n)]


def run(engine, state=None, scorer=None, n=4, **kwargs):
    stream = PromptStream(rows(40), TOKENIZER, seed=1)
    with scorer or Scorer(("exact_match",)) as scorer:
        return collect(
            GroupSource(engine, TOKENIZER, scorer, SAMPLING), stream, state or CollectState(),
            CollectSettings(num_groups=n, num_generations=2, seed=0, **kwargs),
        )  # fmt: skip


def test_groups_come_in_the_order_of_requests_not_of_finishing():
    engine = FakeEngine(lambda i: ["7", "8"])
    found, _ = run(engine)
    assert [g.prompt.id for g in found.groups] == [i for i, _ in engine.asked[0]]
    assert (found.generated, found.filled, found.dropped_degenerate) == (4, 0, 0)
    assert [list(g.scores) for g in found.groups] == [[1, 0]] * 4


def test_degenerate_groups_are_replaced_in_waves():
    engine = FakeEngine(lambda i: ["7", "8"] if i % 2 else ["7", "7"])
    found, state = run(engine, dynamic=True)
    assert len(found.groups) == 4
    assert all(g.prompt.id % 2 for g in found.groups)
    assert found.generated == sum(map(len, engine.asked)) > 4
    assert 0 < state.degenerate_rate < 1
    # The next step's first wave is sized by the estimate.
    again = FakeEngine(engine.answers)
    run(again, state, dynamic=True)
    assert len(again.asked[0]) == int(np.ceil(4 / (1 - state.degenerate_rate)))


def test_at_the_cap_the_batch_is_filled_up_and_a_line_says_so(caplog):
    engine = FakeEngine(lambda i: ["7", "7"])
    with caplog.at_level(logging.WARNING):
        found, _ = run(engine, dynamic=True, max_oversampling=2.0)
    assert (len(found.groups), found.generated, found.filled) == (4, 8, 4)
    assert "8 groups generated" in caplog.text


def test_surplus_groups_are_kept_within_the_staleness_limit_and_counted_when_dropped():
    engine = FakeEngine(lambda i: ["7", "8"])
    state = CollectState(degenerate_rate=0.5)  # expects half to fail, so asks for eight
    found, later = run(engine, state, dynamic=True, max_staleness=1)
    assert (found.generated, len(later.surplus), found.dropped_stale) == (8, 4, 0)
    reused, _ = run(FakeEngine(engine.answers, version=1), later, dynamic=True, max_staleness=1)
    assert (reused.reused, reused.generated) == (4, 0)
    assert [g.prompt.id for g in reused.groups] == [g.prompt.id for g in later.surplus]
    stale, _ = run(FakeEngine(engine.answers, version=2), later, dynamic=True, max_staleness=1)
    assert (stale.reused, stale.dropped_stale) == (0, 4)
    on_policy, none_left = run(engine, state, dynamic=True)
    assert (on_policy.dropped_unused, none_left.surplus) == (4, ())
    # Unused is not stale: the log tells them apart.
    values = on_policy.metrics()
    assert (values["staleness/dropped"], values["group/dropped"]) == (0, 4)
    assert stale.metrics()["staleness/dropped"] == 8  # responses


def test_an_estimate_of_no_degenerate_groups_is_an_estimate():
    """One bad wave moves a running estimate of 0; it replaces only what is unknown."""
    engine = FakeEngine(lambda i: ["7", "7"])
    known = run(engine, CollectState(degenerate_rate=0.0), dynamic=True, max_oversampling=1)[1]
    assert known.degenerate_rate == pytest.approx(0.2)
    assert run(engine, dynamic=True, max_oversampling=1)[1].degenerate_rate == 1.0


def test_the_state_survives_json_bit_for_bit():
    engine = FakeEngine(lambda i: ["7", "8"])
    _, state = run(engine, CollectState(degenerate_rate=0.5), dynamic=True, max_staleness=1)
    prompts = PromptStream(rows(40), TOKENIZER, seed=1).prompts
    saved = json.loads(json.dumps(state.to_json()))
    back = CollectState.from_json(saved, prompts)
    with pytest.raises(ValueError, match="which the data lack"):
        CollectState.from_json(saved, prompts[:1])
    assert back.degenerate_rate == state.degenerate_rate
    for one, other in zip(state.surplus, back.surplus, strict=True):
        assert (one.prompt.id, one.prompt.draw, one.texts) == (
            other.prompt.id, other.prompt.draw, other.texts,
        )  # fmt: skip
        np.testing.assert_array_equal(one.rewards, other.rewards)
        for a, b in zip(one.responses, other.responses, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logp, b.logp)
            assert a.logp.dtype == b.logp.dtype == np.float32


def test_columns_that_json_cannot_hold_do_not_enter_a_checkpoint():
    prompt = rows(1)[0] | {"when": datetime.date(2026, 1, 1), "raw": b"x"}
    stream = PromptStream([prompt] * 4, TOKENIZER, seed=1)
    with Scorer(("exact_match",)) as scorer:
        source = GroupSource(FakeEngine(lambda i: ["7", "8"]), TOKENIZER, scorer, SAMPLING)
        settings = CollectSettings(2, 2, seed=0, dynamic=True, max_staleness=1)
        _, state = collect(source, stream, CollectState(degenerate_rate=0.5), settings)
    back = CollectState.from_json(json.loads(json.dumps(state.to_json())), stream.prompts)
    assert back.surplus[0].prompt.columns["when"] == datetime.date(2026, 1, 1)


def sometimes_raises(completions, **_):
    if len(completions) > 1 or completions[0] == "9":
        raise RuntimeError("no")
    return [1.0 if completions[0] == "7" else 0.0]


def test_a_reward_function_that_raises_costs_its_own_sample():
    engine = FakeEngine(lambda i: ["7", "9"])
    found, _ = run(engine, scorer=Scorer((sometimes_raises,)), n=2)
    assert [list(g.valid) for g in found.groups] == [[True, False]] * 2
    batch = make_batch(found.groups)
    np.testing.assert_array_equal(batch.valid, [True, False, True, False])
    stats = component_metrics(found.groups, ("mine",))
    assert float(stats["reward/invalid_frac"].numerator) == 2
    assert float(stats["reward/mine/mean"].numerator) == 2


def test_the_batch_is_laid_out_as_documented():
    engine = FakeEngine(lambda i: ["7", "123"])
    found, _ = run(engine, n=2)
    batch = make_batch(found.groups, length=8)
    assert batch.tokens.shape == (4, 8)
    for b in range(4):
        group = found.groups[b // 2]
        n = len(group.prompt.tokens)
        response = group.responses[b % 2].tokens
        np.testing.assert_array_equal(batch.tokens[b, :n], group.prompt.tokens)
        np.testing.assert_array_equal(batch.tokens[b, batch.mask[b]], response)
        np.testing.assert_array_equal(np.flatnonzero(batch.mask[b]), n + np.arange(len(response)))
        np.testing.assert_array_equal(batch.segments[b] == 1, np.arange(8) < n + len(response))
    np.testing.assert_array_equal(batch.group, [0, 0, 1, 1])
    np.testing.assert_array_equal(batch.completion_length, [2, 4, 2, 4])
    with pytest.raises(ValueError, match="length=4 is too short"):
        make_batch(found.groups, length=4)
