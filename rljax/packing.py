"""Packing responses into rows of one length: which row each goes to, and the way there and back.

Rows are filled best-fit decreasing (D. S. Johnson, 1973). Where the responses of a prompt share it,
a row holds `[prompt | response 1 | ... | response k]` of each of its groups. Responses see the
prompt and themselves, and count their positions on from it, so log-probabilities and gradients are
those of separate rows. Everything is decided on the host, by the lengths alone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from rljax.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of B responses, those of a group next to each other.

    Attributes:
      prompts: int [B], tokens of the prompt of each.
      totals: int [B], tokens of prompt and response together.
      group_size: Responses of a prompt that may share it; 1: none do.
    """

    prompts: np.ndarray
    totals: np.ndarray
    group_size: int = 1

    @property
    def shared(self) -> bool:
        """Whether prompts are shared."""
        return self.group_size > 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its response."""
        return int(self.totals.max(initial=0))

    @property
    def tokens(self) -> int:
        """Tokens to lay out, each shared prompt once."""
        if not self.shared:
            return int(self.totals.sum())
        return int((self.totals - self.prompts).sum() + self.prompts[:: self.group_size].sum())

    def take(self, index: np.ndarray) -> Lengths:
        """Those of some responses, whole groups."""
        return dataclasses.replace(self, prompts=self.prompts[index], totals=self.totals[index])


Fragment = tuple[int, ...]
"""Responses that lie in one row and share their prompt there; one alone where nothing is shared."""


@dataclasses.dataclass(frozen=True)
class Bins:
    """What each row holds.

    Attributes:
      rows: The fragments of each row, in order.
      shared: Whether a fragment's prompt stands apart from its responses.
    """

    rows: tuple[tuple[Fragment, ...], ...]
    shared: bool

    @property
    def most(self) -> int:
        """The most segments of a row, prompts that stand apart included."""
        return max((sum(len(f) + self.shared for f in row) for row in self.rows), default=0)

    def scored(self, lengths: Lengths) -> int:
        """The most tokens of responses in a row."""
        own = lengths.totals - lengths.prompts
        return max((int(sum(own[m] for f in row for m in f)) for row in self.rows), default=0)


def fill(lengths: Lengths, row_length: int, num_rows: int | None = None) -> Bins | None:
    """Chooses a row for each response: longest first into the fullest row that it fits in.

    Groups that share their prompt stay together where they fit in a row; where they fit in none
    they are divided among rows that have room, each with the prompt.

    Args:
      lengths: Of the responses.
      row_length: Tokens of a row.
      num_rows: Rows to be filled; None: the fewest that do.

    Returns:
      What each row holds, the empty rows left out; None where so many rows do not hold them all.

    Raises:
      InputError: A response is longer than a row.
    """
    if lengths.longest > row_length:
        raise InputError(
            f"row_length must hold the longest response, got {row_length} for "
            f"{lengths.longest} tokens: raise row_length"
        )
    if num_rows is None:
        for number in range(-(-lengths.tokens // row_length), len(lengths.totals) + 1):
            if (found := fill(lengths, row_length, number)) is not None:
                return found
        return Bins((), lengths.shared)
    rows = _Rows(lengths, row_length, num_rows)
    g = lengths.group_size
    whole = np.arange(len(lengths.totals)).reshape(-1, g)
    own = lengths.totals - lengths.prompts
    sizes = own[whole].sum(1) + lengths.prompts[whole[:, 0]]
    for unit in np.argsort(-sizes, kind="stable"):
        if not sizes[unit]:
            continue
        members = whole[unit]
        fits = sizes[unit] <= row_length and rows.add(members, int(sizes[unit]))
        if not fits and not (lengths.shared and rows.divide(members, own)):
            return None
    return Bins(tuple(tuple(row) for row in rows.held if row), lengths.shared)


class _Rows:
    """Rows that are being filled."""

    def __init__(self, lengths: Lengths, row_length: int, num_rows: int) -> None:
        self.held: list[list[Fragment]] = [[] for _ in range(num_rows)]
        self._prompts = lengths.prompts
        self._free = [(row_length, row) for row in range(num_rows)]  # (free tokens, row), sorted

    def add(self, members: Sequence[int], size: int) -> bool:
        """Puts a fragment into the fullest row that it fits in, if it fits in any."""
        place = bisect.bisect_left(self._free, (size, -1))
        if place == len(self._free):
            return False
        self._put(place, members, size)
        return True

    def divide(self, members: Sequence[int], own: np.ndarray) -> bool:
        """Divides a group among the rows with the most room, if they hold it."""
        left = sorted((int(m) for m in members), key=lambda m: (-own[m], m))
        prompt = int(self._prompts[left[0]])
        while left:
            room = self._free[-1][0] - prompt
            taken = []
            for member in left:
                if own[member] <= room:
                    taken.append(member)
                    room -= int(own[member])
            if not taken:
                return False
            left = [m for m in left if m not in taken]
            self._put(len(self._free) - 1, sorted(taken), prompt + int(own[taken].sum()))
        return True

    def _put(self, place: int, members: Sequence[int], size: int) -> None:
        free, row = self._free.pop(place)
        self.held[row].append(tuple(int(m) for m in members))
        bisect.insort(self._free, (free - size, row))


@struct.dataclass
class Cut:
    """How packed rows are cut into micro-batches.

    Attributes:
      live: int32, micro-batches that hold anything: the first ones. Only they are computed. None:
        all do.
      parts: Static: micro-batches that there is room for.
      scored: Static: a bound on the tokens of responses in a row.
    """

    live: Int[Array, ""] | None
    parts: int = struct.field(pytree_node=False)
    scored: int = struct.field(pytree_node=False)


@struct.dataclass
class Spans:
    """N runs of consecutive tokens, in the order of the packed tokens; unused ones come last.

    Attributes:
      start: int32 [N], the first packed token, counted over all rows.
      size: int32 [N], tokens.
      source: int32 [N], the response that they come from.
      column: int32 [N], the first of its columns.
      segment: int32 [N], their segment, from 1 in each row: first the responses, then the prompts.
      prefix: int32 [N], the segment that they see besides their own; 0 for none.
      copies: int32 [N], the responses that they belong to: several for a shared prompt.
    """

    start: Int[Array, " N"]
    size: Int[Array, " N"]
    source: Int[Array, " N"]
    column: Int[Array, " N"]
    segment: Int[Array, " N"]
    prefix: Int[Array, " N"]
    copies: Int[Array, " N"]


@struct.dataclass
class Layout:
    """Where the tokens of B responses [B, T] lie in packed rows [R, L].

    Attributes:
      spans: What lies where.
      prompts: int32 [B], the tokens of each prompt.
      totals: int32 [B], the tokens of prompt and response.
      prompt_start: int32 [B], the prompt's first packed token.
      response_start: int32 [B], the response's.
      cut: The micro-batches; None: rows for any other use.
      shape: Static: (R, L).
      max_segments: Static: a bound on the segments of a row.
      shared: Static: whether prompts are shared.
    """

    spans: Spans
    prompts: Int[Array, " B"]
    totals: Int[Array, " B"]
    prompt_start: Int[Array, " B"]
    response_start: Int[Array, " B"]
    cut: Cut | None
    shape: tuple[int, int] = struct.field(pytree_node=False)
    max_segments: int = struct.field(pytree_node=False)
    shared: bool = struct.field(pytree_node=False)

    def places(self) -> Places:
        """The layout spelled out for every packed token; jit-compatible."""
        token = jnp.arange(self.shape[0] * self.shape[1], dtype=jnp.int32).reshape(self.shape)
        number = jnp.searchsorted(self.spans.start, token, side="right") - 1
        span = jax.tree.map(lambda x: x[jnp.maximum(number, 0)], self.spans)
        step = token - span.start
        inside = (step >= 0) & (step < span.size)
        return Places(
            row=jnp.where(inside, span.source, 0),
            column=jnp.where(inside, span.column + step, 0),
            segments=jnp.where(inside, span.segment, 0),
            prefix=jnp.where(inside, span.prefix, 0) if self.shared else None,
            copies=jnp.where(inside, span.copies, 0) if self.shared else None,
        )

    def back(self, x: Array, length: int, empty: float = 0) -> Array:
        """Brings per-token results [R, L, ...] back to [B, length, ...]; jit-compatible.

        Args:
          x: Results on the packed rows.
          length: T.
          empty: The value of what is not laid out: padding.
        """
        column = jnp.arange(length, dtype=jnp.int32)[None]
        step = column - self.prompts[:, None]
        place = jnp.where(
            step < 0, self.prompt_start[:, None] + column, self.response_start[:, None] + step
        )
        there = column < self.totals[:, None]
        place = jnp.where(there, place, 0)
        taken = x[place // self.shape[1], place % self.shape[1]]
        there = there.reshape(there.shape + (1,) * (taken.ndim - 2))
        return jnp.where(there, taken, jnp.asarray(empty, taken.dtype))


@struct.dataclass
class Places:
    """Where each packed token [R, L] comes from, and what it sees.

    Attributes:
      row: int32, the response's row in [B, T].
      column: int32, its column.
      segments: int32, the segment in its row, 0 on padding.
      prefix: int32, the segment that it sees besides its own, 0 for none; None: nowhere.
      copies: int32, the responses that it belongs to, 0 for padding; None: one.
    """

    row: Int[Array, "R L"]
    column: Int[Array, "R L"]
    segments: Int[Array, "R L"]
    prefix: Int[Array, "R L"] | None
    copies: Int[Array, "R L"] | None

    @property
    def own(self) -> Array:
        """Bool [R, L], tokens that belong to one response: all but shared prompts and padding."""
        inside = self.segments > 0
        return inside if self.prefix is None else inside & (self.prefix > 0)

    def take(self, leaf: Any, empty: float = 0, prompts: bool = True) -> Array:
        """Lays a field [B, T, ...] out.

        Args:
          leaf: The field.
          empty: Its value on padding.
          prompts: Whether shared prompts have the field; else they get `empty`.
        """
        there = self.segments > 0 if prompts else self.own
        taken = jnp.asarray(leaf)[self.row, self.column]
        there = there.reshape(there.shape + (1,) * (taken.ndim - 2))
        return jnp.where(there, taken, jnp.asarray(empty, taken.dtype))


_Span = tuple[int, int, int, int, int, int, int]  # the fields of `Spans`, in order


def lay_out(
    bins: Bins,
    lengths: Lengths,
    shape: tuple[int, int],
    max_segments: int,
    *,
    order: Sequence[int] | None = None,
    cut: Cut | None = None,
) -> Layout:
    """The layout of filled rows.

    Args:
      bins: What each row holds.
      lengths: Of the responses.
      shape: (R, L), R at least the rows that are filled.
      max_segments: A bound on the segments of a row.
      order: Where each filled row goes; None: in order.
      cut: The micro-batches.
    """
    total, length = len(lengths.totals), shape[1]
    spans: list[_Span] = []
    own: Any = np.stack([lengths.prompts, lengths.totals]).astype(np.int32)
    at: Any = np.zeros((2, total), np.int32)  # the first packed token of each prompt and response
    for number, row in enumerate(bins.rows):
        place = length * (number if order is None else order[number])
        if bins.shared:
            spans += _shared_spans(row, lengths, place, at)
            continue
        for segment, (member,) in enumerate(row, start=1):
            size = int(lengths.totals[member])
            spans.append((place, size, member, 0, segment, 0, 1))
            at[:, member] = place, place + lengths.prompts[member]
            place += size
    table = np.zeros((7, max(2 * total, 1)), np.int32)
    table[0] = shape[0] * length  # unused spans lie behind all tokens
    if spans:
        table[:, : len(spans)] = np.asarray(sorted(spans), np.int32).T
    return Layout(
        Spans(*table),
        prompts=own[0],
        totals=own[1],
        prompt_start=at[0],
        response_start=at[1],
        cut=cut,
        shape=shape,
        max_segments=max_segments,
        shared=bins.shared,
    )


def _shared_spans(
    row: Sequence[Fragment], lengths: Lengths, place: int, at: np.ndarray
) -> Iterator[_Span]:
    """The spans of a row whose fragments have a prompt each; notes in `at` where they begin."""
    responses, segment = sum(len(f) for f in row), 0
    for number, fragment in enumerate(row, start=1):
        size, start = int(lengths.prompts[fragment[0]]), place
        yield place, size, fragment[0], 0, responses + number, 0, len(fragment)
        place += size
        for member in fragment:
            segment, first = segment + 1, int(lengths.prompts[member])
            own = int(lengths.totals[member]) - first
            yield place, own, member, first, segment, responses + number, 1
            at[:, member] = start, place
            place += own
