"""Attention on TPU by our own Pallas kernels: all of the rule, in one pass over the seen blocks.

Shared prefixes, windows in positions and rows cut over devices are what JAX's splash attention does
not compute; blocks of other packed sequences are skipped as well, for each row by its own table.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from rljax_kernels.attention import pallas_kernels
from rljax_kernels.attention.block_pairs import block_pairs, block_sizes, list_pairs, padded
from rljax_kernels.attention.tokens import Tokens
from rljax_kernels.pallas_tools import pad_to, vary_alike

_MOST = (512, 1024)  # tokens of a block of queries, and of keys
_MOST_PAIRS = 2**16
"""Two numbers for each pair of blocks lie in scalar memory, of which a core has 1 MiB."""


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked (`rljax_kernels.attention.Asked`)."""
    if asked.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {asked.dtype}"
    bq, bk = block_sizes(asked.queries, asked.keys, _MOST)
    pairs = asked.rows * -(-asked.queries // bq) * -(-asked.keys // bk)
    if pairs > _MOST_PAIRS:
        return f"rows of a device have {pairs} pairs of blocks, and its list holds {_MOST_PAIRS}"
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
    """As `rljax_kernels.attention.attention`. Padding gets 0.

    The output and the logarithms of the softmax's sums are named `attention_out` and
    `attention_lse` for rematerialisation policies that keep them.
    """
    call = pallas_kernels.Call(
        scale,
        window,
        queries.prefix is not None,
        sinks is not None,
        block_sizes(q.shape[1], k.shape[1], _MOST),
    )
    sinks = jnp.zeros(q.shape[2]) if sinks is None else sinks
    leaves, tree = jax.tree.flatten((q, k, v, sinks.astype(jnp.float32), queries, keys))
    return _attend(call, *jax.tree.unflatten(tree, vary_alike(leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Any, q: Any, k: Any, v: Any, sinks: Any, queries: Tokens, keys: Tokens) -> Any:
    return _attend_forward(call, q, k, v, sinks, queries, keys)[0]


def _laid(call: Any, x: Any, of_keys: bool) -> Any:
    """[B, T, H, d] with heads before tokens, and tokens up to whole blocks."""
    block = call.block[of_keys]
    return pad_to(x.swapaxes(1, 2), 2, -(-x.shape[1] // block) * block)


def _tokens(call: Any, queries: Tokens, keys: Tokens) -> tuple[Tokens, Tokens, Any, Any]:
    """Both padded, and as the kernels read them."""

    def whole(x: Tokens, block: int) -> Tokens:
        return padded(x, -(-x.segments.shape[1] // block) * block)

    queries, keys = whole(queries, call.block[0]), whole(keys, call.block[1])
    # Queries that are padding, and those without a prefix, look for a segment that no key has.
    own = jnp.where(queries.segments > 0, queries.segments, -1)
    prefix = jnp.zeros_like(own) if queries.prefix is None else queries.prefix
    prefix = jnp.where(prefix > 0, prefix, -1)
    at = jnp.stack([own, queries.index, queries.positions, prefix], axis=-1)
    key_at = [keys.segments, keys.index, keys.positions, jnp.zeros_like(keys.segments)]
    return queries, keys, at.astype(jnp.int32), jnp.stack(key_at, axis=-1).astype(jnp.int32)


def _attend_forward(
    call: Any, q: Any, k: Any, v: Any, sinks: Any, queries: Tokens, keys: Tokens
) -> tuple[Any, tuple]:
    wide_queries, wide_keys, at, key_at = _tokens(call, queries, keys)
    pairs = list_pairs(*block_pairs(wide_queries, wide_keys, call.window, call.block), False)
    laid = _laid(call, q, False), _laid(call, k, True), _laid(call, v, True)
    out, lse = pallas_kernels.forward(call, *laid, sinks, at, key_at, pairs)
    out = checkpoint_name(out.swapaxes(1, 2)[:, : q.shape[1]], "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks, queries, keys, out, lse)


def _attend_backward(call: Any, saved: tuple, g: Any) -> tuple:
    q, k, v, sinks, queries, keys, out, lse = saved
    wide_queries, wide_keys, at, key_at = _tokens(call, queries, keys)
    seen, full = block_pairs(wide_queries, wide_keys, call.window, call.block)
    inner = jnp.einsum("bthd,bthd->bht", out, g, preferred_element_type=jnp.float32)
    inner = pad_to(inner, 2, lse.shape[3])[:, :, None]
    laid = [_laid(call, x, of_keys) for x, of_keys in ((q, 0), (k, 1), (v, 1), (g, 0))]
    arrays = (*laid, lse, inner)
    by_queries, by_keys = (list_pairs(seen, full, by) for by in (False, True))
    dq = pallas_kernels.gradient_of_queries(call, arrays, at, key_at, by_queries)
    dk, dv = pallas_kernels.gradient_of_keys(call, arrays, at, key_at, by_keys)
    dsinks = jnp.zeros_like(sinks)
    if call.sinks:
        dsinks = -(jnp.exp(sinks[:, None] - lse[:, :, 0]) * inner[:, :, 0]).sum((0, 2))
    dq, dk, dv = (dx.swapaxes(1, 2)[:, : x.shape[1]] for dx, x in ((dq, q), (dk, k), (dv, v)))
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (queries, keys))
    return dq, dk, dv, dsinks, *none


_attend.defvjp(_attend_forward, _attend_backward)
