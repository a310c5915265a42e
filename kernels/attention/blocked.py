"""Attention by blocks of queries and keys in plain JAX, with memory linear in the tokens.

The softmax is computed online (Milakov and Gimelshein, 2018, arXiv:1805.02867), and the backward
pass recomputes the scores of a block from each query's logsumexp (FlashAttention-2: Dao, 2023,
arXiv:2307.08691, section 3). Pairs of blocks in which no query sees a key are left out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from rljax_kernels.attention import blocks as cuts
from rljax_kernels.attention.reference import MASKED_SCORE
from rljax_kernels.attention.tokens import Tokens

OUT, LSE = "attention_out", "attention_lse"
"""The names of what the backward pass needs of the forward pass, for policies of
`jax.checkpoint`: where both are saved, a recomputation leaves attention out."""


class How(NamedTuple):
    """What is static in a call.

    Attributes:
      scale: Multiplies the scores.
      window: How many positions back a query sees; None: all.
      blocks: Sizes of the blocks.
    """

    scale: float
    window: int | None
    blocks: cuts.Blocks


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
    blocks: cuts.Blocks | None = None,
) -> Float[Array, "B T H dv"]:
    """As `rljax_kernels.attention.attention`; padding gets 0.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Where the queries stand.
      keys: Where the keys stand.
      scale: Multiplies the scores.
      window: How many positions back a query sees; None: all.
      sinks: Logits without values; None: there are none.
      blocks: Sizes of the blocks; None: as `blocks.block_sizes` says.
    """
    if blocks is None:
        blocks = cuts.block_sizes(q.shape[1], k.shape[1], q.shape[2])
    return _attend(How(scale, window, blocks), q, k, v, queries, keys, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: How, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> Array:
    return _attend_forward(how, q, k, v, queries, keys, sinks)[0]


def _attend_forward(
    how: How, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> tuple[Array, tuple]:
    out, lse = add_sinks(*forward(how, q, k, v, queries, keys), sinks)
    out, lse = checkpoint_name(out.astype(q.dtype), OUT), checkpoint_name(lse, LSE)
    return out, (q, k, v, queries, keys, sinks, out, lse)


def _attend_backward(how: How, saved: tuple, g: Array) -> tuple:
    q, k, v, queries, keys, sinks, out, lse = saved
    delta = inner(g, out)
    dq, dk, dv = backward(how, q, k, v, queries, keys, g, lse, delta)
    grads = (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))
    return *grads, None, None, sinks_gradient(sinks, lse, delta)


_attend.defvjp(_attend_forward, _attend_backward)


def inner(g: Float[Array, "B T H dv"], out: Float[Array, "B T H dv"]) -> Float[Array, "B T H"]:
    """The inner product of the output and its gradient, in float32."""
    return jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)


def add_sinks(
    out: Float[Array, "B T H dv"],
    lse: Float[Array, "B T H"],
    sinks: Float[Array, " H"] | None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """Output and logsumexp as they are with sinks."""
    if sinks is None:
        return out, lse
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    return out * jnp.exp(lse - total)[..., None], total


def sinks_gradient(sinks: Array | None, lse: Array, delta: Array) -> Array | None:
    """Of the sinks, given the logsumexp with them and `inner`."""
    if sinks is None:
        return None
    taken = jnp.exp(sinks.astype(jnp.float32) - lse) * delta
    return -taken.sum((0, 1)).astype(sinks.dtype)


def forward(
    how: How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """Output and logsumexp of the scores, both in float32.

    A query that sees no key gets 0, and `MASKED_SCORE` as its logsumexp.
    """
    rows, tokens, heads, _ = q.shape
    kv_heads, (block_q, block_k) = k.shape[2], how.blocks
    cut_q = cuts.cut_tokens(queries, block_q)
    cut_k = cuts.cut_tokens(keys, block_k)
    visits = cuts.visits(cuts.needed(cut_q, cut_k, how.window))
    cut_q, cut_k = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (cut_q, cut_k))
    k, v = (cuts.cut_keys(x, block_k) for x in (k, v))
    group, width = heads // kv_heads, v.shape[-1]

    def turn(_: None, given: tuple) -> tuple[None, tuple[Array, Array]]:
        q, at, count, needed = given

        def add(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            j = needed[n]
            scores = _scores(how, q, k[j], at, _block(cut_k, j), group)
            above = jnp.maximum(top, scores.max(-1))
            exp, fade = jnp.exp(scores - above[..., None]), jnp.exp(top - above)
            new = _dot("krs,ksd->krd", exp.astype(v.dtype), v[j])
            return above, total * fade + exp.sum(-1), out * fade[..., None] + new

        shape = (kv_heads, group * block_q)
        start = (
            jnp.full(shape, MASKED_SCORE, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, width), jnp.float32),
        )
        start = cuts.vary_as(start, given, k, v, cut_k)
        top, total, out = jax.lax.fori_loop(0, count, add, start)
        saw = top > MASKED_SCORE / 2
        out = jnp.where(saw[..., None], out / jnp.where(saw, total, 1.0)[..., None], 0.0)
        return None, (out, jnp.where(saw, top + jnp.log(total), MASKED_SCORE))

    given = (cuts.cut_queries(q, block_q, kv_heads), cut_q, *visits)
    _, found = jax.lax.scan(turn, None, given)
    out, lse = (cuts.join_queries(x, rows, tokens, block_q) for x in found)
    return out, lse


def backward(
    how: How,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    g: Float[Array, "B T H dv"],
    lse: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T H d"], Float[Array, "B S K d"], Float[Array, "B S K dv"]]:
    """Gradients of queries, keys and values, in float32.

    Args:
      how: What is static.
      q: Queries.
      k: Keys.
      v: Values.
      queries: Where the queries stand.
      keys: Where the keys stand.
      g: The gradient of the output.
      lse: The logsumexp of each query's scores, with all keys of the softmax in it.
      delta: The inner product of the whole output and its gradient.
    """
    rows, tokens, heads, _ = q.shape
    (_, span, kv_heads, _), (block_q, block_k) = k.shape, how.blocks
    cut_q = cuts.cut_tokens(queries, block_q)
    cut_k = cuts.cut_tokens(keys, block_k)
    visits = cuts.visits(cuts.needed(cut_q, cut_k, how.window))
    cut_q, cut_k = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (cut_q, cut_k))
    k, v = (cuts.cut_keys(x, block_k) for x in (k, v))
    # exp(MASKED_SCORE - lse) has to be 0 for what saw nothing, too.
    lse = jnp.where(lse > MASKED_SCORE / 2, lse, -MASKED_SCORE)
    of_queries = [cuts.cut_queries(x, block_q, kv_heads) for x in (q, g, lse, delta)]

    def turn(carry: tuple[Array, Array], given: tuple) -> tuple[tuple[Array, Array], Array]:
        q, g, lse, delta, at, count, needed = given
        # Turned once a block of queries, and gradients of keys and values kept turned: products
        # that contract the rows of both sides are slow on CPU.
        q_turned, g_turned = (jax.lax.optimization_barrier(x.swapaxes(1, 2)) for x in (q, g))

        def add(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            j = needed[n]
            scores = _scores(how, q, k[j], at, _block(cut_k, j), heads // kv_heads)
            probs = jnp.exp(scores - lse[..., None])
            d_probs = _dot("krd,ksd->krs", g, v[j])
            d_scores = (probs * (d_probs - delta[..., None]) * how.scale).astype(q.dtype)
            dv = dv.at[j].add(_dot("kdr,krs->kds", g_turned, probs.astype(g.dtype)))
            dk = dk.at[j].add(_dot("kdr,krs->kds", q_turned, d_scores))
            return dq + _dot("krs,ksd->krd", d_scores, k[j]), dk, dv

        start = cuts.vary_as(jnp.zeros(q.shape, jnp.float32), given, k, v, cut_k)
        dq, *carry = jax.lax.fori_loop(0, count, add, (start, *carry))
        return tuple(carry), dq

    given = (*of_queries, cut_q, *visits)
    zeros = [jnp.zeros(x.swapaxes(2, 3).shape, jnp.float32) for x in (k, v)]
    carry = tuple(cuts.vary_as(zeros, given, k, v, cut_k))
    carry, dq = jax.lax.scan(turn, carry, given)
    dk, dv = (x.transpose(0, 3, 1, 2).reshape(rows, -1, kv_heads, x.shape[2]) for x in carry)
    return cuts.join_queries(dq, rows, tokens, block_q), dk[:, :span], dv[:, :span]


def _block(tokens: Tokens, j: Array) -> Tokens:
    return jax.tree.map(lambda x: x[j], tokens)


def _scores(how: How, q: Array, k: Array, at: Tokens, keys: Tokens, group: int) -> Array:
    """Scores [K, rows, keys] of a block, with `MASKED_SCORE` for what a query does not see."""
    scores = _dot("krd,ksd->krs", q, k) * how.scale
    seen = cuts.tile(at, keys, how.window)
    split = scores.reshape(scores.shape[0], group, *seen.shape)
    return jnp.where(seen, split, MASKED_SCORE).reshape(scores.shape)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
