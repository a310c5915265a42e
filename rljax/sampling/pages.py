"""Host-side accounts of the KV cache's pages: who holds which, counted by reference."""

from __future__ import annotations


class PageAllocator:
    """Reference counts of one shard's pages.

    A page is free, or held by one or more page tables; it is written by at most one sequence,
    and only while that sequence is its sole holder.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        """Takes n pages, each with one reference; None if there are not as many."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._count[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Adds a reference to pages that somebody holds."""
        for page in pages:
            if self._count[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._count[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drops a reference; a page without any is free again."""
        for page in pages:
            if self._count[page] < 1:
                raise RuntimeError(f"page {page} was released more often than taken")
            self._count[page] -= 1
            if self._count[page] == 0:
                self._free.append(page)
