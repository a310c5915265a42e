"""Masks: which responses, or tokens, train. None touches a group's statistics.

Under jit nothing is cut out: dropping means weight 0. With `keep_denominator=False` dropped
tokens leave the denominators and every term; with True they stay in the denominators and only their
surrogate is dropped.
"""

import dataclasses
from typing import ClassVar

from rljax.errors import InputError
from rljax.losses import groups
from rljax.losses.base import Draft, Level, Scope, Transform, check_level
from rljax.losses.sequences import SequenceLayout


@dataclasses.dataclass(frozen=True)
class Mask(Transform):
    """Base of the masks: takes and gives a `Draft`."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, draft: Draft) -> Draft:
        """Drops tokens."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class mask_truncated(Mask):
    """Drops responses cut off by the length limit (overlong filtering, arXiv:2503.14476).

    Their rewards still enter their group's mean and standard deviation.

    Args:
      keep_denominator: Whether they still count in the denominators.
    """

    keep_denominator: bool = False

    def __call__(self, draft: Draft) -> Draft:
        """Drops tokens."""
        return draft.drop(draft.truncated[:, None], self.keep_denominator)


@dataclasses.dataclass(frozen=True)
class drop_zero_variance(Mask):
    """Drops prompts whose valid raw scores are all equal (dynamic sampling, arXiv:2503.14476).

    Judged by the score, not by the shaped reward: a length penalty must not revive them.

    Args:
      keep_denominator: Whether they still count in the denominators.
    """

    scope: ClassVar[Scope] = "batch"
    keep_denominator: bool = False

    def __call__(self, draft: Draft) -> Draft:
        """Drops tokens."""
        equal = groups.statistics(draft.scores, draft.valid, draft.group).equal
        return draft.drop(equal[:, None], self.keep_denominator)


@dataclasses.dataclass(frozen=True)
class top_entropy(Mask):
    """Trains only the tokens of highest entropy at the start of the step (arXiv:2506.01939).

    At level 'sequence' it trains only the responses whose tokens have the highest mean entropy.

    Args:
      quantile: Share of the rollout batch's trained tokens (or responses) that is kept, e.g. 0.2.
      keep_denominator: Whether the others still count in the denominators.
      level: 'token' or 'sequence'.
    """

    scope: ClassVar[Scope] = "batch"
    quantile: float
    keep_denominator: bool = True
    level: Level = "token"

    def __post_init__(self) -> None:
        check_level(self.level)
        if not 0 < self.quantile <= 1:
            raise InputError(f"quantile must be in (0, 1], got {self.quantile}: 0.2 is usual")

    @property
    def gates_tokens(self) -> bool:  # type: ignore[override]
        """At level 'token'."""
        return self.level == "token"

    def for_sequences(self) -> "top_entropy":
        """The same by responses."""
        return dataclasses.replace(self, level="sequence")

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The entropies at the start of the step."""
        return frozenset({"old_entropy"})

    def __call__(self, draft: Draft) -> Draft:
        """Drops tokens."""
        entropy = draft.field("old_entropy", self)
        counted = draft.counted()
        if self.level == "sequence":
            layout = SequenceLayout()
            entropy, counted = layout.averages(entropy, counted), layout.any(counted)
        kept = groups.top_share(entropy, counted, self.quantile)
        return draft.drop(draft.mask & ~kept, self.keep_denominator)
