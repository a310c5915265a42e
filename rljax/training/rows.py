"""The rows that the device trains on, planned on the host from the lengths of the responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.packing import Bins, Cut, Layout, Lengths, fill, lay_out
from rljax.rollouts import ScoredGroup
from rljax.training.row_cost import RowCost

_LENGTHS = 4  # different lengths that a row of one response is padded to
_LEAST = 8  # tokens between two of them
_EIGHTHS = (5, 6, 7, 8)  # of a power of two of the budget: sizes of a micro-batch
_SMALL = 1024  # tokens of a micro-batch that no smaller one is compiled for
_LOGITS = 0.1  # share of logits in the work for a token from which they are bounded


@dataclasses.dataclass(frozen=True, eq=False)
class RowShapes:
    """The responses of one rollout batch as rows.

    Attributes:
      length: T, tokens of a row that holds one prompt and one response.
      lengths: Those of the responses.
    """

    length: int
    lengths: Lengths

    def __str__(self) -> str:
        return f"rows of {self.length} tokens"

    @property
    def padding(self) -> float:
        """The share of padding in rows of one response."""
        return 1 - float(self.lengths.totals.sum()) / (self.length * len(self.lengths.totals))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """A layout of some responses, and what is told of it.

    Attributes:
      layout: Where each token goes.
      rows: Rows of a micro-batch on each device.
      length: T, tokens of the rows of one response that they come from.
      padding: The share of padding among the tokens that are computed.
    """

    layout: Layout
    rows: int
    length: int
    padding: float

    def __str__(self) -> str:
        """The shapes that programs are compiled for."""
        layout, cut = self.layout, self.layout.cut
        assert cut is not None
        return (
            f"packed rows of {layout.shape[1]} tokens, {self.rows} a device at a time, up to "
            f"{cut.parts} times ({cut.scored} scored, {layout.max_segments} segments, from rows of "
            f"{self.length}{', prompts shared' if layout.shared else ''})"
        )


@dataclasses.dataclass(frozen=True)
class RowPlanner:
    """Lays responses out as rows of few shapes and with little padding.

    A row of one response is padded to one of at most four lengths, a quarter of the longest apart
    and at least 8 tokens. Packed, a micro-batch has the budget's tokens on each device, or 5, 6, 7
    or 8 eighths of it halved as often as needed, in 1, 2, 4, ... rows. Of the ways to pack, with
    prompts shared and not, the one of least cost is taken. All of it follows from the lengths, so
    that a resumed run decides alike.

    Attributes:
      max_prompt_length: Tokens of the longest prompt.
      max_completion_length: Tokens of the longest response.
      group_size: Responses of a prompt, G.
      packs: Whether several responses may lie in a row.
      shares: Whether, packed, the responses of a group may share their prompt.
      shards: Devices over which rows are split.
      divisor: Every length is a multiple of it: the size of the mesh's context axis.
      micro_batch_tokens: The budget: tokens of a micro-batch on each device; 0: as follows from
        `micro_batch_size`.
      micro_batch_size: Responses whose longest rows make up the budget; 0: all there are.
      cost: What rows cost.
    """

    max_prompt_length: int
    max_completion_length: int
    group_size: int
    packs: bool = False
    shares: bool = False
    shards: int = 1
    divisor: int = 1
    micro_batch_tokens: int = 0
    micro_batch_size: int = 0
    cost: RowCost = dataclasses.field(default_factory=RowCost)

    def plan(self, groups: Sequence[ScoredGroup]) -> RowShapes:
        """The rows for these groups.

        Args:
          groups: The groups of a rollout batch.
        """
        prompts = np.asarray([len(g.prompt.tokens) for g in groups for _ in g.responses])
        own = np.asarray([len(r.tokens) for g in groups for r in g.responses])
        lengths = Lengths(prompts, prompts + own, self.group_size)
        return RowShapes(self._round(lengths.longest), lengths)

    def pack(self, shapes: RowShapes, index: np.ndarray | None = None) -> PackedRows | None:
        """The layout of some responses of a batch; None where rows are not packed.

        Args:
          shapes: Of the batch.
          index: Which responses, whole groups; None: all.
        """
        if not self.packs:
            return None
        lengths = shapes.lengths if index is None else shapes.lengths.take(index)
        ways = [dataclasses.replace(lengths, group_size=1)]
        if self.shares and self.group_size > 1:
            ways.append(lengths)
        return self._laid(self._cheapest(ways), shapes.length)

    def _budget(self, responses: int) -> int:
        """Tokens of a micro-batch on each device."""
        if self.micro_batch_tokens:
            return self.micro_batch_tokens
        at_once = self.micro_batch_size or -(-responses // self.shards)
        return at_once * (self.max_prompt_length + self.max_completion_length)

    def _cheapest(self, ways: Sequence[Lengths]) -> _Candidate:
        """The packing of least cost; what cannot be the cheapest is not tried."""
        tried = []
        for way in ways:
            budget = max(self._budget(len(way.totals)), 1)
            for rows, length in self._sizes(budget, way.longest):
                at_once = self.shards * rows * length
                live = max(-(-way.tokens // at_once), 1)
                # Few shapes: small micro-batches only where few of them hold all.
                enough = max(min(_SMALL, budget), budget * min(0.74, (live - 1) / 3))
                if length == self._round(way.longest) or rows * length >= enough:
                    tried.append((self._least(live, rows, length), length, rows, live, way))
        best: _Candidate | None = None
        for least, length, rows, live, way in sorted(tried, key=lambda t: t[:4]):
            while best is None or least <= best.cost:
                bins = fill(way, length, live * rows * self.shards)
                if bins is not None:
                    found = self._candidate(way, bins, rows, length)
                    best = found if best is None or found.rank < best.rank else best
                    break
                live += 1
                least = self._least(live, rows, length)
        assert best is not None  # since every response has a row
        return best

    def _sizes(self, budget: int, longest: int) -> set[tuple[int, int]]:
        """Rows of a micro-batch on each device, and their lengths."""
        least = self._round(longest)
        if least > budget:
            return {(1, least)}
        found, rows = {(budget // least, least)}, 1  # and rows of one response each
        while budget // rows >= least:
            halved = budget
            while halved // rows >= least:
                found |= {(rows, self._down(halved * k // 8 // rows)) for k in _EIGHTHS}
                halved //= 2
            rows *= 2
        return {(rows, length) for rows, length in found if length >= longest}

    def _down(self, length: int) -> int:
        unit = self.divisor * (128 if length >= 1024 * self.divisor else 8)
        return length // unit * unit

    def _least(self, live: int, rows: int, length: int) -> float:
        """A bound on the cost of so many micro-batches: without logits, and attention to itself."""
        total = live * rows * self.shards
        square = 0 if self.cost.reach(rows, length) == "seen" else total * length**2 / 2
        return self.cost.of(live, total * length, 0, square)

    def _candidate(self, lengths: Lengths, bins: Bins, rows: int, length: int) -> _Candidate:
        scored = length  # in sixteenths of a row, where that is worth another program
        if rows * length >= _SMALL and self.cost.logits > _LOGITS * self.cost.token:
            sixteenths = -(-bins.scored(lengths) * 16 // length)
            scored = min(-(-sixteenths * length // 16), length)
        live = max(-(-len(bins.rows) // (rows * self.shards)), 1)
        total, shape = live * rows * self.shards, (rows, length)
        scores = [self.cost.scores(row, lengths, bins.shared, shape) for row in bins.rows]
        empty = self.cost.scores((), lengths, bins.shared, shape) * (total - len(scores))
        cost = self.cost.of(live, total * length, total * scored, sum(scores) + empty)
        return _Candidate(cost, length, rows, scored, live, bins, lengths, tuple(scores))

    def _laid(self, best: _Candidate, length: int) -> PackedRows:
        """Rows in their places: those of like cost at the same time, evenly over the devices."""
        parts = 1 << (best.live - 1).bit_length()
        at_once = best.rows * self.shards
        order = [0] * len(best.bins.rows)
        by_cost = sorted(range(len(order)), key=lambda row: (-best.scores[row], row))
        for turn, row in enumerate(by_cost):
            part, place = divmod(turn, at_once)
            slot, device = divmod(place, self.shards)
            device = self.shards - 1 - device if slot % 2 else device
            order[row] = (device * best.rows + slot) * parts + part
        most = 16
        while most < best.bins.most:
            most *= 4
        live: Any = np.int32(best.live)
        layout = lay_out(
            best.bins,
            best.lengths,
            (at_once * parts, best.length),
            most,
            order=order,
            cut=Cut(live, parts, best.scored),
        )
        filled = int(np.sum(layout.spans.size))
        padding = 1 - filled / (best.live * at_once * best.length)
        return PackedRows(layout, best.rows, length, padding)

    def _round(self, need: int) -> int:
        longest = self.max_prompt_length + self.max_completion_length
        step = max(-(-longest // _LENGTHS), _LEAST)
        length = min(-(-need // step) * step, longest)
        return -(-length // self.divisor) * self.divisor


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A way to pack.

    Attributes:
      cost: Of computing it.
      length: Tokens of a row.
      rows: Rows of a micro-batch on each device.
      scored: A bound on the tokens of responses in a row.
      live: Micro-batches.
      bins: What each row holds.
      lengths: Of the responses; they say whether prompts are shared.
      scores: Query-key pairs that are computed in each row.
    """

    cost: float
    length: int
    rows: int
    scored: int
    live: int
    bins: Bins
    lengths: Lengths
    scores: tuple[float, ...]

    @property
    def rank(self) -> tuple[float, bool, int]:
        """What is better is less."""
        return self.cost, self.bins.shared, self.length
