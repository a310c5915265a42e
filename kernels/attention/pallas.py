"""Attention on TPU by our own Pallas kernels: all of the rule, in one pass over the seen blocks.

Shared prefixes, windows in positions and rows cut over devices are what JAX's splash attention does
not compute; blocks of other packed sequences are skipped as well, for each row by its own table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from rljax_kernels.attention import blocked, pallas_kernels
from rljax_kernels.attention.block_pairs import block_pairs, block_sizes, list_pairs, padded
from rljax_kernels.attention.tokens import Tokens
from rljax_kernels.pallas_tools import pad_to, round_up, vary_alike

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

    Queries, keys and values may differ over different mesh axes inside `jax.shard_map`. The output
    and the logarithms of the softmax's sums are named as those of `blocked`.
    """
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    leaves, tree = jax.tree.flatten((q, k, v, sinks, queries, keys))
    return _attend((scale, window), *jax.tree.unflatten(tree, vary_alike(leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: tuple[float, int | None],
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    queries: Tokens,
    keys: Tokens,
) -> Array:
    return _attend_forward(how, q, k, v, sinks, queries, keys)[0]


def _attend_forward(
    how: tuple[float, int | None],
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    queries: Tokens,
    keys: Tokens,
) -> tuple[Array, tuple]:
    laid = _lay(*how, q, k, v, queries, keys)
    out, lse = _forward(laid, q.dtype if sinks is None else jnp.float32)
    out, lse = blocked.add_sinks(out, lse, sinks)
    out = checkpoint_name(out.astype(q.dtype), blocked.OUT)
    lse = checkpoint_name(lse, blocked.LSE)
    return out, (q, k, v, sinks, queries, keys, out, lse)


def _attend_backward(how: tuple[float, int | None], saved: tuple, g: Array) -> tuple:
    q, k, v, sinks, queries, keys, out, lse = saved
    delta = blocked.inner(g, out)
    grads = _backward(_lay(*how, q, k, v, queries, keys), g, lse, delta, q.dtype)
    return *grads, blocked.sinks_gradient(sinks, lse, delta), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def forward(
    how: blocked.How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """As `blocked.forward`; the blocks are the kernels' own."""
    return _forward(_lay(how.scale, how.window, q, k, v, queries, keys), jnp.float32)


def backward(
    how: blocked.How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    g: Float[Array, "B T H dv"],
    lse: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T H d"], Float[Array, "B S K d"], Float[Array, "B S K dv"]]:
    """As `blocked.backward`; the blocks are the kernels' own."""
    laid = _lay(how.scale, how.window, q, k, v, queries, keys)
    return _backward(laid, g, lse, delta, jnp.float32)


class _Laid(NamedTuple):
    """What the kernels take: tokens up to whole blocks, heads before tokens.

    Attributes:
      call: What is fixed.
      lengths: T and S as they were.
      arrays: q, k and v, [B, heads, tokens, width].
      at: int32 [B, T, 4], of the queries; those that are padding, or have no prefix, look for a
        segment that no key has.
      key_at: int32 [B, S, 4], of the keys.
      seen: Which pairs of blocks are to be visited.
      full: In which of them every query sees every key.
    """

    call: pallas_kernels.Call
    lengths: tuple[int, int]
    arrays: tuple[Array, Array, Array]
    at: Array
    key_at: Array
    seen: Array
    full: Array


def _lay(
    scale: float, window: int | None, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens
) -> _Laid:
    lengths = q.shape[1], k.shape[1]
    block = block_sizes(*lengths, _MOST)
    call = pallas_kernels.Call(scale, window, queries.prefix is not None, block)
    size, key_size = (round_up(n, b) for n, b in zip(lengths, block, strict=True))
    queries, keys = padded(queries, size), padded(keys, key_size)
    own = jnp.where(queries.segments > 0, queries.segments, -1)
    prefix = jnp.zeros_like(own) if queries.prefix is None else queries.prefix
    prefix = jnp.where(prefix > 0, prefix, -1)
    at = jnp.stack([own, queries.index, queries.positions, prefix], axis=-1)
    none = jnp.zeros_like(keys.segments)
    key_at = jnp.stack([keys.segments, keys.index, keys.positions, none], axis=-1)
    arrays = _heads_first(q, size), _heads_first(k, key_size), _heads_first(v, key_size)
    return _Laid(call, lengths, arrays, at, key_at, *block_pairs(queries, keys, window, block))


def _heads_first(x: Array, size: int) -> Array:
    return pad_to(x.swapaxes(1, 2), 2, size)


def _forward(laid: _Laid, dtype: Any) -> tuple[Array, Array]:
    pairs = list_pairs(laid.seen, laid.full, by_keys=False)
    out, lse = pallas_kernels.forward(
        laid.call, *laid.arrays, laid.at, laid.key_at, pairs, dtype=dtype
    )
    tokens = laid.lengths[0]
    return out[:, :, :tokens].swapaxes(1, 2), lse[:, :, 0, :tokens].swapaxes(1, 2)


def _backward(
    laid: _Laid, g: Array, lse: Array, delta: Array, dtype: Any
) -> tuple[Array, Array, Array]:
    size = laid.arrays[0].shape[2]
    rows = [pad_to(x.swapaxes(1, 2), 2, size)[:, :, None] for x in (lse, delta)]
    arrays = (*laid.arrays, _heads_first(g, size), *rows)
    given = laid.call, arrays, laid.at, laid.key_at
    pairs, by_keys = (list_pairs(laid.seen, laid.full, by) for by in (False, True))
    grads = (
        pallas_kernels.gradient_of_queries(*given, pairs, dtype),
        *pallas_kernels.gradient_of_keys(*given, by_keys, dtype),
    )
    lengths = (laid.lengths[0], laid.lengths[1], laid.lengths[1])
    dq, dk, dv = (x[:, :, :n].swapaxes(1, 2) for x, n in zip(grads, lengths, strict=True))
    return dq, dk, dv
