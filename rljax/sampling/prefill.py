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
_GROWTH = 4  # of the rows of a prefill call


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    """One call of the prefill program.

    Attributes:
      of_shard: For each shard the requests of its rows, none longer than a row. Those of one prompt
        follow each other.
      left: For each shard what waits for later calls.
      tokens: int32 [shards, rows, width].
      start: int32 [shards, rows], position of the first token.
      count: int32 [shards, rows], tokens that there are.
      table: int32 [shards, rows, pages].
    """

    of_shard: list[list[PrefillRequest]]
    left: list[list[PrefillRequest]]
    tokens: np.ndarray
    start: np.ndarray
    count: np.ndarray
    table: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """tokens, start, count and table, the shards' rows after each other."""
        arrays = (self.tokens, self.start, self.count, self.table)
        return [x.reshape(-1, *x.shape[2:]) for x in arrays]

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

    A prompt that is longer than a row takes several rows, of one call as far as they fit: a layer
    writes the keys and values of all rows before any of them reads. Page tables are as wide as the
    longest sequence needs, as only pages that hold tokens cost time.

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
        """Tokens of the widest row."""
        most = min(self.prefill_tokens // 8, self.max_length)
        return bucket(most, _WIDTH, 1 << most.bit_length())

    def rows(self, n: int, width: int) -> int:
        """Rows of the next call where n prompts of that width wait.

        Powers of four are few programs; what fills no more than half of one is split instead.
        """
        rows = bucket(n, _ROWS_LEAST, self._most_rows(width), _GROWTH)
        return rows // _GROWTH if 2 * n <= rows and rows > _ROWS_LEAST else rows

    def _most_rows(self, width: int) -> int:
        """Rows of that width that one call takes."""
        fits = max(self.prefill_tokens // width, 1)
        slots = bucket(self.sizes.slots, _ROWS_LEAST, 1 << 30)
        return 1 << (fits.bit_length() - 1) if width == self.widest else min(fits, slots)

    def every(self, tokens: int, most: int) -> Iterator[tuple[int, int]]:
        """All shapes that come up: rows, and tokens of a row.

        Args:
          tokens: Of the longest prompt, or continuation, to prefill.
          most: Requests that wait at once.
        """
        for width in buckets(_WIDTH, bucket(tokens, _WIDTH, self.widest)):
            pieces = most * -(-tokens // width)
            for rows in buckets(_ROWS_LEAST, self.rows(pieces, width), _GROWTH):
                yield rows, width

    def score_width(self, tokens: int) -> int:
        """Tokens of a row that scores so many of a prompt."""
        return bucket(tokens, _WIDTH, 1 << 30)

    def blank(self, rows: int, width: int) -> PrefillCall:
        """A call of empty rows."""
        n = self.sizes.shards
        return PrefillCall(
            [[] for _ in range(n)],
            [[] for _ in range(n)],
            tokens=np.zeros((n, rows, width), np.int32),
            start=np.zeros((n, rows), np.int32),
            count=np.zeros((n, rows), np.int32),
            table=np.zeros((n, rows, self.sizes.most_pages), np.int32),
        )

    def next_call(self, waiting: list[list[PrefillRequest]]) -> PrefillCall:
        """The first call for what waits on each shard; it takes what it can from the front."""
        rows, width = self._cheapest([[len(r.tokens) for r in part] for part in waiting])
        pieces = [[piece for r in part for piece in _cut(r, width)] for part in waiting]
        call = dataclasses.replace(
            self.blank(rows, width),
            of_shard=[part[:rows] for part in pieces],
            left=[part[rows:] for part in pieces],
        )
        for s, part in enumerate(call.of_shard):
            for r, request in enumerate(part):
                call.tokens[s, r, : len(request.tokens)] = request.tokens
                call.start[s, r], call.count[s, r] = request.start, len(request.tokens)
                call.table[s, r, : len(request.table)] = request.table
        return call

    def _cheapest(self, lengths: list[list[int]]) -> tuple[int, int]:
        """Rows and their width, with the least padding for what waits on each shard."""
        longest = max(n for part in lengths for n in part)

        def cost(width: int) -> tuple[int, int, int]:
            pieces = self._pieces(lengths, width)
            rows = self.rows(pieces, width)
            calls = -(-pieces // rows)
            return calls * rows * width, calls, -width

        width = min(buckets(_WIDTH, bucket(longest, _WIDTH, self.widest)), key=cost)
        return self.rows(self._pieces(lengths, width), width), width

    def _pieces(self, lengths: list[list[int]], width: int) -> int:
        return max(sum(-(-n // width) for n in part) for part in lengths)


def _cut(request: PrefillRequest, width: int) -> list[PrefillRequest]:
    """A request in pieces that fit rows of that width."""
    return [
        PrefillRequest(
            request.tokens[i : i + width], request.start + i, request.table, request.owner
        )
        for i in range(0, len(request.tokens), width)
    ]
