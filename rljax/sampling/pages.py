"""Host-side accounts of the KV cache's pages: which are held, and what the others still contain."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np


def prefix_keys(tokens: np.ndarray, page_size: int) -> list[bytes]:
    """A name for each full page of a prompt: a hash of its tokens and all before them.

    Args:
      tokens: int32 [n].
      page_size: Tokens of a page.
    """
    keys, key = [], b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = np.ascontiguousarray(tokens[end - page_size : end], np.int32)
        key = hashlib.blake2b(key + page.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class PageAllocator:
    """Reference counts of one shard's pages, and the prefix cache.

    A page is free, or held by one or more page tables; it is written by at most one sequence,
    and only while that sequence is its sole holder. A full page of a prompt that was named with
    `keep` can be found again after its last holder let go, until it is taken for something else:
    pages without contents first, then the least recently used.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named and free, oldest first
        self._count = [0] * num_pages
        self._page: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}
        self._routing: dict[int, np.ndarray] = {}

    @property
    def num_free(self) -> int:
        """Pages that no page table holds, the cached ones among them."""
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages that no page table holds and that can still be found."""
        return len(self._idle)

    def take(self, n: int) -> list[int] | None:
        """Takes n pages, each with one reference; None if there are not as many."""
        if n > self.num_free:
            return None
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(n)]
        for page in pages:
            self._count[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds a reference to pages that are held or cached."""
        for page in pages:
            if self._count[page] < 1 and page not in self._idle:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._idle.pop(page, None)
            self._count[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drops a reference of each page; one without any is free again."""
        for page in reversed(pages):  # the end of a prompt is of no use without its start
            if self._count[page] < 1:
                raise RuntimeError(f"page {page} was released more often than taken")
            self._count[page] -= 1
            if self._count[page] == 0 and page in self._name:
                self._idle[page] = None
            elif self._count[page] == 0:
                self._empty.append(page)

    def keep(self, page: int, key: bytes, routing: np.ndarray | None = None) -> None:
        """Names a held page, whose contents are final, so that it can be found.

        Args:
          page: The page.
          key: Its name, see `prefix_keys`; the first page of a name keeps it.
          routing: int32 [page_size, layers, k], the experts of its tokens; None: not wanted.
        """
        if key in self._page or page in self._name:
            return
        self._page[key], self._name[page] = page, key
        if routing is not None:
            self._routing[page] = routing.copy()

    def find(self, keys: list[bytes]) -> list[int]:
        """The pages of the longest cached run of names from the first on; it holds none."""
        pages = []
        for key in keys:
            if key not in self._page:
                break
            pages.append(self._page[key])
        return pages

    def routing(self, pages: list[int]) -> np.ndarray | None:
        """The experts of the tokens of found pages, in order; None if there are none."""
        found = [self._routing[page] for page in pages if page in self._routing]
        return np.concatenate(found) if found else None

    def forget(self) -> None:
        """Ends what all pages are cached as: their contents no longer hold."""
        self._empty += self._idle
        for names in (self._idle, self._page, self._name, self._routing):
            names.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page[self._name.pop(page)]
        self._routing.pop(page, None)
        return page
