"""Attention of a layer: grouped-query and latent, over keys and values that the caller keeps."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from rljax_kernels import attention as kernels
from rljax_kernels.attention import OPERATION, Asked, Tokens, whole_rows
from rljax_kernels.registry import Implementation

from rljax.errors import InputError, MissingDependencyError
from rljax.mesh import BATCH_AXES, constrain, fit, gather, map_shards, split, varies, vary_alike
from rljax.models.config import Attention, LatentAttention, Yarn
from rljax.models.layers import matmul, rms_norm
from rljax.models.parameters import Params
from rljax.models.rope import rope_frequencies, rotate

_log = logging.getLogger(__name__)


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


_LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the others have


@struct.dataclass
class FullAttention:
    """Causal attention within each segment of a row, and over its prefix; there is no cache.

    Attributes:
      tokens: Where the tokens stand.
      backend: As `ModelConfig.attention_backend`.
      packed: Whether a row may hold several sequences, or padding elsewhere than at its end.
    """

    tokens: Tokens
    backend: str = struct.field(pytree_node=False, default="auto")
    packed: bool = struct.field(pytree_node=False, default=True)

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
        options = {"scale": scale, "window": window, "packed": self.packed}
        local = functools.partial(_attend_finite, self.backend, options)
        k, v = (_enough_heads(x, q.shape[2]) for x in (k, v))
        heads = fit(q.shape, BATCH_AXES, "context", "tensor")
        rows = fit(self.tokens.segments.shape, BATCH_AXES, "context")
        specs = (heads, heads, heads, rows, P(*heads[2:]))
        # Where keys are split, too, the function has to know.
        checked = self.backend not in kernels.UNTYPED or split("context")
        run = map_shards(local, specs, heads, checked)
        return run(q, k, v, self.tokens, sinks), cache


def full_attention(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    prefix: Int[Array, "B T"] | None = None,
    backend: str = "auto",
    packed: bool = True,
) -> FullAttention:
    """Causal attention within each segment of a row, and over its prefix, if it has any.

    Args:
      positions: Places in the sequence, from which windows are measured.
      segments: Sequences of a row by number, at most its length; 0 is padding.
      prefix: The segment that a position sees besides its own (a prompt shared by several
        responses), 0 for none; None: there are none.
      backend: As `ModelConfig.attention_backend`.
      packed: Whether a row may hold several sequences, or padding elsewhere than at its end; some
        backends compute rows only that do not.
    """
    return FullAttention(whole_rows(positions, segments, prefix), backend, packed)


def choose_backend(wanted: str, asked: Asked, axis: str | None = None) -> Implementation:
    """`rljax_kernels.attention.choose`; the first choice of each kind is logged.

    Raises:
      InputError: The backend is unknown, or does not compute what is asked on these devices.
      MissingDependencyError: The backend needs what is not installed.
    """
    try:
        chosen = kernels.choose(wanted, asked, axis)
    except ValueError as e:
        kind = InputError
        if wanted in (i.name for i in OPERATION.implementations):
            kind = MissingDependencyError if OPERATION.named(wanted).missing() else InputError
        raise kind(f"attention_backend={wanted!r}: {e}") from e
    _log_choice(wanted, chosen.name)
    return chosen


@functools.cache
def _log_choice(wanted: str, chosen: str) -> None:
    _log.info("attention is computed by backend %r (attention_backend=%r)", chosen, wanted)


def _enough_heads(x: Array, heads: int) -> Array:
    """Keys or values [B, T, K, d], with heads repeated until `tensor` splits them as it does H."""
    if not split("tensor"):
        return x
    devices = jax.sharding.get_abstract_mesh().shape["tensor"]
    if heads % devices:
        return x
    return jnp.repeat(x, math.lcm(x.shape[2], devices) // x.shape[2], axis=2)


def _attend_finite(
    backend: str,
    options: dict[str, Any],
    q: Array,
    k: Array,
    v: Array,
    tokens: Tokens,
    sinks: Array | None,
) -> Array:
    """Attention of one device in which what is not finite spoils its own sequence and no other."""
    # 0 · NaN is NaN: masked values must be finite, or they leak into their neighbours' values and
    # gradients. Tokens with what is not finite get 0, and their own sequence's output NaN.
    q, k, v, tokens, sinks = vary_alike((q, k, v, tokens, sinks))
    axis = "context" if varies(k, "context") else None
    fine_query = jnp.isfinite(q).all((2, 3))
    fine_key = jnp.isfinite(k).all((2, 3)) & jnp.isfinite(v).all((2, 3))
    broken = ~fine_query | _spoilt(~fine_key, tokens, axis)
    fine = ((q, fine_query), (k, fine_key), (v, fine_key))
    q, k, v = (jnp.where(f[..., None, None], x, 0) for x, f in fine)
    keys = tokens
    if axis is not None and backend not in ("auto", *kernels.RINGS):
        # It needs all keys of a row on one device.
        gathered = functools.partial(gather, axes=axis, dimension=1)
        k, v, keys = jax.tree.map(gathered, (k, v, tokens))
        axis = None
    static = {"window": options["window"], "packed": options["packed"]}
    asked = kernels.asked_of(q, k, v, tokens, sinks=sinks, **static)
    chosen = choose_backend(backend, asked, axis)
    how = {**options, "sinks": sinks, "backend": chosen.name, "axis": axis}
    out = kernels.attention(q, k, v, tokens, keys, **how)
    return jnp.where(broken[..., None, None], jnp.nan, out)


def _spoilt(broken: Array, tokens: Tokens, axis: str | None) -> Array:
    """Which queries [B, T] stand behind a broken key of their own sequence or of its prefix.

    Windows do not count: the whole rest of a broken sequence is spoilt.
    """
    rows, length = broken.shape
    # The least index of a broken key, of each segment.
    whole = length if axis is None else length * jax.lax.axis_size(axis)
    segments = jnp.clip(tokens.segments, 0, whole)
    never = jnp.iinfo(jnp.int32).max
    row = jnp.arange(rows)[:, None]
    first = jnp.full((rows, whole + 1), never) + tokens.index[:1, :1] * 0
    first = first.at[row, segments].min(jnp.where(broken, tokens.index, never))
    if axis is not None:
        first = jax.lax.pmin(first, axis)
    spoilt = tokens.index >= first[row, segments]
    if tokens.prefix is not None:
        prefix = jnp.clip(tokens.prefix, 0, whole)
        spoilt |= (prefix > 0) & (tokens.index >= first[row, prefix])
    return spoilt


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
