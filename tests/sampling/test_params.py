"""SamplingParams: values of the wrong type or range are refused in one line."""

import numpy as np
import pytest

from rljax.errors import InputError
from rljax.sampling import SamplingParams


@pytest.mark.parametrize(
    "given,match",
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be an integer"),
        ({"max_tokens": True}, "max_tokens=True must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": 1e-8}, r"temperature=1e-08 must be 0 \(greedy\) or at least 0.01"),
        ({"temperature": float("inf")}, "temperature=inf must be a finite number"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"temperature": "1"}, "temperature='1' must be a finite number"),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"top_p": float("nan")}, "top_p=nan must be a finite number"),
        ({"top_p": 0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"min_p": 1}, "min_p=1.0 must be at least 0 and below 1"),
        ({"stop_token_ids": 5}, r"stop_token_ids=5 must be a sequence, such as \(2,\)"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1 must be at least 0"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids=1.5 must be an integer"),
        ({"stop": ""}, "stop='' must hold texts of at least one character"),
        ({"stop": ("x", "")}, "must hold texts of at least one character"),
        ({"stop": (5,)}, "must hold texts of at least one character"),
        ({"stop": 5}, "stop=5 must be a sequence"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be at most"),
        ({"seed": 1.0}, "seed=1.0 must be an integer"),
        ({"min_tokens": 6}, "min_tokens=6 must be at most 5"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias=nan must be a finite number"),
        ({"logit_bias": {-5: 1}}, "logit_bias id=-5 must be at least 0"),
        ({"logit_bias": [5]}, "must hold pairs"),
        ({"logit_bias": [(5, 1), (5, 2)]}, "names token 5 twice"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0 must be above 0"),
        ({"bad_words": ((),)}, "bad_words holds an empty sequence"),
        ({"bad_words": (5,)}, "bad_words=5 must be a sequence"),
    ],
)
def test_bad_values_are_refused_in_one_line(given, match):
    with pytest.raises(InputError, match=match) as error:
        SamplingParams(**{"max_tokens": 5} | given)
    assert "\n" not in str(error.value)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(max_tokens=1, stop="</answer>").stop == ("</answer>",)


def test_what_means_the_same_is_equal():
    one = SamplingParams(
        max_tokens=np.int64(5), stop_token_ids=[1], stop=["x"], logit_bias={3: 1}, bad_words=[[4]]
    )
    other = SamplingParams(
        max_tokens=5, stop_token_ids=(1,), stop="x", logit_bias=((3, 1.0),), bad_words=((4,),)
    )
    assert one == other and hash(one) == hash(other)


def test_parameters_that_a_trainer_cannot_reproduce_are_named():
    plain = SamplingParams(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop="x", seed=3,
        include_stop_str=False, ignore_eos=True, min_tokens=2, stop_token_ids=(1,),
    )  # fmt: skip
    assert plain.reshapes == ()  # without end ids, min_tokens forbids none
    shaped = SamplingParams(
        max_tokens=5, min_tokens=2, stop_token_ids=(1,), logit_bias={3: 1}, repetition_penalty=1.1,
        presence_penalty=0.5, bad_words=[[4]],
    )  # fmt: skip
    assert shaped.reshapes == (
        "min_tokens",
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "bad_words",
    )
