"""The engine: exact against the full forward pass, whatever the schedule."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.monitoring import compilations
from rljax.sampling import Engine, SamplingParams, generate
from rljax.sampling.pool import make_pool

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
SAMPLING = SamplingParams(max_tokens=13, temperature=0.7, stop_token_ids=(1,))

NATIVE = functools.partial(pytest.param, marks=pytest.mark.compiler)


def make_engine(model, **kwargs):
    config, params = model
    options = {"slots": 8, "page_size": 4, "max_length": 32, "chunk": 4, "kernels": "off"} | kwargs
    engine = Engine(config, **options)
    engine.load(params, version=0)
    return engine


def run(engine, prompts, g=3, sampling=SAMPLING, **kwargs):
    groups = list(engine.generate(prompts, g, sampling, **kwargs))
    return {(r.prompt_index, r.sample_index): r for group in groups for r in group}


def trainer_logp(model, prompt, response, temperature, routing=None, support=None):
    config, params = model
    tokens = np.zeros((1, 32), np.int32)
    n = len(prompt) + len(response.tokens)
    tokens[0, :n] = np.concatenate([prompt, response.tokens])
    segments = (np.arange(32) < n).astype(np.int32)[None]
    replay = None
    if routing is not None:
        replay = np.full((1, 32, *routing.shape[1:]), -1, np.int32)
        replay[0, :n] = routing
    kept = None
    if support is not None:
        kept = np.full((1, 32, support.shape[1]), -1, np.int32)
        kept[0, len(prompt) : n] = support
    logp, _, router = _score(params, config, tokens, segments, replay, temperature, kept)
    return np.asarray(logp)[0, len(prompt) : n], router


_score = jax.jit(
    lambda params, config, tokens, segments, routing, temperature, support: models.score_tokens(
        params,
        config,
        models.Inputs(tokens, segments=segments, routing=routing, support=support),
        temperature=temperature,
    ),
    static_argnums=1,
)


@pytest.mark.smoke
def test_logprobs_equal_the_trainers_on_a_dense_model(dense, prompts):
    engine = make_engine(dense)
    found = run(engine, prompts)
    worst = 0.0
    for (p, _), response in found.items():
        expected, _ = trainer_logp(dense, prompts[p], response, 0.7)
        worst = max(worst, np.abs(expected - response.logp).max())
    assert worst < 1e-5
    assert len(found) == len(prompts) * 3
    assert engine.free_pages == 2 * 8 * 8


@pytest.mark.parametrize(
    "name,kernels", [("mixture", "off"), ("latent", "off"), NATIVE("latent", "native")]
)
def test_logprobs_equal_the_trainers_on_a_mixture_with_routing_replayed(
    name, kernels, prompts, request
):
    mixture = request.getfixturevalue(name)
    found = run(make_engine(mixture, with_routing=True, kernels=kernels), prompts)
    worst, flips, tokens = 0.0, 0.0, 0.0
    for (p, _), response in found.items():
        assert (response.routing[:-1] >= 0).all() and (response.routing[-1] == -1).all()
        expected, router = trainer_logp(mixture, prompts[p], response, 0.7, response.routing)
        worst = max(worst, np.abs(expected - response.logp).max())
        flips, tokens = flips + float(router.flips.sum()), tokens + float(router.tokens)
    assert worst < 1e-5
    assert flips / tokens < 0.01  # reported apart, at every step of a run


# Windows of 3 and 5 cross the borders of pages of 4; sequences have up to 30 tokens.
@pytest.mark.parametrize(
    "name,kernels",
    [
        ("qwen2_moe_mixed", "off"),
        NATIVE("qwen2_moe_mixed", "native"),
        ("mixtral_window", "off"),
        ("olmoe", "off"),
        ("gpt_oss_yarn", "off"),
        NATIVE("gpt_oss_yarn", "native"),
        ("smollm3_window", "off"),
        NATIVE("smollm3", "native"),
        ("olmo2", "off"),
    ],
)
def test_logprobs_equal_the_trainers_in_every_mixture_family(name, kernels, prompts):
    model = models.from_pretrained(GOLDEN / name)
    chosen = [prompts[3], prompts[4]]
    sampling = SamplingParams(max_tokens=13, temperature=0.7)
    engine = make_engine(model, with_routing=True, slots=4, kernels=kernels)
    found = run(engine, chosen, 2, sampling)
    for (p, _), response in found.items():
        assert len(response.tokens) == 13
        expected, _ = trainer_logp(model, chosen[p], response, 0.7, response.routing)
        # YaRN scales the logits, and with them their rounding, as in the golden tests.
        bound = 2e-5 if name == "gpt_oss_yarn" else 1e-5
        np.testing.assert_allclose(response.logp, expected, rtol=0, atol=bound)


KEPT = [
    SamplingParams(max_tokens=13, temperature=0.7, top_p=0.6),
    SamplingParams(max_tokens=13, temperature=1.3, top_k=3),
    SamplingParams(max_tokens=13, temperature=0.4, min_p=0.3),
    SamplingParams(max_tokens=13, temperature=0.7),
    SamplingParams(max_tokens=13, temperature=0.0),
]


@pytest.fixture(scope="module")
def kept(dense, prompts):
    """Responses with sets that were cut to 4, others that were not, and alternatives."""
    return run(make_engine(dense, max_support=4, top_logprobs=3), prompts[:5], 2, KEPT)


def test_logprobs_equal_the_trainers_under_the_support_that_is_returned(dense, prompts, kept):
    for (p, _), response in kept.items():
        params, support = KEPT[p], response.support
        assert support.shape == (13, 4) and support.dtype == np.int32
        temperature = params.temperature or 1.0
        expected, _ = trainer_logp(dense, prompts[p], response, temperature, support=support)
        np.testing.assert_allclose(response.logp, expected, rtol=0, atol=1e-5)
        if params.filtered:
            assert (support == response.tokens[:, None]).any(axis=1).all()
            assert (support[:, 0] >= 0).all()
        else:
            assert (support == -1).all()
    sizes = [(r.support >= 0).sum(axis=1) for (p, _), r in kept.items() if KEPT[p].filtered]
    assert {2, 4} <= set(np.concatenate(sizes))


def test_alternatives_are_the_likeliest_before_the_kept_set(dense, prompts, kept):
    config, params = dense
    for (p, _), response in kept.items():
        tokens = np.concatenate([prompts[p], response.tokens])[None]
        logits = models.logits(params, config, np.pad(tokens, ((0, 0), (0, 32 - tokens.shape[1]))))
        n = len(prompts[p])
        whole = jax.nn.log_softmax(logits[0, n - 1 : n + 12] / (KEPT[p].temperature or 1.0))
        values, ids = jax.lax.top_k(whole, 3)
        np.testing.assert_array_equal(response.top_tokens, ids)
        np.testing.assert_allclose(response.top_logp, values, rtol=0, atol=1e-5)


def test_a_support_as_large_as_the_set_changes_no_token(dense, prompts, kept):
    plain = run(make_engine(dense), prompts[:5], 2, KEPT)
    wide = run(make_engine(dense, max_support=99), prompts[:5], 2, KEPT)
    for key, response in plain.items():
        assert (response.support, response.top_tokens, response.top_logp) == (None, None, None)
        assert wide[key].support.shape == (13, 32)
        np.testing.assert_array_equal(response.tokens, wide[key].tokens)
        np.testing.assert_allclose(response.logp, wide[key].logp, rtol=0, atol=1e-5)
    in_four = [k for k, r in wide.items() if ((r.support >= 0).sum(axis=1) <= 4).all()]
    assert 2 <= len(in_four) < 10
    for key in in_four:
        np.testing.assert_array_equal(plain[key].tokens, kept[key].tokens)


def test_what_else_is_asked_for_survives_preemption_and_stop_strings(dense, prompts, kept):
    detokenize = lambda ids: "".join(chr(97 + i) for i in ids)  # noqa: E731
    tight = make_engine(dense, max_support=4, top_logprobs=3, num_pages=11, detokenize=detokenize)
    cut = [dataclasses.replace(params, stop=(detokenize([5]),)) for params in KEPT]
    found = run(tight, prompts[:5], 2, cut)
    assert tight.num_preemptions > 0
    for key, response in found.items():
        n = len(response.tokens)
        for name in ("tokens", "support", "top_tokens"):
            np.testing.assert_array_equal(getattr(response, name), getattr(kept[key], name)[:n])
    assert min(len(r.tokens) for r in found.values()) < 13


@pytest.mark.parametrize("expert", [0, 2])
def test_prompts_are_scored_where_that_is_asked(mixture, prompts, expert):
    mesh = meshes.make(fsdp=2, expert=expert, devices=jax.devices()[:4]) if expert else None
    sampling = [SamplingParams(max_tokens=3, prompt_logprobs=i == 4) for i in range(6)]
    found = run(make_engine(mixture, mesh=mesh), prompts, 2, sampling)
    for (p, _), response in found.items():
        assert (response.prompt_logp is not None) == (p == 4)
    scored = dataclasses.replace(found[4, 0], tokens=prompts[4][1:])
    expected, _ = trainer_logp(mixture, prompts[4][:1], scored, 1.0)
    assert found[4, 0].prompt_logp[0] == 0
    np.testing.assert_allclose(found[4, 1].prompt_logp[1:], expected, rtol=0, atol=1e-5)


def test_greedy_is_the_argmax_of_the_full_forward(dense, prompts):
    found = run(make_engine(dense), prompts, 1, SamplingParams(max_tokens=9, temperature=0.0))
    config, params = dense
    for (p, _), response in found.items():
        tokens = np.concatenate([prompts[p], response.tokens])[None]
        logits = models.logits(params, config, np.pad(tokens, ((0, 0), (0, 32 - tokens.shape[1]))))
        n = len(prompts[p])
        expected = np.asarray(jnp.argmax(logits[0, n - 1 : n + 8], axis=-1))
        np.testing.assert_array_equal(response.tokens, expected)


@pytest.mark.parametrize(
    "page_size,exact,kernels", [(32, True, "off"), (4, False, "off"), NATIVE(32, True, "native")]
)
def test_order_and_neighbours_change_no_bit(mixture, prompts, page_size, exact, kernels):
    """Bit for bit where the compiled shapes are equal (one page, prefill bucket and row count)."""
    options = {"page_size": page_size, "prefill_tokens": 128, "kernels": kernels}
    engine = make_engine(mixture, least_rows=8, share=1, **options)
    order = [4, 2, 5, 0, 3, 1]
    first = run(engine, prompts, prompt_ids=range(6), draws=[0] * 6)
    again = run(engine, [prompts[i] for i in order], prompt_ids=order, draws=[0] * 6)
    for place, original in enumerate(order):
        for k in range(3):
            a, b = first[original, k], again[place, k]
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logp, b.logp, rtol=0, atol=0 if exact else 1e-5)


def test_preempted_sequences_go_on_where_they_were(mixture, prompts):
    roomy = run(make_engine(mixture, with_routing=True), prompts)
    tight = make_engine(mixture, num_pages=11, with_routing=True)
    found = run(tight, prompts)
    assert tight.num_preemptions > 0
    assert tight.free_pages == 11
    for key, response in roomy.items():
        np.testing.assert_array_equal(response.tokens, found[key].tokens)
        np.testing.assert_allclose(response.logp, found[key].logp, atol=1e-5)
        np.testing.assert_array_equal(response.routing, found[key].routing)


def test_a_prefix_hit_changes_logprobs_by_rounding_only(mixture):
    rng = np.random.default_rng(2)
    stem = rng.integers(2, 32, 14)
    prompts = [np.append(stem, [i, i + 1]) for i in range(3)]
    cold = make_engine(mixture, with_routing=True, prefix_cache=False)
    warm = make_engine(mixture, with_routing=True)
    run(warm, [np.append(stem, [31])], 1)
    assert warm.prefix_hits == 0 and warm.cached_pages == 3
    for draw in range(2):  # a stem in common; then the whole prompt
        options = {"draws": [draw] * 3}
        expected, found = run(cold, prompts, 2, **options), run(warm, prompts, 2, **options)
        for key, response in expected.items():
            np.testing.assert_array_equal(response.tokens, found[key].tokens)
            np.testing.assert_allclose(response.logp, found[key].logp, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(response.routing, found[key].routing)
    assert (cold.prefix_hits, warm.prefix_hits) == (0, 2 * 3 * 12)


def test_new_weights_forget_what_prompts_left_in_the_cache(dense, prompts):
    config, params = dense
    engine = make_engine(dense)
    run(engine, prompts)
    assert engine.cached_pages > 0
    other = jax.tree.map(lambda x: 1.1 * x, params)
    engine.load(other, version=1)
    assert engine.cached_pages == 0
    found = run(engine, prompts, draws=[0] * 6)
    fresh = run(make_engine((config, other)), prompts, draws=[0] * 6)
    assert engine.prefix_hits == 0
    for key, response in fresh.items():
        np.testing.assert_array_equal(response.tokens, found[key].tokens)
        np.testing.assert_array_equal(response.logp, found[key].logp)
    engine.unload()
    assert engine.cached_pages == 0 and engine.free_pages == 128


def test_slots_do_not_matter(dense, prompts):
    few, many = run(make_engine(dense, slots=2), prompts), run(make_engine(dense), prompts)
    for key, response in few.items():
        np.testing.assert_array_equal(response.tokens, many[key].tokens)
        np.testing.assert_allclose(response.logp, many[key].logp, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"share": 2}, {"gathered": False}, {"least_rows": 1}, NATIVE({"kernels": "native"})]
)
def test_how_steps_are_arranged_does_not_matter(mixture, prompts, options):
    plain = run(make_engine(mixture, with_routing=True, share=1, least_rows=8), prompts, 4)
    engine = make_engine(mixture, with_routing=True, **options)
    shared = []
    send = engine.runner.send
    engine.runner.send = lambda rows, *a, **k: shared.append(rows.shared) or send(rows, *a, **k)
    other = run(engine, prompts, 4)
    assert any(shared) == ("share" in options)
    for key, response in plain.items():
        np.testing.assert_array_equal(response.tokens, other[key].tokens)
        np.testing.assert_allclose(response.logp, other[key].logp, atol=1e-5)
        np.testing.assert_array_equal(response.routing, other[key].routing)


@pytest.mark.parametrize("options", [NATIVE({"kernels": "native"}), {"gathered": False}])
def test_a_chunk_begins_before_the_host_has_read_what_the_last_one_drew(dense, prompts, options):
    """And changes nothing: ends, limits, chunks that end early, pages that run out."""
    limits = [SamplingParams(max_tokens=5 + i % 19, stop_token_ids=(1, 0)) for i in range(18)]
    found = {}
    for ahead in (True, False):
        engine = make_engine(dense, slots=18, num_pages=60, chunk=3, **options)
        waiting, most, send, fetch = [], 0, engine.runner.send, engine.runner.fetch

        def sent(*args, _send=send, _waiting=waiting, **kwargs):
            _waiting.append(_send(*args, **kwargs))
            return _waiting[-1]

        def fetched(chunk, _fetch=fetch, _waiting=waiting):
            nonlocal most
            most = max(most, len(_waiting))
            assert _waiting.pop(0) is chunk
            return _fetch(chunk)

        engine.runner.send, engine.runner.fetch = sent, fetched
        if not ahead:
            engine.loop.can_overlap = lambda chunk: False
        found[ahead] = run(engine, prompts, 3, limits)
        assert most == (2 if ahead else 1)
        assert engine.free_pages == 60
    for key, response in found[False].items():
        np.testing.assert_array_equal(response.tokens, found[True][key].tokens)
        np.testing.assert_array_equal(response.logp, found[True][key].logp)


def test_a_pool_in_bfloat16(dense, prompts):
    config, params = dense
    config = dataclasses.replace(config, dtype="bfloat16")
    chosen = prompts[3:5]
    for gathered in (True, False):
        found = run(make_engine((config, params), gathered=gathered), chosen, 4)
        for (p, _), response in found.items():
            expected, _ = trainer_logp((config, params), chosen[p], response, 0.7)
            np.testing.assert_allclose(response.logp, expected, atol=0.1)


def test_each_response_may_have_sampling_parameters_of_its_own(dense):
    limits = [SamplingParams(max_tokens=n) for n in (3, 9, 1, 5)]
    engine = make_engine(dense)
    found = run(engine, [[5], [6]], 2, limits)
    assert [len(r.tokens) for _, r in sorted(found.items())] == [3, 9, 1, 5]
    with pytest.raises(ValueError, match="3 sampling for 2 prompts of 2 responses"):
        engine.generate([[5], [6]], 2, limits[:3])


@pytest.mark.parametrize("data,fsdp", [(2, 1), (2, 4)])
def test_a_mesh_gives_the_same(mixture, prompts, data, fsdp):
    mesh = meshes.make(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
    engine = make_engine(mixture, mesh=mesh, num_pages=16 * data * fsdp)
    sharded, plain = run(engine, prompts), run(make_engine(mixture), prompts)
    for key, response in plain.items():
        np.testing.assert_array_equal(response.tokens, sharded[key].tokens)
        np.testing.assert_allclose(response.logp, sharded[key].logp, atol=1e-5)


def test_a_mesh_gives_the_same_support_and_alternatives(dense, prompts, kept):
    mesh = meshes.make(data=2, devices=jax.devices()[:2])
    engine = make_engine(dense, mesh=mesh, max_support=4, top_logprobs=3)
    sharded = run(engine, prompts[:5], 2, KEPT)
    for key, response in kept.items():
        for name in ("tokens", "support", "top_tokens"):
            np.testing.assert_array_equal(getattr(response, name), getattr(sharded[key], name))
        np.testing.assert_allclose(response.top_logp, sharded[key].top_logp, atol=1e-5)


def test_a_mesh_gives_the_same_with_latent_attention(latent, prompts):
    engine = make_engine(latent, mesh=meshes.make(data=2, fsdp=4), num_pages=128)
    sharded, plain = run(engine, prompts), run(make_engine(latent), prompts)
    for key, response in plain.items():
        np.testing.assert_array_equal(response.tokens, sharded[key].tokens)
        np.testing.assert_allclose(response.logp, sharded[key].logp, atol=1e-5)


@pytest.mark.parametrize("dtype,itemsize", [("float32", 4), ("bfloat16", 2)])
def test_of_latent_attention_only_latent_and_rotary_key_are_paged(latent, dtype, itemsize):
    config = dataclasses.replace(latent[0], dtype=dtype)
    pool = jax.eval_shape(functools.partial(make_pool, config, num_pages=5, page_size=3))
    size = sum(x.size * x.dtype.itemsize for x in pool.values())
    assert size == 5 * 3 * (8 + 4) * itemsize * config.num_layers


def test_a_prompt_is_prefilled_once_and_its_full_pages_are_shared(dense):
    engine = make_engine(dense, chunk=4)
    prompt = np.arange(2, 19)  # 16 tokens to prefill: 4 full pages
    groups = engine.generate([prompt], 4, SamplingParams(max_tokens=4))
    shard = engine._shards[0]
    seen = []
    take = shard.pages.take
    shard.pages.take = lambda n: seen.append(n) or take(n)
    next(groups)
    assert sum(seen) == 4 + 4 * 1  # the prompt's pages once, one page of its own for each sample


def test_prefill_calls_are_few_and_at_most_half_padding(dense):
    engine = make_engine(dense, slots=64, prefill_tokens=2048)
    for prompts in range(1, 65):
        sizes, left = [], prompts
        while left > 0:
            sizes.append(engine.runner.prefill_shapes.rows(left, 32))
            left -= sizes[-1]
        assert set(sizes) <= {4, 16, 64} and len(sizes) <= 4
        assert sum(sizes) < max(2 * prompts, 5)


def test_end_tokens_limits_and_edges(dense):
    engine = make_engine(dense, max_length=16)
    every_id = tuple(range(8))  # the pad id 0 among them, for good measure
    sampling = SamplingParams(max_tokens=10, stop_token_ids=every_id, temperature=2.0)
    found = run(engine, [np.array([5]), np.arange(2, 17)], 8, sampling)
    for (p, _), response in found.items():
        ends = np.isin(response.tokens, every_id)
        assert not ends[:-1].any()
        assert response.finish_reason == ("stop" if ends[-1] else "length")
        assert response.truncated == (not ends[-1])
        if p == 1:  # 15 tokens of 16: room for exactly one
            assert len(response.tokens) == 1
    assert any(not r.truncated for r in found.values())
    assert any(len(r.tokens) > 1 for r in found.values())
    with_pad = run(engine, [np.array([5])], 8, SamplingParams(max_tokens=10, temperature=5.0))
    assert any((r.tokens == 0).any() for r in with_pad.values())


def test_stop_strings_end_a_response_after_the_token_that_completes_one(dense):
    engine = make_engine(dense, detokenize=lambda ids: "".join(chr(97 + i) for i in ids))
    plain = run(engine, [np.array([5])], 4, SamplingParams(max_tokens=12), draws=[0])
    text = "".join(chr(97 + i) for i in plain[0, 0].tokens)
    sampling = SamplingParams(max_tokens=12, stop=(text[4:6],))
    cut = run(engine, [np.array([5])], 4, sampling, draws=[0])[0, 0]
    end = text.index(text[4:6]) + 2
    np.testing.assert_array_equal(cut.tokens, plain[0, 0].tokens[:end])
    assert (cut.finish_reason, cut.truncated) == ("stop", False)


def test_samples_differ_and_so_do_draws_but_seeds_repeat(dense):
    engine = make_engine(dense)
    first = run(engine, [np.array([5, 6])] * 2, 4, prompt_ids=[7, 8])
    texts = {tuple(r.tokens) for r in first.values()}
    assert len(texts) == 8
    asked_again = run(engine, [np.array([5, 6])], 4, prompt_ids=[7])
    assert not texts & {tuple(r.tokens) for r in asked_again.values()}
    repeated = run(engine, [np.array([5, 6])], 4, prompt_ids=[7], draws=[0])
    assert {tuple(r.tokens) for r in repeated.values()} < texts
    other_seed = run(engine, [np.array([5, 6])], 4, prompt_ids=[7], draws=[0], seed=1)
    assert not texts & {tuple(r.tokens) for r in other_seed.values()}


def test_the_weights_are_the_trainers_own_buffers(dense):
    _, params = dense
    engine = make_engine(dense)
    ours, theirs = jax.tree.leaves(engine.runner.params), jax.tree.leaves(params)
    pointers = [x.unsafe_buffer_pointer() for x in ours]
    assert pointers == [x.unsafe_buffer_pointer() for x in theirs]
    blocks = engine.runner._decode_params["stacks"][0]  # each layer's part of the same memory
    for stacked, *layers in zip(
        *map(jax.tree.leaves, (params["stacks"][0][0], *blocks)), strict=True
    ):
        for i, layer in enumerate(layers):
            offset = i * layer.nbytes
            if offset % 64 == 0:  # else the backend wants a copy
                assert layer.unsafe_buffer_pointer() == stacked.unsafe_buffer_pointer() + offset
            np.testing.assert_array_equal(layer, stacked[i : i + 1])


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["dense", "mixture", "latent"])
def test_native_products_read_the_very_weights_that_were_given(name, request):
    config, params = request.getfixturevalue(name)
    engine = make_engine((config, params), kernels="native")
    (where, *_), *_ = engine.runner._decode_params["stacks"]
    given = params["stacks"][0][0]
    for part, weight in (("attention", "o"), ("feed_forward", "gate"), ("feed_forward", "down")):
        held = getattr(where[part][weight], "array", where[part][weight])
        assert held.unsafe_buffer_pointer() == given[part][weight].unsafe_buffer_pointer()
    output = engine.runner._decode_params["output"].array
    assert output is params["embed" if config.tie_embeddings else "output"]


def test_responses_carry_the_version_and_versions_only_rise(dense):
    engine = make_engine(dense)
    engine.load(dense[1], version=3)
    assert (run(engine, [np.array([5])], 1)[0, 0].version == 3).all()
    with pytest.raises(ValueError, match="versions only rise"):
        engine.load(dense[1], version=2)


@pytest.mark.parametrize("options", [{}, NATIVE({"kernels": "native"}), {"gathered": False}])
def test_nothing_is_compiled_after_warm_up_nor_lost_over_any_mix(dense, options):
    """Lengths, limits, kept sets, greedy, shared stems, preemption and cancellation."""
    engine = make_engine(
        dense, prefill_tokens=128, num_pages=14, max_support=5, top_logprobs=2, **options
    )
    engine.warm_up(filtered=True)
    before = compilations.count()
    rng = np.random.default_rng(1)
    stem = rng.integers(2, 32, 16)
    kinds = [{}, {"top_k": 3}, {"temperature": 0.0}, {"min_p": 0.1, "temperature": 0.5}]
    cancelled = 0
    for _ in range(8):
        prompts = [
            np.append(stem[: rng.integers(17)], rng.integers(2, 32, n))
            for n in rng.integers(1, 6, 14)
        ]
        sampling = [
            SamplingParams(max_tokens=int(n), stop_token_ids=(1, 0), **kinds[n % 4])
            for n in rng.integers(1, 12, 28)
        ]
        left = set(range(14))
        for group in engine.generate(prompts, 2, sampling):
            left.remove(group[0].prompt_index)
            for r in group:
                assert len(r.tokens) == len(r.logp) == len(r.support) == len(r.top_tokens)
                assert np.isfinite(r.logp).all()
            if rng.random() < 0.15:
                other = int(rng.integers(14))
                assert engine.cancel(other) == (other in left)
                cancelled += other in left
                left.discard(other)
        assert not left and engine.free_pages == 14
    assert min(engine.num_preemptions, engine.prefix_hits, cancelled) > 0
    assert compilations.count() == before


@pytest.mark.parametrize(
    "prompt,match",
    [
        ([], "prompt 0 is empty"),
        (range(2, 40), "prompt 0 has 38 tokens"),
        ([40], "vocabulary has 32"),
    ],
)
def test_a_bad_prompt_is_refused_in_one_line(dense, prompt, match):
    with pytest.raises(ValueError, match=match) as error:
        make_engine(dense).generate([np.asarray(prompt, int)], 1, SAMPLING)
    assert "\n" not in str(error.value)


def test_other_bad_requests_are_refused(dense):
    engine = make_engine(dense)
    with pytest.raises(ValueError, match="temperature=-1"):
        SamplingParams(max_tokens=1, temperature=-1)
    with pytest.raises(ValueError, match="2 prompt_ids for 1 prompts"):
        engine.generate([[5]], 1, SAMPLING, prompt_ids=[1, 2])
    with pytest.raises(ValueError, match="detokenize"):
        engine.generate([[5]], 1, SamplingParams(max_tokens=1, stop=("x",)))
    with pytest.raises(ValueError, match="slots=3 do not divide"):
        Engine(dense[0], meshes.make(data=8), slots=3)
    with pytest.raises(
        ValueError, match="rollout rule embed=fsdp: while sampling experts are split"
    ):
        Engine(dense[0], meshes.make(fsdp=8), rules=meshes.TRAIN_RULES)
    with pytest.raises(ValueError, match="needs 9"):
        Engine(dense[0], page_size=4, max_length=32, num_pages=8)
    with pytest.raises(ValueError, match="needs one cpu device in float32, got 8 cpu"):
        Engine(dense[0], slots=8, kernels="native", mesh=meshes.make(data=8))
    with pytest.raises(ValueError, match="got 1 cpu in bfloat16; use kernels='auto'"):
        Engine(dataclasses.replace(dense[0], dtype="bfloat16"), kernels="native")
    with pytest.raises(ValueError, match="max_support=-1 must be 0"):
        Engine(dense[0], max_support=-1)
    with pytest.raises(ValueError, match="top_logprobs=33 must lie between 0 and the vocabulary"):
        Engine(dense[0], top_logprobs=33)
    with pytest.raises(RuntimeError, match="no weights"):
        Engine(dense[0]).generate([[5]], 1, SAMPLING)
    running = engine.generate([[5], [6]] * 9, 4, SAMPLING)
    next(running)
    with pytest.raises(RuntimeError, match="in the middle"):
        next(engine.generate([[5]], 1, SAMPLING))
    running.close()
    assert engine.free_pages == 128  # an abandoned call leaves nothing behind


def test_generate_does_it_all_at_once_and_in_order(dense, prompts):
    config, params = dense
    groups = generate(params, config, prompts, 2, SAMPLING, page_size=4)
    assert [g[0].prompt_index for g in groups] == list(range(len(prompts)))
    assert all(len(g) == 2 for g in groups)
