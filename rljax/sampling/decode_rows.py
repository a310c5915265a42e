"""Which sequence decodes in which row of the next chunk, and the few shapes that chunks have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from rljax.sampling.scheduler import Sequence


def bucket(n: int, least: int, most: int, growth: float = 2) -> int:
    """The smallest of least, least · growth, … that holds n, but no more than `most`."""
    size = least
    while size < n:
        size = math.ceil(size * growth)
    return min(size, most)


def buckets(least: int, most: int, growth: float = 2) -> list[int]:
    """All values of `bucket`, in order."""
    sizes = [min(least, most)]
    while sizes[-1] < most:
        sizes.append(min(math.ceil(sizes[-1] * growth), most))
    return sizes


_LEAST_TOKENS = 64  # of a row's pages: fewer cost no less
_EXACT_GROWTH = 1.5  # of rows, where they are all that shapes differ in
_FULL_GROWTH = 1.5  # of pages that each row has where all slots are busy: padding costs most there
_SHARED_GROWTH = 4  # of pages that rows share: they are read once for all, so padding costs little


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of decode chunks on one shard.

    Attributes:
      slots: The most rows.
      least_rows: The fewest.
      share: Rows of a block that read a prompt's pages together; 1: none do.
      page_size: Tokens of a page.
      most_pages: Pages of the longest sequence.
      exact: Whether a step costs what its tokens cost, however wide the page tables are: all are
        then as wide as the longest needs, and rows that share nothing come in finer steps.
    """

    slots: int
    least_rows: int
    share: int
    page_size: int
    most_pages: int
    exact: bool = False

    def rows(self, n: int) -> int:
        """Rows of a chunk for n sequences."""
        return next(size for size in self._row_buckets if size >= n)

    def fewer(self, rows: int) -> int:
        """The next fewer rows that a chunk can have; 0 if there are none."""
        return max((size for size in self._row_buckets if size < rows), default=0)

    @property
    def _row_buckets(self) -> list[int]:
        least = min(self.least_rows, self.slots)
        fine = self.exact and self.share == 1
        return buckets(least, self.slots, _EXACT_GROWTH if fine else 2)

    def pages(self, n: int, rows: int) -> int:
        """Columns of a page table that holds n pages of each of so many rows' own."""
        if self.exact:
            return self.most_pages
        return bucket(n, self._least_pages, self.most_pages, self._growth(rows))

    def _growth(self, rows: int) -> float:
        return _FULL_GROWTH if rows == self.slots else 2

    def shared_pages(self, n: int) -> int:
        """Columns of a page table that holds n pages of a prompt's."""
        if self.exact:
            return self.most_pages
        return bucket(n, self._least_pages, self.most_pages, _SHARED_GROWTH)

    @property
    def _least_pages(self) -> int:
        return min(-(-_LEAST_TOKENS // self.page_size), self.most_pages)

    def can_share(self, rows: int) -> bool:
        """Whether chunks of so many rows come with shared pages too."""
        # Where pages are copied out, one block alone saves too little.
        least = self.share if self.exact else self.share + 1
        return self.share > 1 and rows % self.share == 0 and rows >= least

    def every(
        self, most_rows: int | None = None, tokens: int | None = None, prompt: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """All shapes that come up: rows, pages of a row's own, shared pages (0 for none).

        Args:
          most_rows: Sequences that decode at once; None: as many as there are slots.
          tokens: Tokens of the longest sequence; None: as many as its pages hold.
          prompt: Tokens of the longest prompt; None: as many as the longest sequence has.
        """
        rows_limit = self.rows(min(most_rows or self.slots, self.slots))
        longest = self._pages_of(tokens, self.most_pages)
        shared_longest = self._pages_of(prompt, longest)
        least_shared = self.most_pages if self.exact else self._least_pages
        shared = buckets(least_shared, self.shared_pages(shared_longest), _SHARED_GROWTH)
        for rows in self._row_buckets:
            if rows > rows_limit:
                break
            least = self.most_pages if self.exact else self._least_pages
            own = buckets(least, self.most_pages, self._growth(rows))
            for low, pages in zip([0, *own], own, strict=False):
                if low >= longest:
                    break
                yield rows, pages, 0
                if self.can_share(rows):
                    for low_shared, more in zip([0, *shared], shared, strict=False):
                        if low + 1 + low_shared + 1 <= longest:
                            yield rows, pages, more

    def _pages_of(self, tokens: int | None, most: int) -> int:
        return most if tokens is None else min(-(-tokens // self.page_size), most)


@dataclasses.dataclass
class DecodeRows:
    """The rows of one chunk.

    Attributes:
      of_shard: For each shard its rows, all of the same number; None where a row is empty.
      shared: Whether each block of rows reads its prompt's full pages together.
    """

    of_shard: list[list[Sequence | None]]
    shared: bool

    def __iter__(self) -> Iterator[tuple[int, int, Sequence]]:
        """Shard, row and sequence of every row that is not empty."""
        for shard, rows in enumerate(self.of_shard):
            for row, sequence in enumerate(rows):
                if sequence is not None:
                    yield shard, row, sequence


def arrange(active: list[list[Sequence]], shapes: Shapes) -> DecodeRows:
    """Puts the active sequences of each shard into rows, as few as hold them.

    Samples of a prompt come in blocks that share its pages where that takes no more rows.
    """
    rows = shapes.rows(max(len(part) for part in active))
    if shapes.can_share(rows):
        blocks = [_blocks(part, shapes.share) for part in active]
        whole = any(len(s.group.prompt) > shapes.page_size for part in active for s in part)
        if whole and shapes.share * max(len(b) for b in blocks) <= rows:
            joined = [[s for block in b for s in block] for b in blocks]
            return DecodeRows([_padded(part, rows) for part in joined], shared=True)
    return DecodeRows([_padded(list(part), rows) for part in active], shared=False)


def _blocks(active: list[Sequence], size: int) -> list[list[Sequence | None]]:
    of_group: dict[int, list[Sequence]] = {}
    for sequence in active:
        of_group.setdefault(id(sequence.group), []).append(sequence)
    return [
        _padded(members[i : i + size], size)
        for members in of_group.values()
        for i in range(0, len(members), size)
    ]


def _padded(rows: list[Sequence] | list[Sequence | None], size: int) -> list[Sequence | None]:
    return [*rows, *[None] * (size - len(rows))]
