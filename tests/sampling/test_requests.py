"""Requests are checked whole before anything of them begins."""

import dataclasses

import numpy as np
import pytest

from rljax.errors import InputError
from rljax.sampling import SamplingParams, requests

LIMITS = requests.RequestLimits(vocab_size=32, max_length=16, stop_ids=2, detokenizes=False)
SAMPLING = SamplingParams(max_tokens=4)


def check(prompts=([5], [6]), g=2, sampling=SAMPLING, seed=0, prompt_ids=None, draws=None):
    return requests.check(LIMITS, prompts, g, sampling, seed, prompt_ids, draws)


def keys(counter, **arguments):
    call = check(**arguments)
    counter.begin(call)
    return [m.key for group in call.groups for m in group.members]


@pytest.mark.parametrize(
    "given,match",
    [
        ({"prompts": [[5.5]]}, "prompt 0 holds float64 values; give token ids"),
        ({"prompts": [[5], np.ones(2)]}, "prompt 1 holds float64 values"),
        ({"prompts": [[True]]}, "prompt 0 holds bool values"),
        ({"prompts": [["a"]]}, "prompt 0 holds <U1 values"),
        ({"prompts": [[[5]]]}, r"prompt 0 has shape \(1, 1\)"),
        ({"prompts": [[5, [6]]]}, "prompt 0 is no sequence of token ids"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[2**40]]}, "prompt 0 holds token ids from"),
        ({"prompts": [[-1]]}, "prompt 0 holds token ids from -1"),
        ({"prompts": [[5] * 16]}, "prompt 0 has 16 tokens"),
        ({"g": 0}, "num_generations=0 must be at least 1"),
        ({"g": 1.5}, "num_generations=1.5 must be an integer"),
        ({"seed": 0.5}, "seed=0.5 must be an integer"),
        ({"seed": 2**63}, "must be at most"),
        ({"prompt_ids": [1]}, "1 prompt_ids for 2 prompts"),
        ({"prompt_ids": [1, "a"]}, r"prompt_ids\[1\]='a' must be an integer"),
        ({"draws": [0]}, "1 draws for 2 prompts"),
        ({"draws": [0, 2**63]}, r"draws\[1\]=9223372036854775808 must be at most"),
        ({"sampling": [SAMPLING] * 3}, "3 sampling for 2 prompts of 2 responses"),
        ({"sampling": {"max_tokens": 4}}, "sampling='max_tokens' must be SamplingParams"),
        ({"sampling": None}, "sampling=None must be SamplingParams"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(given, match):
    with pytest.raises(InputError, match=match) as error:
        check(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "named",
    [{"stop_token_ids": (2, 32)}, {"logit_bias": {32: 1.0}}, {"bad_words": ((5, 32),)}],
)
def test_ids_that_the_vocabulary_cannot_draw_are_refused(named):
    (name,) = named
    params = dataclasses.replace(SAMPLING, **named)
    with pytest.raises(InputError, match=f"{name} names token 32, which the model's vocabulary"):
        check(sampling=params)


def test_more_end_ids_than_the_engine_takes_are_refused():
    params = dataclasses.replace(SAMPLING, stop_token_ids=(1, 2, 3))
    with pytest.raises(InputError, match=r"raise Engine\(stop_ids=...\)"):
        check(sampling=params)


def test_keys_are_made_of_all_bits_and_of_a_count_of_draws():
    counter = requests.DrawCounter()
    wide = {"seed": -1, "prompt_ids": [2**40, -(2**63)], "g": 1}
    assert keys(counter, **wide) == [(-1, 2**40, 0, 0), (-1, -(2**63), 0, 0)]
    assert keys(counter, **wide) == [(-1, 2**40, 1, 0), (-1, -(2**63), 1, 0)]
    assert keys(counter, **wide, draws=[2**31, 5]) == [(-1, 2**40, 2**31, 0), (-1, -(2**63), 5, 0)]
    assert keys(counter, **wide | {"seed": 2**31 - 1})[0] == (2**31 - 1, 2**40, 0, 0)


def test_a_call_that_never_begins_is_not_counted():
    counter = requests.DrawCounter()
    check(g=1)
    assert keys(counter, g=1) == [(0, 0, 0, 0), (0, 1, 0, 0)]


def test_a_seed_of_its_own_makes_a_request_draw_the_same_in_every_call():
    counter = requests.DrawCounter()
    own = [SAMPLING, dataclasses.replace(SAMPLING, seed=9)]
    assert keys(counter, sampling=own, g=1) == [(0, 0, 0, 0), (9, 1, 0, 0)]
    assert keys(counter, sampling=own, g=1) == [(0, 0, 1, 0), (9, 1, 0, 0)]
    assert keys(counter, sampling=own, g=1, draws=[7, 7])[1] == (9, 1, 7, 0)
