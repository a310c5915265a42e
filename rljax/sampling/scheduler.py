"""Host-side plan of one data shard: which sequences wait or hold a slot, and their pages."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from rljax.sampling.pages import PageAllocator, prefix_keys
from rljax.sampling.params import SamplingParams


@dataclasses.dataclass(eq=False)
class Group:
    """A prompt and the samples that share its pages.

    Attributes:
      index: Place of the prompt in the call.
      prompt: int32 [n].
      pages: Pages of the prompt's first n-1 tokens, held while a member is decoding; the last of
        them may be partly filled and is copied for each member that will write to it.
      members: Its sequences.
      routing: int32 [n-1, layers, k], of those tokens; None unless requested.
      prompt_logp: float32 [n], of the prompt's tokens; None unless requested.
      over: Whether its responses were yielded or it was cancelled.
    """

    index: int
    prompt: np.ndarray
    pages: list[int] | None = None
    members: list[Sequence] = dataclasses.field(default_factory=list)
    routing: np.ndarray | None = None
    prompt_logp: np.ndarray | None = None
    over: bool = False

    def idle(self) -> bool:
        """Whether it holds pages of its prompt while none of its members decodes."""
        return self.pages is not None and all(m.slot is None for m in self.members)


@dataclasses.dataclass(eq=False)
class Sequence:
    """One response in the making.

    Attributes:
      order: Its place in the order of requests; the youngest has the highest.
      group: The group it belongs to.
      key: seed, prompt id, draw, sample id: its random key.
      sampling: How it is drawn.
      limit: Most tokens it may draw.
      tokens, logp, versions: What was drawn so far.
      records: What else was requested, by the names of `Response`: an array for each chunk.
      slot: The slot it decodes in; None while it waits and when it is done.
      pages: Its page table: shared pages first, then its own.
      finish_reason: Set when it is done.
    """

    order: int
    group: Group
    key: tuple[int, int, int, int]
    sampling: SamplingParams
    limit: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    records: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    @property
    def sample(self) -> int:
        """Which of the group's samples."""
        return self.key[3]

    @property
    def num_computed_tokens(self) -> int:
        """How many tokens must be in the cache before its next decode step."""
        return len(self.group.prompt) + len(self.tokens) - 1

    @property
    def last_token(self) -> int:
        """The token that its next decode step feeds."""
        return int(self.tokens[-1] if self.tokens else self.group.prompt[-1])


@dataclasses.dataclass
class PrefillRequest:
    """Tokens to prefill: `tokens` from position `start` into the pages of `table`."""

    tokens: np.ndarray
    start: int
    table: list[int]
    owner: Group | Sequence


class Shard:
    """The slots, pages and queue of one data shard.

    Every decision depends on the requests and their order alone, never on time.

    Attributes:
      slots: The sequence that decodes in each; None where none does.
      waiting: A heap, the oldest request first.
      num_preemptions: How many sequences were preempted for want of pages, so far.
      prefix_hits: How many tokens of prompts were found in cached pages, so far.
    """

    def __init__(
        self, slots: int, num_pages: int, page_size: int, prefix_cache: bool = True
    ) -> None:
        self.page_size = page_size
        self.pages = PageAllocator(num_pages)
        self.slots: list[Sequence | None] = [None] * slots
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_hits = 0
        self._prefix_cache = prefix_cache
        self._admitted: list[Group] = []

    @property
    def active(self) -> list[Sequence]:
        """The sequences that hold a slot."""
        return [s for s in self.slots if s is not None]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, chunk: int) -> tuple[list[PrefillRequest], list[tuple[int, int]]]:
        """Gives free slots to waiting sequences in their order, as far as pages reach.

        Returns:
          What must be prefilled (prompts before continuations), and page copies (source, target)
          to make after it.
        """
        prompts: list[PrefillRequest] = []
        rest: list[PrefillRequest] = []
        copies: list[tuple[int, int]] = []
        while self.waiting and None in self.slots:
            sequence = self.waiting[0]
            group = sequence.group
            shared_tokens = len(group.prompt) - 1
            full = shared_tokens // self.page_size
            partial = shared_tokens % self.page_size > 0
            ahead = min(chunk, sequence.limit - len(sequence.tokens))
            own = self._pages_for(sequence.num_computed_tokens + ahead) - full
            hits: list[int] = []
            prompt_pages = 0
            if group.pages is None:
                if self._prefix_cache:
                    hits = self.pages.find(self._keys(group))
                prompt_pages = self._pages_for(shared_tokens) - len(hits)
            self.pages.share(hits)  # first, so that none of them is taken
            taken = self.pages.take(own + prompt_pages)
            if taken is None:
                self.pages.release(hits)
                break
            heapq.heappop(self.waiting)
            if group.pages is None:
                group.pages, taken = hits + taken[:prompt_pages], taken[prompt_pages:]
                group.routing = self.pages.routing(hits)
                start = len(hits) * self.page_size
                self.prefix_hits += start
                self._admitted.append(group)
                if start < shared_tokens:
                    prompts.append(
                        PrefillRequest(group.prompt[start:-1], start, group.pages, group)
                    )
            self.pages.share(group.pages[:full])
            sequence.pages = group.pages[:full] + taken
            sequence.slot = self.slots.index(None)
            self.slots[sequence.slot] = sequence
            if sequence.tokens:  # preempted before: what it had drawn is computed again
                start = full * self.page_size
                tokens = np.concatenate([group.prompt, sequence.tokens])[start:-1]
                rest.append(
                    PrefillRequest(tokens.astype(np.int32), start, sequence.pages, sequence)
                )
            elif partial:
                copies.append((group.pages[full], taken[0]))
        return prompts + rest, copies

    def remember(self) -> None:
        """Caches the prompts admitted last; their prefill must have been sent."""
        for group in self._admitted:
            if self._prefix_cache and group.pages is not None:
                for i, key in enumerate(self._keys(group)):
                    tokens = slice(i * self.page_size, (i + 1) * self.page_size)
                    routing = None if group.routing is None else group.routing[tokens]
                    self.pages.keep(group.pages[i], key, routing)
        self._admitted = []

    def _keys(self, group: Group) -> list[bytes]:
        return prefix_keys(group.prompt[:-1], self.page_size)

    def grow(self, chunk: int) -> None:
        """Gives each active sequence pages for the next chunk.

        Where they run out, the youngest sequence is preempted: it waits, and keeps what it has
        drawn.
        """
        for sequence in sorted(self.active):
            while sequence.slot is not None:
                taken = self.pages.take(self._missing(sequence, chunk))
                if taken is not None:
                    sequence.pages += taken
                    break
                if not self._reclaim():
                    youngest = max(self.active)
                    self._leave(youngest)
                    heapq.heappush(self.waiting, youngest)
                    self.num_preemptions += 1

    def reserve(self, tokens: int) -> bool:
        """Gives all active sequences pages for so many more tokens, if that preempts none."""
        missing = [(sequence, self._missing(sequence, tokens)) for sequence in self.active]
        if sum(n for _, n in missing) > self.pages.num_free:
            return False
        for sequence, n in missing:
            sequence.pages += self.pages.take(n) or []
        return True

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a sequence lacks for so many more tokens, or for those it may still draw."""
        ahead = min(tokens, sequence.limit - len(sequence.tokens))
        return max(self._pages_for(sequence.num_computed_tokens + ahead) - len(sequence.pages), 0)

    def _reclaim(self) -> bool:
        """Frees prompt pages held for groups of which no member decodes."""
        for sequence in self.waiting:
            if sequence.group.idle():
                self._release_prompt(sequence.group)
                return True
        return False

    def _release_prompt(self, group: Group) -> None:
        if group.pages is not None:
            self.pages.release(group.pages)
            group.pages = None

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.slots[sequence.slot] = None
            sequence.slot = None
        self.pages.release(sequence.pages)
        sequence.pages = []

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Frees a sequence's slot and pages; the last of a group frees the prompt's too."""
        sequence.finish_reason = reason
        self._leave(sequence)
        if all(m.finish_reason for m in sequence.group.members):
            self._release_prompt(sequence.group)

    def cancel(self, group: Group) -> None:
        """Drops a group, its members decoding or waiting, and frees its pages."""
        for member in group.members:
            self._leave(member)
        self.waiting = [s for s in self.waiting if s.group is not group]
        heapq.heapify(self.waiting)
        self._release_prompt(group)

    def clear(self) -> None:
        """Drops everything: all pages are free afterwards, though prompts stay cached."""
        groups = {id(s.group): s.group for s in [*self.active, *self.waiting]}
        for sequence in self.active:
            self._leave(sequence)
        for group in groups.values():
            self._release_prompt(group)
        self.waiting, self._admitted = [], []

    def reset(self) -> None:
        """Forgets all sequences and pages, after an error that may have left them inconsistent."""
        self.pages = PageAllocator(self.pages.num_pages)
        self.slots = [None] * len(self.slots)
        self.waiting, self._admitted = [], []
