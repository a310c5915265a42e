"""Stop strings, looked for in the text of the newest tokens alone."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are no character yet
_MOST_PENDING = 8  # tokens that may wait for the rest of a character
_CHARACTER = 3  # tokens of a character's bytes that may still miss the last


class StopStrings:
    """The text of one response as it grows, and the first stop string in it.

    A token's text depends on its neighbours: a character may span tokens, and decoders drop a space
    at the start. So each token is decoded together with the piece before it, and text that ends in
    the middle of a character is decoded again with the next token. The work for a token does not
    depend on how long the response is.

    Attributes:
      lengths: Characters of the text of the first 0, 1, 2, ... tokens; those of unfinished
        characters are not counted.
    """

    def __init__(self, stop: tuple[str, ...], detokenize: Detokenize) -> None:
        self._stop = stop
        self._detokenize = detokenize
        self._longest = max(map(len, stop))
        self._context: list[int] = []  # tokens whose text is known, decoded before the pending ones
        self._context_text = ""
        self._pending: list[int] = []
        self._length = 0  # characters of the text that is known
        self._tail = ""  # its end, shorter than the longest stop string
        self.lengths = [0]

    def add(self, token: int) -> int | None:
        """Takes the next token.

        Returns:
          Where the text begins, in characters, of the stop string that this token completes; the
          leftmost of several. None if it completes none.
        """
        self._pending.append(token)
        piece = self._piece(self._pending)
        text = self._tail + piece
        self.lengths.append(self._length + len(piece.rstrip(_UNFINISHED)))
        start = self._length - len(self._tail)
        known = self.lengths[-2] - start  # no stop string may lie wholly within these characters
        found = (text.find(stop, max(known - len(stop) + 1, 0)) for stop in self._stop)
        places = [place for place in found if place >= 0]
        if not piece.endswith(_UNFINISHED):
            self._settle(len(self._pending), piece)
        elif len(self._pending) >= _MOST_PENDING:  # no character is that long
            settled = self._pending[:-_CHARACTER]
            self._settle(len(settled), self._piece(settled))
        return start + min(places) if places else None

    def tokens_before(self, place: int) -> int:
        """How many tokens lie wholly before a place in the text."""
        tokens = bisect.bisect_left(self.lengths, place)
        return tokens if self.lengths[tokens] == place else tokens - 1

    def _piece(self, pending: list[int]) -> str:
        return self._detokenize([*self._context, *pending])[len(self._context_text) :]

    def _settle(self, count: int, piece: str) -> None:
        settled, self._pending = self._pending[:count], self._pending[count:]
        self._length += len(piece)
        self._tail = (self._tail + piece)[-(self._longest - 1) :] if self._longest > 1 else ""
        # Tokens without a text, such as special ones, say nothing about what follows them.
        whole = [*self._context, *settled]
        self._context = settled if piece or len(whole) > _MOST_PENDING else whole
        self._context_text = self._detokenize(self._context)
