"""Grouped matmul by a loop over all groups, each on all rows: plain, slow, for tests."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def run(
    x: Float[Array, "M D"], weights: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As `rljax_kernels.grouped_matmul.grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])
    out = jnp.zeros((x.shape[0], weights.shape[2]), x.dtype)
    for e in range(weights.shape[0]):
        mine = (row >= ends[e] - group_sizes[e]) & (row < ends[e])
        out = out + jnp.where(mine[:, None], x @ weights[e], 0)
    return out
