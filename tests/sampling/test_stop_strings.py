"""Stop strings are found where the whole text would show them, at a fixed cost per token."""

import numpy as np
import pytest

from rljax.sampling.stop_strings import StopStrings


def decode(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def first(stop, tokens, detokenize=decode):
    """How many tokens there are when the first stop string is complete, and where it begins."""
    text = StopStrings(stop, detokenize)
    for end, token in enumerate(tokens, 1):
        place = text.add(token)
        if place is not None:
            return end, place, text.tokens_before(place)
    return None


def by_the_whole_text(stop, tokens):
    for end in range(1, len(tokens) + 1):
        found = [decode(tokens[:end]).find(s) for s in stop]
        if max(found) >= 0:
            return end, min(place for place in found if place >= 0)
    return None


ALPHABET = ["a", "b", "é", "€", "😀", "</a>"]


@pytest.mark.parametrize("stop", [("ab",), ("é€",), ("😀",), ("a", "b€"), ("</a>", "a😀é")])
def test_a_stop_string_is_found_where_the_whole_text_shows_it(stop):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        text = "".join(rng.choice(ALPHABET, 12))
        tokens = list(text.encode())
        if rng.random() < 0.5:  # bytes that are no text
            at = int(rng.integers(len(tokens)))
            tokens[at:at] = rng.integers(128, 192, rng.integers(1, 12)).tolist()
        expected = by_the_whole_text(stop, tokens)
        got = first(stop, tokens)
        assert (got and got[:2]) == expected
        found += expected is not None
    assert found > 20


def test_the_tokens_before_a_stop_string_are_those_of_the_text_before_it():
    tokens = list("x€é</a>".encode())
    end, place, before = first(("é</a>",), tokens)
    assert (end, place, decode(tokens[:before])) == (len(tokens), 2, "x€")
    pieces = {1: "see <", 2: "/a", 3: "> now"}
    words = lambda tokens: "".join(pieces[t] for t in tokens)  # noqa: E731
    # The token in which the stop string begins is not kept, though part of its text comes before.
    assert first(("</a>",), [2, 1, 2, 3], words) == (4, 6, 1)


def test_a_decoder_that_drops_the_first_space_loses_none_within_the_text():
    words = lambda tokens: "".join(f" {chr(97 + t)}" for t in tokens if t >= 0).lstrip()  # noqa: E731
    assert first(("b c",), [0, 1, 2, 3], words)[:2] == (3, 2)
    assert first(("b c",), [0, 1, -1, 2], words)[:2] == (4, 2)  # -1: a token without a text


def test_the_work_grows_with_the_tokens_alone():
    work = []

    def counting(tokens):
        work.append(len(tokens))
        return decode(tokens)

    text = StopStrings(("</answer>",), counting)
    rng = np.random.default_rng(1)
    for token in rng.integers(0, 256, 2000):
        text.add(int(token))
    assert max(work) <= 24 and sum(work) < 20 * 2000


def test_a_string_that_was_complete_before_is_not_found_again():
    text = StopStrings(("a", "xxaxx"), decode)
    places = [text.add(token) for token in b"axxyxxaxx"]
    assert places == [0, None, None, None, None, None, 6, None, 4]
