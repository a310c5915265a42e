"""Statistics over the responses of a prompt, and over a batch, for values with gaps."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SPREAD = 1e-5
"""Values that differ by less than this, relative to max(1, |values|), count as equal."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a group knows, given back to each of its members; f32 [B].

    Attributes:
      count: Valid members.
      mean: Of the valid members; 0 if there are none.
      centered: Value minus mean; exactly 0 where invalid or where the group has no spread.
      std: Of the valid members, 0 without spread.
      equal: No spread among the valid members (so also with one or none), bool.
    """

    count: Float[Array, " B"]
    mean: Float[Array, " B"]
    centered: Float[Array, " B"]
    std: Float[Array, " B"]
    equal: Bool[Array, " B"]


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
    mean = sums(values, group) / jnp.maximum(count, 1.0)
    size = group.shape[0]
    high = jax.ops.segment_max(jnp.where(valid, values, -jnp.inf), group, size)[group]
    low = jax.ops.segment_min(jnp.where(valid, values, jnp.inf), group, size)[group]
    equal = no_spread(low, high)
    centered = jnp.where(valid & ~equal, values - mean, 0.0)
    std = jnp.sqrt(sums(centered**2, group) / jnp.maximum(count - ddof, 1.0))
    return Stats(count, mean, centered, std, equal)


def no_spread(low: Float[Array, "..."], high: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether extremes are so close that their difference is rounding; True for an empty set."""
    largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    return ~(high - low > SPREAD * jnp.maximum(1.0, largest))


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
    count = mask.sum().astype(jnp.float32)
    mean = x.sum() / jnp.maximum(count, 1.0)
    low = jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf)
    deviation = jnp.where(mask & ~no_spread(low, high), x - mean, 0.0)
    variance = (deviation**2).sum() / jnp.maximum(count - 1.0, 1.0)
    variance = jnp.where(no_spread(low, high), 1.0, variance)
    scaled = deviation if center else x
    return jnp.where(mask, scaled * jax.lax.rsqrt(variance + eps), 0.0)


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
