"""Metrics that merge: each keeps what it needs to be divided once, at the end.

Adding the metrics of micro-batches, devices or steps gives what one pass over everything would
have given, which averaging averages does not.
"""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Shaped

from rljax.errors import InputError


def total(x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """Sums everything, rows first: faster on CPU than at one go, and rounds less."""
    return x.sum(axis=-1).sum() if x.ndim > 1 else x.sum()


class Mean(struct.PyTreeNode):
    """A weighted mean, kept as numerator and denominator.

    Attributes:
      numerator: Σ weight·x; f32 scalar.
      denominator: Σ weight; f32 scalar.
    """

    numerator: Float[Array, ""]
    denominator: Float[Array, ""]

    @classmethod
    def of(cls, x: Array, weights: Array) -> "Mean":
        """The mean of x under weights; entries of weight 0 may hold anything, NaN included."""
        weights = jnp.broadcast_to(weights, jnp.broadcast_shapes(x.shape, weights.shape))
        weights = weights.astype(jnp.float32)
        return cls(total(jnp.where(weights > 0, x * weights, 0.0)), total(weights))

    def merge(self, other: "Mean") -> "Mean":
        """Both together."""
        return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

    def all_reduce(self, axis: str) -> "Mean":
        """Together over a mesh axis, inside `shard_map`."""
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, axis), self)

    def values(self, name: str) -> dict[str, float]:
        """The mean under its name; nothing where nothing was counted."""
        total = float(self.denominator)
        return {name: float(self.numerator) / total} if total > 0 else {}


class Max(struct.PyTreeNode):
    """A maximum; -inf where nothing was counted."""

    value: Float[Array, ""]

    @classmethod
    def of(cls, x: Array, mask: Array) -> "Max":
        """The maximum of x where the mask is True."""
        return cls(jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf).astype(jnp.float32))

    def merge(self, other: "Max") -> "Max":
        """Both together."""
        return Max(jnp.maximum(self.value, other.value))

    def all_reduce(self, axis: str) -> "Max":
        """Together over a mesh axis, inside `shard_map`."""
        return Max(jax.lax.pmax(self.value, axis))

    def values(self, name: str) -> dict[str, float]:
        """The maximum under its name; nothing where nothing was counted."""
        return {} if np.isneginf(self.value) else {name: float(self.value)}


class Min(struct.PyTreeNode):
    """A minimum; +inf where nothing was counted."""

    value: Float[Array, ""]

    @classmethod
    def of(cls, x: Array, mask: Array) -> "Min":
        """The minimum of x where the mask is True."""
        return cls(jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf).astype(jnp.float32))

    def merge(self, other: "Min") -> "Min":
        """Both together."""
        return Min(jnp.minimum(self.value, other.value))

    def all_reduce(self, axis: str) -> "Min":
        """Together over a mesh axis, inside `shard_map`."""
        return Min(jax.lax.pmin(self.value, axis))

    def values(self, name: str) -> dict[str, float]:
        """The minimum under its name; nothing where nothing was counted."""
        return {} if np.isposinf(self.value) else {name: float(self.value)}


class Moments(struct.PyTreeNode):
    """Count, means and centred second moments of one or two variables.

    Merged by Chan's pairwise formula, which does not cancel as sums of squares do.

    Attributes:
      count: Entries counted; f32 scalar, like all below.
      x, y: Means.
      xx, yy, xy: Σ of the products of deviations from the means.
      report: Static: what `finish` gives: 'std' (of x, dividing by count - 1), 'pearson'
        (correlation of x and y), 'ess' (effective sample size of weights x, as a fraction of
        the count) or 'explained_variance' (1 - var(y) / var(x), x targets and y errors).
    """

    count: Float[Array, ""]
    x: Float[Array, ""]
    y: Float[Array, ""]
    xx: Float[Array, ""]
    yy: Float[Array, ""]
    xy: Float[Array, ""]
    report: str = struct.field(pytree_node=False, default="std")

    @classmethod
    def of(
        cls, x: Array, mask: Bool[Array, "..."], y: Array | None = None, *, report: str
    ) -> "Moments":
        """The moments of x, and of y with it, where the mask is True."""
        x = jnp.where(mask, x, 0.0)
        y = jnp.zeros_like(x) if y is None else jnp.where(mask, y, 0.0)
        count = mask.sum().astype(jnp.float32)
        safe = jnp.maximum(count, 1.0)
        mean_x, mean_y = x.sum() / safe, y.sum() / safe
        dx, dy = jnp.where(mask, x - mean_x, 0.0), jnp.where(mask, y - mean_y, 0.0)
        return cls(count, mean_x, mean_y, (dx * dx).sum(), (dy * dy).sum(), (dx * dy).sum(), report)

    def merge(self, other: "Moments") -> "Moments":
        """Both together."""
        count = self.count + other.count
        share = other.count / jnp.maximum(count, 1.0)
        dx, dy = other.x - self.x, other.y - self.y
        cross = self.count * share
        return Moments(
            count,
            self.x + dx * share,
            self.y + dy * share,
            self.xx + other.xx + dx * dx * cross,
            self.yy + other.yy + dy * dy * cross,
            self.xy + other.xy + dx * dy * cross,
            self.report,
        )

    def all_reduce(self, axis: str) -> "Moments":
        """Together over a mesh axis, inside `shard_map`."""

        def psum(leaf: Array) -> Array:
            return jax.lax.psum(leaf, axis)

        count = psum(self.count)
        safe = jnp.maximum(count, 1.0)
        x, y = psum(self.count * self.x) / safe, psum(self.count * self.y) / safe
        dx, dy = self.x - x, self.y - y
        return Moments(
            count,
            x,
            y,
            psum(self.xx + self.count * dx * dx),
            psum(self.yy + self.count * dy * dy),
            psum(self.xy + self.count * dx * dy),
            self.report,
        )

    def values(self, name: str) -> dict[str, float]:
        """The reported figure under its name; nothing where it is undefined."""
        count, xx, yy = float(self.count), float(self.xx), float(self.yy)
        if self.report == "std":
            return {name: (xx / (count - 1)) ** 0.5} if count > 1 else {}
        if self.report == "ess":
            square = float(self.x) ** 2
            total = square * count + xx
            return {name: square * count / total} if total > 0 else {}
        if self.report == "pearson":
            return {name: float(self.xy) / (xx * yy) ** 0.5} if xx > 0 and yy > 0 else {}
        if self.report == "explained_variance":
            return {name: 1.0 - yy / xx} if xx > 0 else {}
        raise InputError(
            f"report must be std, pearson, ess or explained_variance, got {self.report!r}"
        )


class Histogram(struct.PyTreeNode):
    """Counts between fixed edges; what lies outside falls into the first or last bin.

    Attributes:
      counts: f32 [bins].
      edges: Static: bins + 1 rising numbers.
    """

    counts: Float[Array, " bins"]
    edges: tuple[float, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: Array, mask: Bool[Array, "..."], edges: tuple[float, ...]) -> "Histogram":
        """Counts x where the mask is True."""
        bins = len(edges) - 1
        place = jnp.searchsorted(jnp.asarray(edges[1:-1], jnp.float32), x.reshape(-1), "right")
        weights = jnp.broadcast_to(mask, x.shape).reshape(-1).astype(jnp.float32)
        return cls(jax.ops.segment_sum(weights, place, bins), tuple(edges))

    def merge(self, other: "Histogram") -> "Histogram":
        """Both together."""
        if self.edges != other.edges:
            raise InputError(f"histograms need the same edges, got {self.edges}, {other.edges}")
        return Histogram(self.counts + other.counts, self.edges)

    def all_reduce(self, axis: str) -> "Histogram":
        """Together over a mesh axis, inside `shard_map`."""
        return Histogram(jax.lax.psum(self.counts, axis), self.edges)

    def quantile(self, q: float) -> float:
        """The q-quantile, linear within its bin; NaN where nothing was counted."""
        counts = np.asarray(self.counts, np.float64)
        if counts.sum() == 0:
            return float("nan")
        below = np.concatenate([[0.0], np.cumsum(counts)])
        place = min(int(np.searchsorted(below, q * below[-1], "left")), len(counts))
        place = max(place, 1)
        inside = (q * below[-1] - below[place - 1]) / max(counts[place - 1], 1e-30)
        low, high = self.edges[place - 1], self.edges[place]
        return low + (high - low) * float(np.clip(inside, 0.0, 1.0))

    def values(self, name: str) -> dict[str, float]:
        """The median and the 5% and 95% quantiles, as name_p50, name_p05, name_p95."""
        if float(np.sum(self.counts)) == 0:
            return {}
        return {f"{name}_p{round(100 * q):02d}": self.quantile(q) for q in (0.05, 0.5, 0.95)}


Metric: TypeAlias = Mean | Max | Min | Moments | Histogram
Metrics: TypeAlias = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Puts metrics of several parts together; names may be missing from some.

    Args:
      *parts: Metrics by name, e.g. of each micro-batch.

    Returns:
      The metrics of the whole.
    """
    whole: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            whole[name] = whole[name].merge(metric) if name in whole else metric  # type: ignore[arg-type]
    return whole


def all_reduce(metrics: Mapping[str, Metric], axis: str) -> Metrics:
    """Puts the metrics of a mesh axis together, inside `shard_map`.

    Args:
      metrics: Each device's own.
      axis: The mesh axis.

    Returns:
      The metrics of the whole, the same on every device.
    """
    return {name: metric.all_reduce(axis) for name, metric in metrics.items()}


def finish(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Divides, once, on the host.

    Args:
      metrics: Merged metrics by name.

    Returns:
      Plain numbers by name, in the order of names. A metric that counted nothing is left out
      rather than reported as 0 or NaN (the clipped tokens' probability when none was clipped).
    """
    values: dict[str, float] = {}
    for name, metric in sorted(jax.device_get(dict(metrics)).items()):
        values.update(metric.values(name))
    return values
