"""Reference counts of pages."""

import pytest

from rljax.sampling.pages import PageAllocator


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


def test_miscounting_is_an_error():
    pages = PageAllocator(1)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(RuntimeError, match="released more often"):
        pages.release(taken)
    with pytest.raises(RuntimeError, match="is free"):
        pages.share(taken)
