"""Reference counts of pages."""

import numpy as np
import pytest

from rljax.sampling.pages import PageAllocator, prefix_keys


def test_a_page_is_free_once_its_last_holder_lets_go():
    pages = PageAllocator(3)
    taken = pages.take(2)
    pages.share(taken)
    pages.release(taken)
    assert pages.num_free == 1
    pages.release(taken)
    assert pages.num_free == 3


def test_more_pages_than_there_are_give_none_and_take_none():
    pages = PageAllocator(3)
    assert pages.take(4) is None
    assert pages.num_free == 3
    assert pages.take(0) == []


def test_names_are_those_of_a_page_and_all_before_it():
    tokens = np.arange(10)
    keys = prefix_keys(tokens, 4)
    assert len(keys) == len(set(keys)) == 2
    assert prefix_keys(tokens[:9].astype(np.int32), 4) == keys
    other = np.where(tokens == 0, 99, tokens)
    assert not set(prefix_keys(other, 4)) & set(keys)
    assert prefix_keys(tokens[4:8], 4) != keys[1:]


def test_a_named_page_is_found_until_it_is_taken_or_forgotten():
    pages = PageAllocator(4)
    first, second, third = pages.take(3)
    for page, key in ((first, b"a"), (second, b"b"), (third, b"c")):
        pages.keep(page, key, np.full((2, 1, 1), page))
    pages.keep(pages.take(1)[0], b"a")  # the name is taken
    pages.release([first, second])
    pages.release([third])
    assert (pages.num_free, pages.num_cached) == (3, 3)
    assert pages.find([b"a", b"b", b"x", b"c"]) == [first, second]
    np.testing.assert_array_equal(pages.routing([first, third])[:, 0, 0], [first] * 2 + [third] * 2)
    pages.share([first])  # a user: now the least recently used is the second
    assert pages.take(1) == [second]
    assert (pages.find([b"a", b"b"]), pages.num_free) == ([first], 1)
    pages.forget()
    assert (pages.find([b"a"]), pages.num_cached, pages.num_free) == ([], 0, 1)
    pages.release([first])
    assert (pages.num_cached, pages.num_free) == (0, 2)


def test_miscounting_is_an_error():
    pages = PageAllocator(1)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(RuntimeError, match="released more often"):
        pages.release(taken)
    with pytest.raises(RuntimeError, match="is free"):
        pages.share(taken)
