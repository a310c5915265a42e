"""Attention of a layer: grouped-query and latent, over keys and values that the caller keeps."""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import BATCH_AXES, constrain, fit, gather, map_shards, split, varies
from rljax.models.config import Attention, LatentAttention, Yarn
from rljax.models.layers import matmul, rms_norm
from rljax.models.parameters import Params
from rljax.models.rope import rope_frequencies, rotate


@runtime_checkable
class Attend(Protocol):
    """Attention of new queries over whatever keys and values the caller keeps."""

    def __call__(
        self,
        q: Float[Array, "B T H d"],
        k: Float[Array, "B T K d"],
        v: Float[Array, "B T K dv"],
        layer: Int[Array, ""] | int,
        cache: Any,
        /,
        *,
        scale: float,
        window: int | None = None,
        sinks: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "B T H dv"], Any]:
        """Attends, with the new keys and values taken in; gives the output and the new cache.

        Args:
          q: Queries, rotated.
          k: Keys of the same tokens, rotated.
          v: Their values.
          layer: The layer's index, for the cache; an int where layers do not run in a loop.
          cache: What the caller keeps between calls; None where it keeps nothing.
          scale: Multiplies the scores.
          window: How many positions back a query sees, its own included; None: all.
          sinks: A logit for each head that takes part in the softmax and has no value.
        """
        ...


MASKED_SCORE = -1e30
"""The score of a key that a query must not see: finite, so that a query without any keys gives no
NaN."""
_LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the others have


def attend_masked(
    q: Array, k: Array, v: Array, allowed: Array, scale: float, sinks: Array | None = None
) -> Array:
    """Grouped-query attention with the softmax in float32.

    Args:
      q: [B, T, H, d].
      k: [B, S, K, d].
      v: [B, S, K, dv].
      allowed: bool [B, T, S], which keys each query may see; a query with none gets a mean of
        all values, which must not be used.
      scale: Multiplies the scores.
      sinks: [H], logits that take part in the softmax and have no value; None: there are none.

    Returns:
      [B, T, H, dv] in q's dtype.
    """
    b, t, h, d = q.shape
    kv = k.shape[2]
    # A key head's queries become the rows of one plain matrix: XLA's CPU matmuls are twice as
    # fast so, forwards and backwards.
    rows = q.reshape(b, t, kv, h // kv, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, d)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("bkrd,bksd->bkrs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv, h // kv, t, -1)
    scores = jnp.where(allowed[:, None, None], scores * scale, MASKED_SCORE)
    if sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(kv, h // kv, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    probs = probs.astype(v.dtype).reshape(b, kv, rows.shape[2], -1)
    out = jnp.einsum("bkrs,bksd->bkrd", probs, v).reshape(b, kv, h // kv, t, -1)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


@struct.dataclass
class FullAttention:
    """Causal attention within each segment of a row, and over its prefix; there is no cache.

    Attributes:
      positions: Places in the sequence, from which windows are measured.
      segments: Sequences of a row by number.
      prefix: The segment that a position sees besides its own (a prompt shared by several
        responses), 0 for none; None: there are none.
      causal: Which keys each query may see where there is no window.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    prefix: Int[Array, "B T"] | None
    causal: Bool[Array, "B T T"]

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        layer: Array | int,
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        """As in `Attend`."""
        allowed = self.causal
        if window is not None:
            apart = self.positions[:, :, None] - self.positions[:, None, :]
            allowed = allowed & (apart < window)
        if not split("context"):
            return _attend_finite(q, k, v, allowed, sinks, scale), cache
        # Each device has the queries of its part of the rows, and gathers keys and values.
        heads = fit(q.shape, BATCH_AXES, "context", "tensor")
        local = map_shards(
            functools.partial(_attend_gathered, scale=scale),
            (heads, heads, heads, fit(allowed.shape, BATCH_AXES, "context"), P(*heads[2:])),
            heads,
        )
        return local(q, k, v, allowed, sinks), cache


def full_attention(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    prefix: Int[Array, "B T"] | None = None,
) -> FullAttention:
    """Causal attention within each segment of a row, and over its prefix, if it has any."""
    row = jnp.arange(segments.shape[1])
    seen = segments[:, :, None] == segments[:, None, :]
    if prefix is not None:
        seen = seen | ((prefix[:, :, None] == segments[:, None, :]) & (prefix > 0)[:, :, None])
    return FullAttention(positions, segments, prefix, seen & (row[:, None] >= row[None, :]))


def _attend_gathered(
    q: Array, k: Array, v: Array, allowed: Array, sinks: Array | None, scale: float
) -> Array:
    if varies(k, "context"):
        k, v = gather(k, "context", 1), gather(v, "context", 1)
    return _attend_finite(q, k, v, allowed, sinks, scale)


def _attend_finite(
    q: Array, k: Array, v: Array, allowed: Array, sinks: Array | None, scale: float
) -> Array:
    """`attend_masked` in which what is not finite spoils its own sequence and no other."""
    # 0 · NaN is NaN: masked values must be finite, or they leak into their neighbours' values and
    # gradients. What is not finite is replaced by 0, and its own sequence's output by NaN.
    fine_q, fine_k = jnp.isfinite(q), jnp.isfinite(k)
    fine_v = jnp.isfinite(v)
    broken_key = ~(fine_k.all((2, 3)) & fine_v.all((2, 3)))
    broken = ~fine_q.all((2, 3)) | (allowed & broken_key[:, None]).any(-1)
    q, k, v = (jnp.where(f, x, 0) for f, x in ((fine_q, q), (fine_k, k), (fine_v, v)))
    out = attend_masked(q, k, v, allowed, scale, sinks)
    return jnp.where(broken[..., None, None], jnp.nan, out)


def attention(
    p: Params,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    c: Attention | LatentAttention,
    norm_eps: float,
    attend: Attend,
    layer: Int[Array, ""] | int,
    cache: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer's attention: projections, rotation, `attend`, and the output projection.

    Args:
      p: The layer's parameters of attention.
      x: Normalised hidden states.
      positions: Rotary positions.
      c: The kind of attention.
      norm_eps: Epsilon of the norms of queries and keys.
      attend: Attention over whatever keys the caller keeps.
      layer: The layer's index, for the cache.
      cache: Handed to `attend`.

    Returns:
      What is added to the residual stream, and the new cache.
    """
    if isinstance(c, LatentAttention):
        return _latent_attention(p, x, positions, c, attend, layer, cache)

    projected = [matmul(x, p[name]) for name in ("q", "k", "v")]
    if c.bias:
        biases = (p[f"{name}_bias"].astype(x.dtype) for name in ("q", "k", "v"))
        projected = [y + bias for y, bias in zip(projected, biases, strict=True)]
    q, k, v = map(_over_heads, projected)
    if c.qk_norm:
        q, k = (_qk_norm(y, p[name], norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = _rotated((q, k), positions, c)
    out, cache = attend(
        q, k, v, layer, cache, scale=c.head_dim**-0.5, window=c.window, sinks=p.get("sinks")
    )
    y = matmul(_over_heads(out), p["o"], 2)
    return y + p["o_bias"].astype(x.dtype) if c.output_bias else y, cache


def _over_heads(x: Array) -> Array:
    """Keeps [B, T, heads, d] split over `tensor` by heads."""
    return constrain(x, BATCH_AXES, "context", "tensor")


def _rotated(
    arrays: tuple[Array, ...], positions: Array, c: Attention | LatentAttention
) -> tuple[Array, ...]:
    """Arrays [B, T, heads, d] rotated, where the attention rotates."""
    if c.rope_theta is None:
        return arrays
    inverse = rope_frequencies(arrays[0].shape[-1], c.rope_theta, c.rope_scaling)
    magnitude = c.rope_scaling.magnitude if isinstance(c.rope_scaling, Yarn) else 1.0
    return tuple(rotate(x, positions, inverse, magnitude) for x in arrays)


def _latent_attention(
    p: Params,
    x: Array,
    positions: Array,
    c: LatentAttention,
    attend: Attend,
    layer: Array | int,
    cache: Any,
) -> tuple[Array, Any]:
    """Keys and values are spelled out for each head where none are kept between calls.

    Where they are, only the latent and the rotary key are kept: each head's projection of the
    latent goes into its queries and its output instead, and all heads attend to the latents
    themselves, as to the keys and values of one head.
    """
    if c.q_rank is None:
        q = matmul(x, p["q"])
    else:
        q = matmul(rms_norm(matmul(x, p["q_down"]), p["q_norm"], _LATENT_EPS), p["q_up"])
    kv = matmul(x, p["kv_down"])
    latent = rms_norm(kv[..., : c.kv_rank], p["kv_norm"], _LATENT_EPS)
    q_rope, k_rope = _rotated((q[..., c.nope_dim :], kv[:, :, None, c.kv_rank :]), positions, c)
    q, up = q[..., : c.nope_dim], p["kv_up"].astype(x.dtype)
    if cache is None:
        k, v = jnp.split(matmul(latent, up), [c.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope, q_rope.shape)
    else:
        q = jnp.einsum("bthd,rhd->bthr", q, up[..., : c.nope_dim])
        k = v = latent[:, :, None]
    q, k = jnp.concatenate([q, q_rope], axis=-1), jnp.concatenate([k, k_rope], axis=-1)
    out, kept = attend(q, k, v, layer, cache, scale=c.scale)
    if cache is not None:
        out = jnp.einsum("bthr,rhd->bthd", out, up[..., c.nope_dim :])
    return matmul(out, p["o"], 2), kept


def _qk_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm of [B, T, heads, d] over as many dimensions as its scale has."""
    flat = x.reshape(*x.shape[: x.ndim - scale.ndim], -1)
    return rms_norm(flat, scale.reshape(-1), eps).reshape(x.shape)
