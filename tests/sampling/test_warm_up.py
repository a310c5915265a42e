"""Warm-up compiles what requests will need, no more, and says how far it is."""

import numpy as np
import pytest

from rljax.monitoring import compilations
from rljax.sampling import Engine, SamplingParams, warm_up


def make(dense, **options):
    config, params = dense
    sizes = {"slots": 16, "page_size": 4, "max_length": 300, "chunk": 4, "prefill_tokens": 512}
    engine = Engine(config, **sizes | options)
    engine.load(params, version=0)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "off"},
        pytest.param({"kernels": "native"}, marks=pytest.mark.compiler),
        {"gathered": False, "num_pages": 80},
    ],
)
def test_what_is_known_of_the_requests_saves_programs_and_nothing_is_compiled_later(dense, options):
    engine = make(dense, **options)
    rng = np.random.default_rng(0)
    sampling = [
        SamplingParams(max_tokens=n, top_k=3 * (n % 2), prompt_logprobs=n == 7) for n in (2, 7, 12)
    ]
    lines = []
    ran = engine.warm_up(sampling=sampling, max_prompt_length=40, num_requests=6, tell=lines.append)
    shapes = (engine.runner.shapes, engine.runner.prefill_shapes)
    # Decode programs cut distributions or do not.
    everything = 2 * len(list(shapes[0].every())) + len(list(shapes[1].every(300, 16)))
    assert ran < everything
    assert lines[0] == f"compiling {ran} programs of the sampler"
    assert lines[-1].startswith(f"compiled {ran} programs of the sampler in ")
    before = compilations.count()
    for g in (1, 2):
        prompts = [rng.integers(2, 32, n) for n in (1, 40, 17)]
        groups = list(engine.generate(prompts, g, sampling))
        assert len(groups) == 3
    assert compilations.count() == before


def test_progress_is_told_every_few_seconds(dense, monkeypatch):
    engine = make(dense, kernels="off", max_length=32, slots=4)
    monkeypatch.setattr(warm_up, "_TELL_EVERY_S", 0.0)
    lines = []
    ran = engine.warm_up(tell=lines.append)
    assert len(lines) == ran + 2
    assert lines[2].startswith(f"compiled 1 of {ran} programs of the sampler, ")
