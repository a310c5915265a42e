"""What rows cost to compute: their tokens, the tokens that are scored, and attention's scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from rljax_kernels.attention import Asked

from rljax.models.attention import choose_backend
from rljax.packing import Fragment, Lengths

if TYPE_CHECKING:
    from rljax.models import ModelConfig

ATTENTION_SHARE = 4.0
"""Operations of a matmul that take the time of one of attention: products of narrow matrices, with
a softmax between them. Measured on CPU: an update of speed-s took 1.1 ms a token and 1.3 µs a
score, of 151M and 49k operations."""

MICRO_BATCH_TOKENS = 128.0
"""Tokens whose time a micro-batch costs besides its own: weights are read and gradients added."""


Reach = Literal["seen", "causal", "all"]
"""Which pairs of a query and a key of a row are computed: those of blocks that a query sees any of,
those of keys before the query, or all."""
_REACH: dict[str, Reach] = {"reference": "all", "cudnn": "causal"}  # all others: seen


def _all(rows: int, length: int) -> Reach:
    return "all"


@dataclasses.dataclass(frozen=True)
class RowCost:
    """Operations of a forward pass over rows; what it takes backwards is in proportion.

    Attributes:
      token: Operations for a token, but for attention's scores and logits.
      logits: For the logits of a token.
      score: For a query and a key, in all layers.
      reach: Which pairs are computed, for so many rows of a length on a device.
      block: Tokens of such a block.
    """

    token: float = 1.0
    logits: float = 0.0
    score: float = 0.0
    reach: Callable[[int, int], Reach] = _all
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

    def scores(
        self, row: Sequence[Fragment], lengths: Lengths, shared: bool, shape: tuple[int, int]
    ) -> float:
        """Pairs of a query and a key that are computed for a row.

        A response of R tokens behind a prompt of P that it shares: R·P + R²/2, and the prompt
        P²/2 once; alone, (P + R)²/2. Blocks are computed whole, which adds half a block a token.

        Args:
          row: The fragments that it holds.
          lengths: Of the responses.
          shared: Whether a fragment's prompt stands apart.
          shape: Rows that a device computes at once, and their tokens.
        """
        whole, reach = float(shape[1]) ** 2, self.reach(*shape)
        if reach != "seen":
            return whole if reach == "all" else whole / 2
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
        return min(pairs, whole)


def row_cost(config: ModelConfig) -> RowCost:
    """The cost of a model's rows, with the attention that it would use for them here."""
    from rljax.monitoring.flops import model_flops_per_token

    without = model_flops_per_token(config, 0)
    logits = 2.0 * config.vocab_size * config.hidden_size
    return RowCost(
        token=without - logits,
        logits=logits,
        score=model_flops_per_token(config, 1) - without,
        reach=functools.partial(_reach, config),
    )


@functools.lru_cache(maxsize=1024)
def _reach(config: ModelConfig, rows: int, length: int) -> Reach:
    """Which pairs the attention of a model's first layer computes on these devices."""
    from rljax import models

    a = config.layers[0].attention
    if isinstance(a, models.LatentAttention):
        kv_heads, dims = a.num_heads, (a.nope_dim + a.rope_dim, a.value_dim)
    else:
        kv_heads, dims = a.num_kv_heads, (a.head_dim, a.head_dim)
    asked = Asked(
        dtype=config.dtype,
        rows=rows,
        queries=length,
        keys=length,
        heads=a.num_heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        value_dim=dims[1],
        prefix=True,
    )
    return _REACH.get(choose_backend(config.attention_backend, asked).name, "seen")
