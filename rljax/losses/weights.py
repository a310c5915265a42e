"""Aggregators: the weight w of each token, fixed by the whole optimizer batch.

An aggregator gives weights, not a scalar, so that a loss is a plain sum over tokens and no result
depends on how the batch was cut: `weights(mask, keep, group) -> f32 [B, T]`. `keep` says what
counts in the denominators: one entry a response, or one a token (True over a kept response's
prompt too, so that a response without any token of its own still counts as one).
"""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from rljax.errors import InputError
from rljax.losses.base import Transform
from rljax.losses.sequences import SequenceLayout

Tokens: TypeAlias = Shaped[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class Weights(Transform):
    """Base of the aggregators."""

    def __call__(
        self,
        mask: Bool[Array, "B T"],
        keep: Shaped[Array, " B"] | Shaped[Array, "B T"],
        group: Shaped[Array, " B"] | Shaped[Array, "B T"],
        layout: SequenceLayout | None = None,
    ) -> Float[Array, "B T"]:
        """Weighs every token of an optimizer batch.

        Args:
          mask: The policy's own tokens.
          keep: What counts in the denominators: [B] or [B, T].
          group: Which prompt each response answers: [B] or [B, T].
          layout: How sequences lie in packed rows; None: one response a row.

        Returns:
          w, 0 outside mask and keep.
        """
        mask, keep, group = (jnp.asarray(x) for x in (mask, keep, group))
        keep = jnp.broadcast_to(keep[:, None] if keep.ndim == 1 else keep, mask.shape)
        group = jnp.broadcast_to(group[:, None] if group.ndim == 1 else group, mask.shape)
        kept = mask & keep
        weight = self.weigh(kept, keep, group, layout or SequenceLayout())
        return jnp.where(kept, weight, 0.0)

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, "..."]:
        """The weight of kept tokens; other entries are ignored."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class token_mean(Weights):
    """1 / kept tokens: every token the same; long responses weigh more (DAPO)."""

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, ""]:
        """The weight of kept tokens."""
        return _inverse(kept.sum())


@dataclasses.dataclass(frozen=True)
class sequence_mean(Weights):
    """1 / (kept non-empty responses · the response's kept tokens): every response the same."""

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, "B _"]:
        """The weight of kept tokens."""
        lengths = layout.sums(kept.astype(jnp.float32))
        return layout.spread(_inverse((lengths > 0).sum()) * _inverse(lengths))


@dataclasses.dataclass(frozen=True)
class prompt_mean(Weights):
    """1 / (surviving prompts · kept tokens of the prompt's responses): every prompt the same.

    Mini-batches must keep groups whole.
    """

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, "B _"]:
        """The weight of kept tokens."""
        lengths = layout.sums(kept.astype(jnp.float32))
        ids = layout.constant(group).reshape(-1)
        size = ids.shape[0]
        number = jnp.unique(ids, return_inverse=True, size=size)[1].reshape(-1)
        tokens = jax.ops.segment_sum(lengths.reshape(-1), number, size)
        weight = _inverse((tokens > 0).sum()) * _inverse(tokens)
        return layout.spread(weight[number].reshape(lengths.shape))


@dataclasses.dataclass(frozen=True)
class constant(Weights):
    """1 / (length · kept responses): a sum over tokens, whatever a response's length (Dr. GRPO).

    Args:
      length: The constant L, usually the generation budget; 1 gives the sum over tokens divided
        by the number of responses.
    """

    length: float

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise InputError(f"length must be positive, got {self.length}: use the token budget")

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, ""]:
        """The weight of kept tokens."""
        return _inverse(layout.any(keep).sum()) / self.length


@dataclasses.dataclass(frozen=True)
class token_sum(Weights):
    """1: the plain sum over kept tokens, without a denominator."""

    def weigh(
        self, kept: Tokens, keep: Tokens, group: Tokens, layout: SequenceLayout
    ) -> Float[Array, "1 1"]:
        """The weight of kept tokens."""
        return jnp.ones((1, 1), jnp.float32)


def _inverse(count: Array) -> Array:
    return 1.0 / jnp.maximum(count.astype(jnp.float32), 1.0)
