"""Statistics over the responses of a prompt, and over a batch, for values with gaps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SPREAD = 1e-5
"""Values whose spread is at most this share of the largest magnitude count as equal."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of a group, one copy for each of its members; f32 [B].

    Attributes:
      count: Valid members.
      mean: Of the valid members; 0 if there are none.
      centered: Value minus mean; exactly 0 where invalid or where the group has no spread.
      std: Of the valid members, 0 without spread.
      equal: No spread among the valid members (so also with one or none), bool.
      deviation, deviation_std: As `centered` and `std`, divided by `scale`.
      scale: A power of two near the group's largest magnitude, so that squares stay in float32.
    """

    count: Float[Array, " B"]
    mean: Float[Array, " B"]
    centered: Float[Array, " B"]
    std: Float[Array, " B"]
    equal: Bool[Array, " B"]
    deviation: Float[Array, " B"]
    deviation_std: Float[Array, " B"]
    scale: Float[Array, " B"]

    def normalized(self, eps: float) -> Float[Array, " B"]:
        """`centered / (std + eps)`, without an overflow; 0 without spread."""
        divisor = self.deviation_std + eps / self.scale
        return jnp.where(divisor > 0, self.deviation / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def numbered(group: Int[Array, " B"]) -> Int[Array, " B"]:
    """Numbers arbitrary group ids 0, 1, ... in rising order; works under jit."""
    return jnp.unique(group, return_inverse=True, size=group.shape[0])[1].reshape(-1)


def sums(x: Float[Array, " B"], group: Int[Array, " B"]) -> Float[Array, " B"]:
    """Each member's group sum, for group numbers below B."""
    return jax.ops.segment_sum(x, group, group.shape[0])[group]


def statistics(
    values: Float[Array, " B"], valid: Bool[Array, " B"], group: Int[Array, " B"], ddof: int = 1
) -> Stats:
    """Group statistics of the valid members.

    Args:
      values: One number a response; anything where invalid.
      valid: Which to count.
      group: Group numbers 0 .. B-1.
      ddof: The variance divides by count - ddof (at least 1).

    Returns:
      The statistics of each member's group.
    """
    values = jnp.where(valid, values, 0.0)
    weights = valid.astype(jnp.float32)
    count = sums(weights, group)
    size = group.shape[0]
    high = jax.ops.segment_max(jnp.where(valid, values, -jnp.inf), group, size)[group]
    low = jax.ops.segment_min(jnp.where(valid, values, jnp.inf), group, size)[group]
    equal = no_spread(low, high)
    scale = scale_of(abs_max(low, high))
    scaled = values / scale
    mean = sums(scaled, group) / jnp.maximum(count, 1.0)
    deviation = jnp.where(valid & ~equal, scaled - mean, 0.0)
    std = jnp.sqrt(sums(deviation**2, group) / jnp.maximum(count - ddof, 1.0))
    return Stats(count, mean * scale, deviation * scale, std * scale, equal, deviation, std, scale)


def equal_scores(values: Any, valid: Any = None) -> bool:
    """Whether the scores of one group are all equal, so that there is nothing to learn from them.

    The same rule decides in the loss (`statistics`) and in dynamic sampling: equal are scores whose
    spread is at most 1e-5 of the largest magnitude, which takes rounding for no difference and
    holds on any scale. One score alone, or none, is equal too.

    Args:
      values: The scores, [G]; NumPy or JAX, on the host.
      valid: Which to count, bool [G]; None: all. Scores that are not finite never count.

    Returns:
      A plain bool.
    """
    scores = np.asarray(values, np.float32)
    counted = np.isfinite(scores) if valid is None else np.isfinite(scores) & np.asarray(valid)
    if counted.sum() < 2:
        return True
    scores = scores[counted]
    return bool(no_spread(scores.min(), scores.max()))


def no_spread(low: Any, high: Any) -> Any:
    """Whether extremes are so close that their difference is rounding; True for an empty set.

    Args:
      low: The smallest value, f32; +∞ for an empty set. NumPy or JAX.
      high: The largest value; -∞ for an empty set.

    Returns:
      Bool of the same shape.
    """
    half = np.float32(0.5)  # the difference of extremes of either sign may be past float32
    return ~(half * high - half * low > half * np.float32(SPREAD) * abs_max(low, high))


def abs_max(low: Any, high: Any) -> Any:
    """The largest magnitude between two extremes; NumPy or JAX."""
    return (
        jnp.maximum(jnp.abs(low), jnp.abs(high))
        if isinstance(low, jax.Array)
        else np.maximum(np.abs(low), np.abs(high))
    )


def scale_of(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """A power of two near a magnitude, to divide by before squaring; 1 where it is 0 or not finite.

    Dividing by a power of two is exact, so that nothing changes where nothing overflows.
    """
    usable = jnp.isfinite(largest) & (largest > 0)
    exponent = jnp.frexp(jnp.where(usable, largest, 1.0))[1]
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 1, -126, 126))


def whiten(
    x: Float[Array, "..."], mask: Bool[Array, "..."], eps: float, center: bool = True
) -> Float[Array, "..."]:
    """Scales to unit variance (dividing by count - 1) over the mask; 0 elsewhere.

    Without spread the result is 0; a single entry has its variance taken as 1.

    Args:
      x: Any shape; anything outside the mask.
      mask: What to count and to scale.
      eps: Added to the variance.
      center: Whether to subtract the mean first.

    Returns:
      The whitened entries.
    """
    x = jnp.where(mask, x, 0.0)
    low = jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf)
    equal, scale = no_spread(low, high), scale_of(abs_max(low, high))
    inverse = 1.0 / scale
    single, x = x * jax.lax.rsqrt(jnp.float32(1 + eps)), x * inverse
    count = mask.sum().astype(jnp.float32)
    mean = x.sum() / jnp.maximum(count, 1.0)
    deviation = jnp.where(mask & ~equal, x - mean, 0.0)
    variance = (deviation**2).sum() / jnp.maximum(count - 1.0, 1.0)
    scaled = deviation if center else x
    whitened = scaled * jax.lax.rsqrt(variance + (eps * inverse) * inverse)
    without_spread = jnp.zeros_like(x) if center else single
    return jnp.where(mask, jnp.where(equal, without_spread, whitened), 0.0)


def whole_share(count: Int[Array, ""], share: float) -> Int[Array, ""]:
    """A share of a count, rounded down to a whole number, at least 1."""
    return jnp.maximum(jnp.floor(share * count + 1e-4).astype(jnp.int32), 1)


def top_share(x: Float[Array, "..."], mask: Bool[Array, "..."], share: float) -> Bool[Array, "..."]:
    """The largest entries of the mask: a share of them, at least one; ties at the edge all in.

    Args:
      x: Any shape; anything outside the mask.
      mask: What to rank.
      share: Share of the masked entries to take, rounded down to whole ones.

    Returns:
      True on the entries taken.
    """
    taken = whole_share(mask.sum(), share)
    ranked = jnp.sort(jnp.where(mask, x, -jnp.inf).reshape(-1), descending=True)
    return mask & (x >= ranked[taken - 1])
