"""The rounds of a call: admit and prefill, send a chunk, read what it drew."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rljax.sampling.adjustments import AdjustmentShape
from rljax.sampling.decode import GATHERED
from rljax.sampling.decode_rows import arrange
from rljax.sampling.responses import Collector, Response
from rljax.sampling.runner import Chunk, Runner
from rljax.sampling.scheduler import Group, Shard


class DecodeLoop:
    """Drives the runner by the plans of the shards.

    Args:
      runner: What runs on the device.
      shards: The plan of each shard.
      chunk: Most decode steps per host synchronisation.
    """

    def __init__(self, runner: Runner, shards: list[Shard], chunk: int) -> None:
        self._runner, self._shards, self._chunk = runner, shards, chunk

    def run(self, groups: list[Group], collector: Collector) -> Iterator[list[Response]]:
        """Yields the responses of each group as soon as it is finished.

        Args:
          groups: The call's; group i runs on shard i modulo their number.
          collector: Adds up what they draw.
        """
        for i, group in enumerate(groups):
            shard = self._shards[i % len(self._shards)]
            for member in group.members:
                heapq.heappush(shard.waiting, member)
        adjust = AdjustmentShape.of(m.sampling for group in groups for m in group.members)
        chunk: Chunk | None = None
        while any(s.active or s.waiting for s in self._shards):
            if chunk is None:
                for shard in self._shards:
                    shard.grow(self._chunk)
                self.admit()
                rows = arrange([shard.active for shard in self._shards], self._runner.shapes)
                count = len(rows.of_shard[0])
                chunk = self._runner.send(rows, self._min_active(count), adjust)
            # The device goes on with the same rows while the host reads what they drew.
            following = None
            if adjust is None and self.can_overlap(chunk) and self.reserve():
                min_active = self._min_active(len(chunk.rows.of_shard[0]))
                following = self._runner.send(chunk.rows, min_active, after=chunk)
            done = self.collect(chunk, collector)
            chunk = following
            for group in done:
                if not group.over:
                    group.over = True
                    if any(m.sampling.prompt_logprobs for m in group.members):
                        group.prompt_logp = self._runner.score(group.prompt)
                    yield collector.responses(group)

    def admit(self) -> None:
        """Gives free slots to waiting sequences, and fills the pages that they need."""
        plans = [shard.admit(self._chunk) for shard in self._shards]
        self._runner.prefill([to_prefill for to_prefill, _ in plans])
        for shard in self._shards:
            shard.remember()
        if any(copies for _, copies in plans):
            self._runner.copy_pages([copies for _, copies in plans])

    def can_overlap(self, chunk: Chunk) -> bool:
        """Whether the next chunk may begin before the host has read what this one drew.

        Not where pages are gathered for each chunk; where sequences wait for slots or pages, stop
        strings are to be found or the chunk still holds a cancelled group; or where fewer rows
        would do or nothing is left to draw.
        """
        if self._runner.attention == GATHERED or any(shard.waiting for shard in self._shards):
            return False
        if any(q.sampling.stop or (q.group.over and not q.finish_reason) for *_, q in chunk.rows):
            return False
        left = [q.limit - len(q.tokens) for shard in self._shards for q in shard.active]
        return max(left) > self._chunk and all(
            not min_active or len(shard.active) > min_active
            for shard, min_active in zip(self._shards, chunk.min_active, strict=True)
        )

    def reserve(self) -> bool:
        """Gives all sequences pages for this chunk and the next; whether there were enough."""
        return all([shard.reserve(2 * self._chunk) for shard in self._shards])

    def _min_active(self, rows: int) -> list[int]:
        """For each shard, with how few active sequences a chunk of so many rows is to end."""
        return [self._min_active_of(shard, rows) for shard in self._shards]

    def _min_active_of(self, shard: Shard, rows: int) -> int:
        slots, active = self._runner.sizes.slots, len(shard.active)
        fewer = self._runner.shapes.fewer(rows)
        # A shard that needs no more rows than those already waits for no other.
        smaller = fewer if active > fewer else 0
        for_waiting = active - max(slots // 8, 1) if shard.waiting else 0
        return max(smaller, for_waiting, 0)

    def collect(self, chunk: Chunk, collector: Collector) -> list[Group]:
        """Adds what a chunk drew to its sequences; returns the groups that are finished by it."""
        done, output = [], self._runner.fetch(chunk)
        for s, row, q in chunk.rows:
            if q.slot is None:  # finished or cancelled since the chunk was sent
                continue
            place = s * len(chunk.rows.of_shard[s]) + row
            reason = collector.add(q, output, place, chunk.version)
            if reason is not None:
                self._shards[s].finish(q, reason)
                if all(m.finish_reason for m in q.group.members):
                    done.append(q.group)
        return done
