"""Attention on TPU by JAX's splash attention, for rows that are all at hand and share no prefixes.

Its mask is made inside the kernel from indices; what it looks up is one small table for each row,
[blocks of queries, blocks of keys], which says which blocks to skip. JAX's own masks would know
nothing of the packed sequences, and would work on all blocks below the diagonal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from rljax_kernels.attention import blocked
from rljax_kernels.attention.block_pairs import block_pairs, block_sizes
from rljax_kernels.attention.tokens import Tokens, whole_rows
from rljax_kernels.pallas_tools import interpreted, pad_to, refuse_checks

_MOST = (512, 512)  # tokens of a block of queries, and of keys
_PADDING = 2**20
"""The segment of padding: above all others, so that a block with a sequence's end and padding meets
no block before that sequence."""


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (`rljax_kernels.attention.Asked`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    if asked.prefix:
        return "it has no shared prefixes: a query sees the keys of one segment"
    if asked.queries != asked.keys:
        return f"it takes whole rows, not {asked.queries} queries and {asked.keys} keys"
    return None


def run(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H dv"]:
    """As `rljax_kernels.attention.attention`, of rows that are all at hand.

    Windows are measured by places in the row, so positions have to rise by one from token to token
    of a sequence. JAX's kernel does not say over which mesh axes its results differ: inside
    `jax.shard_map` it needs `check_vma=False`. The output and the logarithms of the softmax's sums
    are both named `blocked.OUT` for rematerialisation policies that keep them.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Where they stand; `index` has to count the row's tokens.
      keys: The same.
      scale: Multiplies the queries.
      window: How many tokens back a query sees.
      sinks: Logits that have no value.

    Raises:
      ValueError: It is called inside `jax.shard_map` with its checks.
    """
    refuse_checks(q, "attention by 'splash'", "pallas")
    t = q.shape[1]
    block = block_sizes(t, t, _MOST)[0]
    size = -(-t // block) * block
    segments = jnp.where(queries.segments > 0, queries.segments, _PADDING)
    segments = pad_to(segments, 1, size, _PADDING)
    # As places they are all real tokens, padding too: a query without keys would give NaN.
    places = whole_rows(jnp.cumsum(jnp.ones_like(segments), 1) - 1, segments)
    seen, _ = block_pairs(places, places, window, (block, block))
    q, k, v = (pad_to(x.swapaxes(1, 2), 2, size) for x in (q * scale, k, v))
    # The library gives the sinks' gradient in the output's dtype.
    q, sinks = q.astype(k.dtype), None if sinks is None else sinks.astype(k.dtype)

    def row(args: tuple) -> Array:
        q, k, v, segments, seen = args
        return _kernel(block, seen, window)(q, k, v, _segment_ids(segments), sinks)

    out = jax.lax.map(row, (q, k, v, segments, seen))
    return out.swapaxes(1, 2)[:, :t]


def _segment_ids(segments: Array) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return SegmentIds(q=segments, kv=segments)


@functools.cache
def _mask(window: int | None) -> Callable[[Any, Any], Any]:
    """One function for each window, so that calls with the same one compile once."""

    def mask(query: Any, key: Any) -> Any:
        seen = query >= key
        return seen if window is None else seen & (query - key < window)

    return mask


def _kernel(block: int, seen: Array, window: int | None) -> Callable[..., Array]:
    """JAX's kernel for a row, whose blocks are skipped where `seen` is False."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import (
        MaskInfo,
    )

    size = seen.shape[0] * block

    def table(by_keys: bool) -> Any:
        return MaskInfo(
            data_next=_next_seen(seen, by_keys)[None],
            mask_next=None,
            block_mask=seen.astype(jnp.int32)[None],
            partial_mask_blocks=None,
            q_sequence=jnp.arange(size, dtype=jnp.int32),  # type: ignore[arg-type]
        )

    by_queries = table(False)
    return library.SplashAttentionKernel(
        by_queries,
        by_queries,
        table(True),
        block_sizes=library.BlockSizes(*(block,) * 8),
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=blocked.OUT,
        mask_function=_mask(window),
        interpret=interpreted(),
    )


def _next_seen(seen: Array, by_keys: bool) -> Array:
    """For each pair the block to fetch: its own where it is seen, else that of the next such pair.

    Args:
      seen: bool [n, m], queries before keys.
      by_keys: Whether the kernel walks along the queries of one block of keys after the other.
    """
    walked = seen.T if by_keys else seen
    count = walked.size
    place = jnp.where(walked.reshape(-1), jnp.arange(count), count - 1)
    fetched = jax.lax.cummin(place, reverse=True).reshape(walked.shape) % walked.shape[1]
    return (fetched.T if by_keys else fetched).astype(jnp.int32)
