"""Weights that change in the middle of a call, programs that fail, weights that are not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.errors import EngineStateError, InputError, NonFiniteLogitsError
from rljax.monitoring import compilations
from rljax.sampling import Engine, SamplingParams

LONG = SamplingParams(max_tokens=13, temperature=0.7)


@pytest.fixture
def engine(dense):
    return make(dense)


def make(dense, **options):
    config, params = dense
    sizes = {"slots": 8, "page_size": 4, "max_length": 32, "chunk": 4, "kernels": "off"}
    engine = Engine(config, **sizes | options)
    engine.load(params, version=0)
    return engine


def tokens(engine, prompts, **arguments):
    groups = engine.generate(prompts, 2, LONG, **arguments)
    return {(r.prompt_index, r.sample_index): r.tokens.tolist() for g in groups for r in g}


def test_tokens_carry_the_version_of_the_weights_that_drew_them(dense, prompts):
    """A chunk that is under way while weights are loaded was sent with the old ones."""
    engine = make(dense, gathered=False)  # where pages are read in place, chunks overlap
    limits = [SamplingParams(max_tokens=n, temperature=0.7) for n in (2, 20)]
    groups = engine.generate(prompts[:2], 1, limits)
    sent = []
    send = engine.runner.send
    engine.runner.send = lambda *a, **k: sent.append(engine.version) or send(*a, **k)
    next(groups)
    under_way = len(sent)
    assert under_way == 2  # one more than was read
    engine.load(dense[1], version=1)
    (group,) = groups
    assert group[0].version.tolist() == [0] * 4 * under_way + [1] * (20 - 4 * under_way)


@pytest.mark.parametrize("program", ["prefill", "copy_pages", "decode"])
def test_after_a_program_that_consumed_the_pool_failed_the_engine_works(engine, prompts, program):
    expected = tokens(engine, prompts, draws=[0] * 6)
    assert engine.cached_pages > 0
    programs = engine.runner.programs
    kept = getattr(programs, program)

    def fails(params_or_pool, *arguments):
        pool = params_or_pool if program == "copy_pages" else arguments[0]
        for x in pool.values():
            x.delete()
        raise MemoryError("RESOURCE_EXHAUSTED")

    setattr(programs, program, {False: fails} if program == "decode" else fails)
    other = [p + 0 for p in prompts[:-1]] + [np.arange(3, 17)]
    with pytest.raises(MemoryError):
        list(engine.generate(other, 2, LONG))
    setattr(programs, program, kept)
    assert (engine.cached_pages, engine.free_pages) == (0, 128)
    assert tokens(engine, prompts, draws=[0] * 6) == expected


def test_after_a_failed_warm_up_the_engine_works(engine, prompts):
    programs, decode = engine.runner.programs, engine.runner.programs.decode

    def fails(params, pool, inputs):
        for x in pool.values():
            x.delete()
        raise MemoryError("RESOURCE_EXHAUSTED")

    programs.decode = {False: fails}
    with pytest.raises(MemoryError):
        engine.warm_up(num_requests=4)
    programs.decode = decode
    assert len(tokens(engine, prompts[:1])) == 2


def test_a_pool_that_is_made_again_compiles_nothing(engine, prompts):
    tokens(engine, prompts[:1])
    before = compilations.count()
    for version in (1, 2):
        params = engine.runner.params
        engine.unload()
        engine.load(params, version)
        tokens(engine, prompts[:1])
    assert compilations.count() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(dense, prompts, bad):
    params = dense[1]
    engine = make(dense)
    broken = dict(params, norm=jnp.full_like(params["norm"], bad))
    engine.load(broken, version=3)
    with pytest.raises(NonFiniteLogitsError, match="weights of version 3 gave NaN") as error:
        list(engine.generate(prompts, 2, LONG))
    assert "\n" not in str(error.value)
    engine.load(params, version=4)
    assert len(tokens(engine, prompts)) == 12


def test_a_refused_call_changes_nothing(engine, dense, prompts):
    for bad in (
        lambda: engine.generate([*prompts[:2], []], 2, LONG),
        lambda: engine.generate(prompts[:2], 2, SamplingParams(max_tokens=3, stop="x")),
        lambda: engine.generate(prompts[:2], 2, [LONG] * 3),
    ):
        with pytest.raises(InputError):
            bad()
    running = engine.generate(prompts[:1], 2, LONG, seed=5)
    late = engine.generate(prompts[:2], 2, LONG)
    next(running)
    with pytest.raises(EngineStateError, match="in the middle of another"):
        engine.generate(prompts[:2], 2, LONG)
    with pytest.raises(EngineStateError, match="in the middle of another"):
        next(late)
    running.close()
    assert tokens(engine, prompts[:2]) == tokens(make(dense), prompts[:2])


def test_seeds_prompt_ids_and_draws_of_64_bits_all_matter(engine, prompts):
    found = [
        tokens(engine, prompts[:1], **{"seed": 0, "prompt_ids": [0], "draws": [0]} | change)[0, 0]
        for change in (
            {},
            *({"seed": n} for n in (2**31, -1, 2**31 - 1, 2**32)),
            *({"prompt_ids": [n]} for n in (2**31, -1, 2**31 - 1, 2**32)),
            *({"draws": [n]} for n in (2**31, 2**31 - 1)),
        )
    ]
    assert len({tuple(t) for t in found}) == len(found)


def test_a_seed_of_its_own_stands_in_place_of_the_calls(engine, prompts):
    expected = tokens(engine, prompts[:1], seed=9)
    own = SamplingParams(max_tokens=13, temperature=0.7, seed=9)
    for _ in range(2):
        groups = list(engine.generate(prompts[:1], 2, own, seed=4))
        assert {(0, r.sample_index): r.tokens.tolist() for r in groups[0]} == expected
