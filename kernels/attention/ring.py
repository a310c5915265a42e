"""Attention of rows split over devices: keys and values go round, and no device holds all of them.

Ring attention (Liu et al., 2023, arXiv:2310.01889): each device keeps its queries, meets the keys
and values of one device after the other, and merges the results by their logsumexp. Backwards the
gradients of keys and values go round with them. Later queries see more keys: so that no device
waits for another, each works on one early and one late part of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from rljax_kernels.attention import blocked, blocks
from rljax_kernels.attention.reference import MASKED_SCORE
from rljax_kernels.attention.tokens import Tokens


class Parts(NamedTuple):
    """What an implementation computes of the keys of one device.

    Attributes:
      forward: As `blocked.forward`.
      backward: As `blocked.backward`.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


class _Ring(NamedTuple):
    """What is static in a call."""

    axis: str
    parts: Parts
    how: blocked.How


def run(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K dv"],
    queries: Tokens,
    keys: Tokens,
    *,
    axis: str,
    parts: Parts,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H dv"]:
    """As `rljax_kernels.attention.attention`, inside `shard_map`, of rows split over a mesh axis.

    Args:
      q: The device's queries.
      k: The device's keys.
      v: Their values.
      queries: Where the queries stand in the whole rows.
      keys: Where the keys stand.
      axis: The mesh axis. All arrays have to vary over the same mesh axes, this one among them.
      parts: What computes the keys of one device.
      scale: Multiplies the scores.
      window: How many positions back a query sees; None: all.
      sinks: Logits without values; None: there are none.
    """
    sizes = blocks.block_sizes(q.shape[1], k.shape[1], q.shape[2])
    ring = _Ring(axis, parts, blocked.How(scale, window, sizes))
    if q.shape[1] % 2 or k.shape[1] % 2:
        return _attend(ring, q, k, v, queries, keys, sinks)
    q, k, v, queries, keys = balance((q, k, v, queries, keys), axis)
    return unbalance(_attend(ring, q, k, v, queries, keys, sinks), axis)


def balance(tree: Any, axis: str) -> Any:
    """Each device's part [B, T, ...] of rows, for one early and one late part of half its length.

    Of 2n halves in the order of the rows, the i-th of n devices has 2i and 2i + 1, and is given i
    and 2n - 1 - i.
    """
    even = jax.lax.axis_index(axis) % 2 == 0

    def move(x: Array) -> Array:
        halves = jnp.split(x, 2, axis=1)
        a, b = (jax.lax.ppermute(h, axis, p) for h, p in zip(halves, _ways(axis), strict=True))
        return jnp.concatenate([jnp.where(even, a, b), jnp.where(even, b, a)], axis=1)

    return jax.tree.map(move, tree)


def unbalance(tree: Any, axis: str) -> Any:
    """The inverse of `balance`."""
    even = jax.lax.axis_index(axis) % 2 == 0

    def move(x: Array) -> Array:
        early, late = jnp.split(x, 2, axis=1)
        halves = jnp.where(even, early, late), jnp.where(even, late, early)
        ways = ([(to, by) for by, to in way] for way in _ways(axis))
        moved = [jax.lax.ppermute(h, axis, way) for h, way in zip(halves, ways, strict=True)]
        return jnp.concatenate(moved, axis=1)

    return jax.tree.map(move, tree)


def _ways(axis: str) -> list[list[tuple[int, int]]]:
    """From which device to which the first halves go, and the second ones."""
    n = jax.lax.axis_size(axis)
    return [[(i, min(h, 2 * n - 1 - h)) for i, h in enumerate(range(f, 2 * n, 2))] for f in (0, 1)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: _Ring, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> Array:
    return _attend_forward(ring, q, k, v, queries, keys, sinks)[0]


def _attend_forward(
    ring: _Ring, q: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, sinks: Array | None
) -> tuple[Array, tuple]:
    def meet(carry: tuple, _: None) -> tuple[tuple, None]:
        out, lse, there = carry
        ahead = _pass_on(ring.axis, there)  # while the next ones come, these are worked on
        new_out, new_lse = ring.parts.forward(ring.how, q, *there[:2], queries, there[2])
        total = jnp.logaddexp(lse, new_lse)
        old, new = (jnp.exp(x - total)[..., None] for x in (lse, new_lse))
        return (out * old + new_out * new, total, ahead), None

    out = jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32)
    lse = jnp.full(q.shape[:3], MASKED_SCORE, jnp.float32)
    start = blocks.vary_as((out, lse), q, k, v, queries, keys)
    (out, lse, _), _ = jax.lax.scan(
        meet, (*start, (k, v, keys)), None, length=jax.lax.axis_size(ring.axis)
    )
    out, lse = blocked.add_sinks(out, lse, sinks)
    out = checkpoint_name(out.astype(q.dtype), blocked.OUT)
    lse = checkpoint_name(lse, blocked.LSE)
    return out, (q, k, v, queries, keys, sinks, out, lse)


def _attend_backward(ring: _Ring, saved: tuple, g: Array) -> tuple:
    q, k, v, queries, keys, sinks, out, lse = saved
    delta = blocked.inner(g, out)

    def meet(carry: tuple, _: None) -> tuple[tuple, None]:
        dq, there, gradients = carry
        ahead = _pass_on(ring.axis, there)
        own, *theirs = ring.parts.backward(
            ring.how, q, *there[:2], queries, there[2], g, lse, delta
        )
        gradients = [a + b for a, b in zip(gradients, theirs, strict=True)]
        return (dq + own, ahead, _pass_on(ring.axis, gradients)), None

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    dq, *gradients = blocks.vary_as(zeros, q, k, v, queries, keys, g)
    (dq, _, gradients), _ = jax.lax.scan(
        meet, (dq, (k, v, keys), gradients), None, length=jax.lax.axis_size(ring.axis)
    )
    grads = [x.astype(like.dtype) for x, like in zip((dq, *gradients), (q, k, v), strict=True)]
    return *grads, None, None, blocked.sinks_gradient(sinks, lse, delta)


_attend.defvjp(_attend_forward, _attend_backward)


def _pass_on(axis: str, tree: Any) -> Any:
    """Each array to the next device of the ring, from the one before."""
    devices = jax.lax.axis_size(axis)
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, to_next), tree)
