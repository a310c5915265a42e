"""What rows cost to compute: their tokens, the tokens that are scored, and attention's scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljax.packing import Fragment, Lengths

if TYPE_CHECKING:
    from rljax.models import ModelConfig

ATTENTION_SHARE = 4.0
"""Operations of a matmul that take the time of one of attention: products of narrow matrices, with
a softmax between them. Measured on CPU: an update of speed-s took 1.1 ms a token and 1.3 µs a
score, of 151M and 49k operations."""

MICRO_BATCH_TOKENS = 128.0
"""Tokens whose time a micro-batch costs besides its own: weights are read and gradients added."""


def _whole_rows(length: int) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class RowCost:
    """Operations of a forward pass over rows; what it takes backwards is in proportion.

    Attributes:
      token: Operations for a token, but for attention's scores and logits.
      logits: For the logits of a token.
      score: For a query and a key, in all layers.
      skips: Whether attention passes over the keys that no query of a block sees, given the length
        of rows; else it computes the whole square. None: it does not.
      block: Tokens of such a block.
    """

    token: float = 1.0
    logits: float = 0.0
    score: float = 0.0
    skips: Callable[[int], bool] = _whole_rows
    block: int = 128

    def of(self, live: int, tokens: float, scored: float, scores: float) -> float:
        """Operations, those of attention weighted by `ATTENTION_SHARE`.

        Args:
          live: Micro-batches.
          tokens: Tokens of the rows, padding included.
          scored: Tokens whose logits are formed.
          scores: Pairs of a query and a key that are computed.
        """
        attention = ATTENTION_SHARE * self.score * scores
        tokens += MICRO_BATCH_TOKENS * live
        return self.token * tokens + self.logits * scored + attention

    def scores(self, row: Sequence[Fragment], lengths: Lengths, shared: bool, length: int) -> float:
        """Pairs of a query and a key that are computed for a row.

        A response of R tokens behind a prompt of P that it shares: R·P + R²/2, and the prompt
        P²/2 once; alone, (P + R)²/2. Blocks are computed whole, which adds half a block a token.

        Args:
          row: The fragments that it holds.
          lengths: Of the responses.
          shared: Whether a fragment's prompt stands apart.
          length: Tokens of the row.
        """
        if not self.skips(length):
            return float(length) ** 2
        pairs, half = 0.0, self.block / 2
        for fragment in row:
            members = np.asarray(fragment)
            prompts, totals = lengths.prompts[members], lengths.totals[members]
            if shared:
                own, prompt = (totals - prompts).astype(float), float(prompts[0])
                pairs += prompt * (prompt / 2 + half)
                pairs += float((own * (own / 2 + half + prompt)).sum())
            else:
                pairs += float((totals * (totals / 2.0 + half)).sum())
        return min(pairs, float(length) ** 2)


def row_cost(config: ModelConfig) -> RowCost:
    """The cost of a model's rows, with the attention that it would use for them here."""
    from rljax.monitoring.flops import model_flops_per_token

    without = model_flops_per_token(config, 0)
    logits = 2.0 * config.vocab_size * config.hidden_size
    return RowCost(
        token=without - logits,
        logits=logits,
        score=model_flops_per_token(config, 1) - without,
    )
