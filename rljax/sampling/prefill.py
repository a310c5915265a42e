"""Prefill calls: which waiting prompts go into the next one, and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from rljax.sampling.config import ShardSizes
from rljax.sampling.decode_rows import bucket, buckets
from rljax.sampling.scheduler import Group, PrefillRequest

_WIDTH = 32  # least tokens of a prefill row
_ROWS_LEAST = 4  # least rows of a prefill call
_GROWTH = 4  # of the rows of a prefill call and of the pages that it may read


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call of the prefill program.

    Attributes:
      of_shard: For each shard the requests of its rows.
      tokens: int32 [shards, rows, width].
      start: int32 [shards, rows], position of the first token.
      count: int32 [shards, rows], tokens that there are.
      table: int32 [shards, rows, pages].
    """

    of_shard: list[list[PrefillRequest]]
    tokens: np.ndarray
    start: np.ndarray
    count: np.ndarray
    table: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """tokens, start, count and table, the shards' rows after each other."""
        arrays = (self.tokens, self.start, self.count, self.table)
        return [x.reshape(-1, *x.shape[2:]) for x in arrays]

    def unfinished(self, shard: int) -> list[PrefillRequest]:
        """The ends of requests that were longer than the call's rows."""
        width = self.tokens.shape[2]
        return [
            PrefillRequest(r.tokens[width:], r.start + width, r.table, r.owner)
            for r in self.of_shard[shard]
            if len(r.tokens) > width
        ]

    def keep_routing(self, chosen: np.ndarray) -> None:
        """Gives groups the experts [shards · rows, width, layers, k] of their prompts' tokens."""
        chosen = chosen.reshape(*self.tokens.shape, *chosen.shape[2:])
        for s, requests in enumerate(self.of_shard):
            for r, request in enumerate(requests):
                if isinstance(request.owner, Group):
                    piece = chosen[s, r, : self.count[s, r]]
                    old = request.owner.routing if request.start else None
                    request.owner.routing = piece if old is None else np.concatenate([old, piece])


@dataclasses.dataclass(frozen=True)
class PrefillShapes:
    """The shapes of prefill calls.

    Attributes:
      sizes: Of a shard.
      prefill_tokens: Most tokens of a call on one shard, padding counted.
      max_length: Longest prompt plus response.
    """

    sizes: ShardSizes
    prefill_tokens: int
    max_length: int

    @property
    def widest(self) -> int:
        """Tokens of a prompt that one call takes."""
        most = min(self.prefill_tokens // 8, self.max_length)
        return bucket(most, _WIDTH, 1 << most.bit_length())

    def rows(self, n: int, width: int) -> int:
        """Rows of the next call where n prompts of that width wait.

        Powers of four are few programs; what fills no more than half of one is split instead.
        """
        rows = bucket(n, _ROWS_LEAST, self._most_rows(width), _GROWTH)
        return rows // _GROWTH if 2 * n <= rows and rows > _ROWS_LEAST else rows

    def _most_rows(self, width: int) -> int:
        """Prompts of that width that one call takes."""
        fits = max(self.prefill_tokens // width, 1)
        slots = bucket(self.sizes.slots, _ROWS_LEAST, 1 << 30)
        return min(1 << (fits.bit_length() - 1), slots)

    def every(self, tokens: int, most: int) -> Iterator[tuple[int, int, int]]:
        """All shapes that come up: rows, tokens and pages of a row.

        Args:
          tokens: Of the longest prompt, or continuation, to prefill.
          most: Requests that wait at once.
        """
        pages = self.sizes.pages
        for width in buckets(_WIDTH, bucket(tokens, _WIDTH, self.widest)):
            for rows in buckets(_ROWS_LEAST, self.rows(most, width), _GROWTH):
                most_columns = bucket(pages(tokens), pages(width), self.sizes.most_pages, _GROWTH)
                for columns in buckets(pages(width), most_columns, _GROWTH):
                    yield rows, width, columns

    def score_width(self, tokens: int) -> int:
        """Tokens of a row that scores so many of a prompt."""
        return bucket(tokens, _WIDTH, 1 << 30)

    def blank(self, rows: int, width: int, columns: int) -> PrefillCall:
        """A call of empty rows."""
        n = self.sizes.shards
        return PrefillCall(
            [[] for _ in range(n)],
            tokens=np.zeros((n, rows, width), np.int32),
            start=np.zeros((n, rows), np.int32),
            count=np.zeros((n, rows), np.int32),
            table=np.zeros((n, rows, columns), np.int32),
        )

    def next_call(self, waiting: list[list[PrefillRequest]]) -> PrefillCall:
        """The first call for what waits on each shard; it takes what it can from the front."""
        longest = max(len(r.tokens) for part in waiting for r in part)
        width = bucket(longest, _WIDTH, self.widest)
        rows = self.rows(max(len(part) for part in waiting), width)
        taken = [part[:rows] for part in waiting]
        ends = [r.start + min(len(r.tokens), width) for part in taken for r in part]
        pages = self.sizes.pages
        columns = bucket(pages(max(ends)), pages(width), self.sizes.most_pages, _GROWTH)
        call = dataclasses.replace(self.blank(rows, width, columns), of_shard=taken)
        for s, part in enumerate(taken):
            for r, request in enumerate(part):
                piece, used = request.tokens[:width], request.table[:columns]
                call.tokens[s, r, : len(piece)] = piece
                call.start[s, r], call.count[s, r] = request.start, len(piece)
                call.table[s, r, : len(used)] = used
        return call
