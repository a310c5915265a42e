"""The shapes of the rows that the device trains on, planned on the host from the groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rljax.rollouts import ScoredGroup

_LONGEST_SHARED = 2048  # tokens of a row; the cost of attention grows with its square
_WORTH = 0.8  # shared rows are used where they hold at most this share of the separate rows' tokens
_LENGTHS = 4  # different lengths that a prompt, a response or a row is padded to
_LEAST = 8  # tokens between two of them


@dataclasses.dataclass(frozen=True)
class RowShapes:
    """The shapes of one rollout batch; each is compiled once.

    Attributes:
      length: T, tokens of a row that holds one prompt and one response.
      shared: Tokens kept for the prompt and for each response in rows where the responses of a
        group share their prompt; None: separate rows are used.
    """

    length: int
    shared: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.shared is None:
            return f"rows of {self.length} tokens"
        return f"shared rows of {self.shared[0]} prompt tokens and {self.shared[1]} per response"


@dataclasses.dataclass(frozen=True)
class RowPlanner:
    """Chooses row shapes, few of them and with bounded padding.

    Lengths are rounded up to one of at most four, a quarter of the longest apart and at least 8
    tokens: a row is padded by less than a quarter of the longest row, or by 7 tokens.

    Attributes:
      max_prompt_length: Tokens of the longest prompt.
      max_completion_length: Tokens of the longest response.
      group_size: Responses of a prompt, G.
      may_share: Whether the responses of a group may share their prompt.
      divisor: Every length is a multiple of it: the size of the mesh's context axis.
    """

    max_prompt_length: int
    max_completion_length: int
    group_size: int
    may_share: bool = False
    divisor: int = 1

    def plan(self, groups: Sequence[ScoredGroup]) -> RowShapes:
        """The shapes for these groups.

        Args:
          groups: The groups of a rollout batch.
        """
        prompt = max(len(g.prompt.tokens) for g in groups)
        response = max(len(r.tokens) for g in groups for r in g.responses)
        need = max(len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses)
        length = self._round(need, self.max_prompt_length + self.max_completion_length)
        if not self.may_share:
            return RowShapes(length)
        shared = (
            self._round(prompt, self.max_prompt_length),
            self._round(response, self.max_completion_length),
        )
        row = shared[0] + self.group_size * shared[1]
        few = row <= _WORTH * self.group_size * length
        return RowShapes(length, shared if few and row <= _LONGEST_SHARED else None)

    def _round(self, need: int, longest: int) -> int:
        step = max(-(-longest // _LENGTHS), _LEAST)
        length = min(-(-need // step) * step, longest)
        return -(-length // self.divisor) * self.divisor
