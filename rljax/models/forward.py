"""The forward pass of every model: one function for training, scoring, prefill and decoding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels.cpu import Native

from rljax.errors import InputError
from rljax.mesh import (
    BATCH_AXES,
    Names,
    axes_of,
    constrain,
    constrain_rows,
    fit,
    gather,
    map_shards,
    split,
    varies,
    vary_alike,
    vary_over,
)
from rljax.models import experts as moe
from rljax.models import pipeline
from rljax.models.balance import balance_loss
from rljax.models.config import (
    Attention,
    Dense,
    Experts,
    LatentAttention,
    ModelConfig,
    RopeScaling,
    Stack,
    Yarn,
)
from rljax.models.experts import RouterOutputs
from rljax.models.parameters import Params, declare
from rljax.models.pipeline import Layers, Outputs


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


_MASKED = -1e30
_LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the others have
_UNROLLED = 8  # so few layers compile and run faster one by one than as a loop


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm in float32, in x's dtype (Zhang and Sennrich, 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling | Yarn | None = None
) -> Float[Array, " half"]:
    """Inverse frequencies of the rotary embedding of `dim` numbers, stretched as `scaling` says."""
    inverse = 1.0 / theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if isinstance(scaling, RopeScaling):
        return _llama3(inverse, scaling)
    if isinstance(scaling, Yarn):
        return _yarn(inverse, dim, theta, scaling)
    return inverse


def _llama3(inverse: Array, s: RopeScaling) -> Array:
    wavelength = 2 * jnp.pi / inverse
    ratio = s.original_max_position / wavelength
    smooth = (ratio - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / s.factor + smooth * inverse


def _yarn(inverse: Array, dim: int, theta: float, s: Yarn) -> Array:
    def index(rotations: float) -> float:
        """Which frequency turns so often over the original context."""
        wavelength = s.original_max_position / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index(s.beta_fast), index(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    slow = jnp.clip(ramp, 0.0, 1.0)
    return slow * inverse / s.factor + (1 - slow) * inverse


def rotate(x: Array, positions: Array, inverse: Array, magnitude: float = 1.0) -> Array:
    """Applies rotary embeddings (Su et al., 2021) to [B, T, heads, d], halves apart."""
    angle = positions[..., None, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    y = x.astype(jnp.float32)
    return (y * cos + jnp.roll(y, y.shape[-1] // 2, axis=-1) * sin).astype(x.dtype)


def attend_masked(
    q: Array, k: Array, v: Array, allowed: Array, scale: float, sinks: Array | None = None
) -> Array:
    """Grouped-query attention with the softmax in float32.

    Args:
      q: [B, T, H, d].
      k: [B, S, K, d].
      v: [B, S, K, dv].
      allowed: bool [B, T, S], which keys each query may see; a query with none gets a mean of
        all values, which nobody may use.
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
    scores = jnp.where(allowed[:, None, None], scores * scale, _MASKED)
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
    # 0 · NaN is NaN: what is masked must be finite, or it leaks into its neighbours' values
    # and gradients. What is not is kept apart, and put back into its own sequence.
    fine_q, fine_k = jnp.isfinite(q), jnp.isfinite(k)
    fine_v = jnp.isfinite(v)
    broken_key = ~(fine_k.all((2, 3)) & fine_v.all((2, 3)))
    broken = ~fine_q.all((2, 3)) | (allowed & broken_key[:, None]).any(-1)
    q, k, v = (jnp.where(f, x, 0) for f, x in ((fine_q, q), (fine_k, k), (fine_v, v)))
    out = attend_masked(q, k, v, allowed, scale, sinks)
    return jnp.where(broken[..., None, None], jnp.nan, out)


def _attention(
    p: Params,
    x: Array,
    positions: Array,
    c: Attention | LatentAttention,
    config: ModelConfig,
    attend: Attend,
    layer: Array | int,
    cache: Any,
) -> tuple[Array, Any]:
    if isinstance(c, LatentAttention):
        return _latent_attention(p, x, positions, c, attend, layer, cache)

    projected = [matmul(x, p[name]) for name in ("q", "k", "v")]
    if c.bias:
        biases = (p[f"{name}_bias"].astype(x.dtype) for name in ("q", "k", "v"))
        projected = [y + bias for y, bias in zip(projected, biases, strict=True)]
    q, k, v = map(_over_heads, projected)
    if c.qk_norm:
        q, k = (_qk_norm(y, p[name], config.norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
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
    """Arrays [B, T, heads, d] rotated as an attention says."""
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


def matmul(x: Array, w: Array | Native, contracted: int = 1) -> Array:
    """Contracts the last dimensions of x with the first of w, in x's dtype.

    As a product of two plain matrices: for more dimensions XLA turns the operands of the weights'
    gradient round on CPU, which takes twice as long. Where rows and their lengths are both split
    over devices, they stay two dimensions.
    """
    inner, lead = math.prod(w.shape[:contracted]), x.shape[: x.ndim - contracted]
    flat = x.reshape(*(lead if split("context") else (-1,)), inner)
    w, outer = w.astype(x.dtype), w.shape[contracted:]
    y = w.product(flat) if isinstance(w, Native) else flat @ w.reshape(inner, -1)
    return y.reshape(*lead, *outer)


def _dense(p: Params, x: Array) -> Array:
    hidden = jax.nn.silu(matmul(x, p["gate"])) * matmul(x, p["up"])
    return matmul(constrain(hidden, BATCH_AXES, "context", "tensor"), p["down"])


def _shared(p: Params, x: Array, c: Experts) -> Array:
    y = _dense(p["shared"], x)
    if not c.shared_gated:
        return y
    # As in the router: float32, at a named precision.
    gate = p["shared_gate"].astype(jnp.float32)
    z = jnp.matmul(x.astype(jnp.float32), gate, precision=jax.lax.Precision.HIGHEST)
    return (jax.nn.sigmoid(z) * y.astype(jnp.float32)).astype(x.dtype)


_EXPERT_AXES = {
    "gate": ("expert", "fsdp", "tensor"),
    "up": ("expert", "fsdp", "tensor"),
    "down": ("expert", "tensor", "fsdp"),
    "gate_bias": ("expert", "tensor"),
    "up_bias": ("expert", "tensor"),
    "down_bias": ("expert",),
}
"""The mesh axes that split the parameters of experts where they enter `shard_map`, which gathers
those over `fsdp`; the router is whole."""


def _mixture(
    p: Params,
    x: Array,
    c: Experts,
    config: ModelConfig,
    counted: Array,
    replay: Array | None,
    load: Array | None,
) -> tuple[Array, dict[str, Array]]:
    rows = fit(x.shape, BATCH_AXES, "context")
    axes = axes_of(rows)

    def routed(
        p: Params, x: Array, counted: Array, replay: Array | None, load: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        """Each device routes its own tokens; what the routers did is added up."""
        p = {name: _gather_part(w, x, parted[name]) for name, w in p.items()}
        b, t, width = x.shape
        flat = x.reshape(b * t, width)
        old = None if replay is None else replay.reshape(b * t, c.top_k)
        probs, own, used, weights = moe.route(
            p["router"], flat, c, old, p.get("router_bias"), p.get("correction")
        )
        out = moe.parallel_experts(
            p,
            flat,
            used,
            weights,
            spread,
            c.activation,
            config.expert_dispatch,
            config.expert_backend,
        )
        live = counted.reshape(-1).astype(jnp.float32)
        one_hot = jax.nn.one_hot(used, c.num_experts, dtype=jnp.float32).sum(1)
        entropy = -jnp.sum(probs * jnp.log(jnp.maximum(probs, 1e-30)), axis=-1)
        flipped = jnp.any(jnp.sort(own, -1) != jnp.sort(used, -1), axis=-1)
        sums = jax.lax.stop_gradient(
            {
                "load": live @ one_hot,
                "entropy": jnp.sum(live * entropy),
                "flips": jnp.sum(live * flipped),
            }
        )
        sums = jax.lax.psum(sums, axes) if axes else sums
        stats = {"experts": used.reshape(b, t, c.top_k), **sums}
        if load is not None:
            stats["auxiliary"] = balance_loss(probs, load[: c.num_experts]).reshape(b, t)
        return out.reshape(b, t, width), stats

    # Cast before they are gathered, which halves the bytes in bfloat16.
    p_routed = {
        name: w.astype(x.dtype) if name in _EXPERT_AXES else w
        for name, w in p.items()
        if not name.startswith("shared")
    }

    specs, parted = {}, {}
    for name, w in p_routed.items():
        specs[name], parted[name] = _entering(w, _EXPERT_AXES.get(name, ()), axes)
    # While sampling, a device has its experts already; each stage has all of its layers'.
    spread = tuple(axis for axis in vary_over(p["gate"]) if axis != "stage")
    spread += axes_of(specs["gate"][:1])
    stats_specs = {"experts": rows, "load": P(), "entropy": P(), "flips": P()}
    if load is not None:
        stats_specs["auxiliary"] = rows
    out, stats = map_shards(routed, (specs, rows, rows, rows, P()), (rows, stats_specs))(
        p_routed, x, counted, replay, load
    )
    return (out + _shared(p, x, c) if c.shared_size else out), stats


_EMBED_AXES = ("tensor", "fsdp")
"""Likewise of the embedding; those of the output matrix are in the other order."""


def _entering(w: Array, names: Sequence[Names], rows: Sequence[str]) -> tuple[P, int | None]:
    """How a weight enters `shard_map`, to meet rows that are split over some axes.

    Returns:
      Its spec, and the dimension that is split over `fsdp`: none where devices along it have the
      same rows, for then none of them could be spared the whole.
    """
    spec = fit(w.shape, *(None if n == "fsdp" and n not in rows else n for n in names))
    return spec, next((d for d, part in enumerate(spec) if "fsdp" in axes_of([part])), None)


def _gather_part(w: Array, x: Array, dimension: int | None) -> Array:
    """A weight whole over `fsdp`, to meet x inside `shard_map`.

    Gathered there, so that backwards each device is given its part of the gradients' sum, and only
    parts are added up over other axes: XLA may form the whole sum on every device.
    """
    if dimension is None:
        return w
    w, _ = vary_alike((w, x))
    return gather(w, "fsdp", dimension)


def _run_layers(
    stack: Stack,
    config: ModelConfig,
    layers: Layers,
    x: Array,
    positions: Array,
    counted: Array,
    attend: Attend,
    cache: Any,
    layer: int,
) -> tuple[Array, Any, Outputs]:
    """Runs layers of a stack one after the other; the first is the layer-th of the model."""

    def repeat(
        carry: tuple[Array, Any, Array | int], layers: Layers
    ) -> tuple[tuple[Array, Any, Array | int], Outputs]:
        x, cache, layer = carry
        outputs: list[dict[str, Array]] = []
        for i, (block, p) in enumerate(zip(stack.pattern, layers.weights, strict=True)):
            with jax.named_scope("attention"):
                y = rms_norm(x, p["attention_norm"], config.norm_eps)
                y, cache = _attention(
                    p["attention"], y, positions, block.attention, config, attend, layer + i, cache
                )
                x = constrain_rows(x + y)
            with jax.named_scope("feed_forward"):
                y = rms_norm(x, p["feed_forward_norm"], config.norm_eps)
                if isinstance(block.feed_forward, Dense):
                    y = _dense(p["feed_forward"], y)
                else:
                    old = None if layers.replay is None else layers.replay[len(outputs)]
                    given = None if layers.loads is None else layers.loads[len(outputs)]
                    y, stats = _mixture(
                        p["feed_forward"], y, block.feed_forward, config, counted, old, given
                    )
                    outputs.append(stats)
                x = constrain_rows(x + y)
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *outputs) if outputs else None
        return (x, cache, layer + len(stack.pattern)), stacked

    body = jax.checkpoint(repeat) if config.remat else repeat
    if layers.count == 1:  # no loop: a cache may then hold an array for each layer
        once = jax.tree.map(lambda a: a[0], layers)
        (x, cache, _), stats = body((x, cache, layer), once)
        return x, cache, jax.tree.map(lambda a: a[None], stats)
    (x, cache, _), stats = jax.lax.scan(
        body, (x, cache, jnp.int32(layer)), layers, unroll=layers.count <= _UNROLLED
    )
    return x, cache, stats


def _run_rows(
    stack: Stack, config: ModelConfig, layers: Layers, x: Array, rows: tuple[Any, ...]
) -> tuple[Array, Outputs]:
    """`_run_layers` where nothing but rows and layers is told, as in a pipeline."""
    positions, counted, *places = rows
    attend = full_attention(*places)
    x, _, stats = _run_layers(stack, config, layers, x, positions, counted, attend, None, 0)
    return x, stats


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    *,
    cache: Any = None,
    counted: Bool[Array, "B T"] | None = None,
    routing: Int[Array, "B T layers k"] | None = None,
    load: Float[Array, "layers E"] | None = None,
) -> tuple[Float[Array, "B T D"], Any, RouterOutputs | None]:
    """Runs all layers; attention is the caller's, so that the same code trains and decodes.

    Args:
      params: In the shape of `declare(config)`, in any dtype; cast to the compute dtype at use.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions.
      attend: Attention over whatever keys the caller keeps.
      cache: Carried through the layers and handed to `attend` (never through a scan's outputs,
        which would copy it).
      counted: Which tokens count in the routers' statistics; all by default.
      routing: Experts to replay in each mixture layer, -1 where unset.
      load: Tokens given to each expert of each mixture layer over the whole optimizer batch; with
        it the routers report their load-balancing loss.

    Returns:
      Final hidden states after the last norm, the cache, and what the routers did (None for a
      dense model).
    """
    x = constrain_rows(embed(params, config, tokens))
    counted = jnp.ones(tokens.shape, bool) if counted is None else counted
    found: list[dict[str, Array]] = []
    layer, mixture = 0, 0
    for stack, weights, declared in zip(
        config.stacks, params["stacks"], declare(config)["stacks"], strict=True
    ):
        mixtures = sum(isinstance(b.feed_forward, Experts) for b in stack.pattern)
        replay, loads = None, None
        if load is not None and mixtures:
            part = load[mixture : mixture + mixtures * stack.repeats]
            loads = part.reshape(stack.repeats, mixtures, -1)
        if routing is not None and mixtures:
            part = routing[:, :, mixture : mixture + mixtures * stack.repeats]
            replay = part.transpose(2, 0, 1, 3).reshape(
                stack.repeats, mixtures, *part.shape[:2], part.shape[3]
            )
        left, outputs = Layers(weights, replay, loads), []
        schedule = pipeline.schedule_here(stack.repeats, x.shape, config)
        if schedule is not None and isinstance(attend, FullAttention):
            inner = dataclasses.replace(config, remat=config.remat and not schedule.recomputed)
            rows = (positions, counted, attend.positions, attend.segments, attend.prefix)
            piped, left = pipeline.divide(schedule, left, declared)
            run_rows = functools.partial(_run_rows, stack, inner)
            x, stats = pipeline.run(schedule, run_rows, piped, x, rows)
            outputs.append(stats)
        if left.count:
            x, cache, stats = _run_layers(
                stack, config, left, x, positions, counted, attend, cache, layer
            )
            outputs.append(stats)
        found += [
            jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stats)
            for stats in outputs
            if stats is not None
        ]
        layer += stack.repeats * len(stack.pattern)
        mixture += stack.repeats * mixtures
    x = rms_norm(x, params["norm"], config.norm_eps)
    if not found:
        return x, cache, None
    joined = {
        "experts": jnp.concatenate([f["experts"] for f in found]).transpose(1, 2, 0, 3),
        "load": jnp.concatenate(
            [
                jnp.pad(f["load"], ((0, 0), (0, config.num_experts - f["load"].shape[1])))
                for f in found
            ]
        ),
        "entropy": jnp.concatenate([f["entropy"] for f in found]),
        "flips": jnp.concatenate([f["flips"] for f in found]),
    }
    if load is not None:
        joined["auxiliary"] = jnp.concatenate([f["auxiliary"] for f in found]).mean(0)
    return x, cache, RouterOutputs(tokens=jnp.sum(counted.astype(jnp.float32)), **joined)


def embed(
    params: Params, config: ModelConfig, tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch D"]:
    """The embeddings of tokens, in the compute dtype."""
    table, rows = params["embed"], fit(tokens.shape, BATCH_AXES, "context")
    laid, _ = _entering(table, _EMBED_AXES, axes_of(rows))
    local = functools.partial(_embed_part, dtype=config.dtype)
    return map_shards(local, (laid, rows), rows)(table, tokens)


def _embed_part(table: Array, tokens: Array, *, dtype: str) -> Array:
    """`embed` of one device, which has some of the vocabulary and a part of each embedding.

    It looks its part up for the tokens of all devices that have the others, and trades the
    results: activations are fewer than a vocabulary.
    """
    parted, sliced = varies(table, "fsdp"), varies(table, "tensor")
    if parted:
        tokens = jax.lax.all_gather(tokens, "fsdp", tiled=True)
    if sliced:
        tokens = tokens - jax.lax.axis_index("tensor") * table.shape[0]
    found = table[tokens]
    if sliced:
        mine = (tokens >= 0) & (tokens < table.shape[0])
        found = jax.lax.psum(jnp.where(mine[..., None], found, 0), "tensor")
    # Cast after the look-up: the gradients of a token's places then add up in the parameters'
    # dtype, and no second embedding is formed.
    found = found.astype(dtype)
    if parted:
        found = jax.lax.all_to_all(found, "fsdp", 0, found.ndim - 1, tiled=True)
    return found


def output_logits(params: Params, config: ModelConfig, hidden: Array) -> Array:
    """Logits in float32 [..., V] from final hidden states [..., D]."""
    flat = hidden.reshape(-1, hidden.shape[-1])  # for the reason given in `matmul`
    if isinstance(params.get("output"), Native):
        flat = params["output"].astype(hidden.dtype).product(flat)
    else:
        # The tied embedding is contracted as it lies: turning it would copy it at every step.
        name, axis = ("embed", 1) if config.tie_embeddings else ("output", 0)
        w = params[name].astype(hidden.dtype)
        flat = jax.lax.dot_general(
            flat,
            w,
            (((1,), (axis,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    return flat.reshape(*hidden.shape[:-1], -1)


def places(tokens: Array, positions: Array | None, segments: Array | None) -> tuple[Array, Array]:
    """Positions and segments where they are not given: one segment a row, from 0."""
    if segments is None:
        segments = jnp.ones(tokens.shape, jnp.int32)
    if positions is None:
        # Each segment counts from 0, whatever stands before it in the row.
        row = jnp.arange(tokens.shape[1])
        starts = jnp.concatenate(
            [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
        )
        positions = row - jax.lax.cummax(jnp.where(starts, row, 0), axis=1)
    return positions, segments


def logits(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """All logits, for small uses; `token_logprobs` never holds as much.

    Args:
      params: The parameters.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions; by default each segment counts from 0.
      segments: Packed sequences by number, 0 for padding; by default a row is one sequence.

    Returns:
      float32 logits of the token after each position.
    """
    positions, segments = places(tokens, positions, segments)
    hidden, _, _ = hidden_states(
        params, config, tokens, positions, full_attention(positions, segments)
    )
    return output_logits(params, config, hidden)


def token_logprobs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    routing: Int[Array, "B T layers k"] | None = None,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability and entropy at every token, never holding [B, T, V].

    Args:
      params: The parameters.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions; by default each segment counts from 0.
      segments: Packed sequences by number, 0 for padding; by default a row is one sequence.
      temperature: Divides the logits, as in sampling.
      routing: Experts to replay, -1 where unset.
      chunk: Tokens whose logits a device holds at a time, at least one of each row.

    Returns:
      logp: float32; entry t is the log-probability of the token at t given those before it in its
        segment, 0 for the first.
      entropy: float32, nats; of the distribution that the token at t was drawn from.
    """
    logp, entropy, _ = score_tokens(
        params,
        config,
        tokens,
        positions,
        segments,
        temperature=temperature,
        routing=routing,
        chunk=chunk,
    )
    return logp, entropy


def score_tokens(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    routing: Int[Array, "B T layers k"] | None = None,
    chunk: int = 1024,
    score_mask: Bool[Array, "B T"] | None = None,
    max_scored_tokens: int | None = None,
    prefix: Int[Array, "B T"] | None = None,
    load: Float[Array, "layers E"] | None = None,
    support: Int[Array, "B T S"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], RouterOutputs | None]:
    """`token_logprobs`, with what the routers did, and only where somebody asks.

    Args:
      params: As in `token_logprobs`, and so `config` to `chunk`.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions.
      segments: Packed sequences by number.
      temperature: Divides the logits.
      routing: Experts to replay.
      chunk: Tokens whose logits a device holds at a time, at least one of each row.
      score_mask: The tokens to score; others get 0. All but the first of a segment by default.
      max_scored_tokens: A bound on the scored tokens of a row. Logits are then formed for that
        many tokens a row, which saves most of the output matmul where prompts are long. Tokens
        past the bound get NaN. Not used on a mesh with a context axis.
      prefix: The segment that a position sees besides its own, 0 for none: a prompt that several
        responses of its row share. Their first tokens are scored given its last.
      load: As in `hidden_states`, for the routers' load-balancing loss.
      support: Ids that the sampler kept when it drew each token, -1 where unset: probabilities are
        those among them. A token with none is scored among the whole vocabulary.

    Returns:
      logp, entropy, and the routers' outputs (None for a dense model).

    Raises:
      ValueError: The temperature is not above 0.
    """
    if isinstance(temperature, int | float) and not temperature > 0:
        raise InputError(
            f"temperature={temperature} must be above 0: greedy decoding has no log-probabilities"
        )
    before, follows, router = states_before(
        params, config, tokens, positions, segments, prefix=prefix, routing=routing, load=load
    )
    keep = follows if score_mask is None else follows & score_mask
    rows = jnp.arange(tokens.shape[0])[:, None]
    # Over `context` each device scores what it holds: the scored tokens may all lie on one of them.
    if (
        max_scored_tokens is not None
        and max_scored_tokens < tokens.shape[1]
        and not split("context")
    ):
        # The scored places first, in order; the rest of the bound is filled with others.
        place = jnp.argsort(~keep, axis=1, stable=True)[:, :max_scored_tokens]
        kept = None if support is None else support[rows, place]
        logp, entropy = _score(
            params, config, before[rows, place], tokens[rows, place], temperature, chunk, kept
        )
        # A row with more scored tokens than the bound shows it, as NaN.
        unknown = jnp.full(tokens.shape, jnp.nan, jnp.float32)
        logp = unknown.at[rows, place].set(logp)
        entropy = unknown.at[rows, place].set(entropy)
    else:
        logp, entropy = _score(params, config, before, tokens, temperature, chunk, support)
    return jnp.where(keep, logp, 0.0), jnp.where(keep, entropy, 0.0), router


def states_before(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    prefix: Int[Array, "B T"] | None = None,
    routing: Int[Array, "B T layers k"] | None = None,
    load: Float[Array, "layers E"] | None = None,
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"], RouterOutputs | None]:
    """Final hidden states in which each token was chosen: what policy and critic both read.

    Arguments as in `score_tokens`. Returns the states, whether each token has one, and the
    routers' outputs (None for a dense model).
    """
    positions, segments = places(tokens, positions, segments)
    hidden, _, router = hidden_states(
        params,
        config,
        tokens,
        positions,
        full_attention(positions, segments, prefix),
        counted=segments > 0,
        routing=routing,
        load=load,
    )
    return *preceding(hidden, segments, prefix), router


def preceding(
    hidden: Float[Array, "B T D"],
    segments: Int[Array, "B T"],
    prefix: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
    """The hidden state that each token was predicted from, and whether there is one.

    It is the one before it in its segment; for the first of a segment the last of its prefix.
    """
    follows = jnp.pad(
        (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (1, 0))
    )
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if prefix is None:
        return before, follows
    place = jnp.arange(segments.shape[1])
    ends = jnp.where(prefix[:, :, None] == segments[:, None, :], place, -1).max(-1)
    first = ~follows & (prefix > 0) & (ends >= 0)
    last = jnp.take_along_axis(hidden, jnp.maximum(ends, 0)[..., None], axis=1)
    return jnp.where(first[..., None], last, before), follows | first


def _score(
    params: Params,
    config: ModelConfig,
    hidden: Array,
    targets: Array,
    temperature: float,
    chunk: int,
    support: Array | None,
) -> tuple[Array, Array]:
    """Log-probability and entropy of each target, in chunks of tokens recomputed backwards.

    Each device works on its own tokens, and over `tensor` on its own slice of the vocabulary.
    """
    name, axes = ("embed", _EMBED_AXES) if config.tie_embeddings else ("output", _EMBED_AXES[::-1])
    rows = fit(hidden.shape, BATCH_AXES, "context")
    laid, parted = _entering(params[name], axes, axes_of(rows))
    local = functools.partial(_score_part, config=config, chunk=chunk, parted=parted)
    with jax.named_scope("logprobs"):
        return map_shards(local, ({name: laid}, rows, rows, rows, P()), (rows, rows))(
            {name: params[name]}, hidden, targets, support, jnp.float32(temperature)
        )


def _score_part(
    params: Params,
    hidden: Array,
    targets: Array,
    support: Array | None,
    temperature: Array,
    *,
    config: ModelConfig,
    chunk: int,
    parted: int | None,
) -> tuple[Array, Array]:
    """`_score` of one device. A chunk holds a few tokens of every row."""
    sliced = varies(jax.tree.leaves(params)[0], "tensor")
    params = {name: _gather_part(w, hidden, parted) for name, w in params.items()}
    params, hidden = vary_alike((params, hidden))

    def over_vocabulary(x: Array) -> Array:
        return jax.lax.psum(x, "tensor") if sliced else x

    def pick(z: Array, ids: Array) -> Array:
        """The logits of ids [..., n], from whichever slices have them."""
        here = ids - jax.lax.axis_index("tensor") * z.shape[-1] if sliced else ids
        found = jnp.take_along_axis(z, jnp.clip(here, 0, z.shape[-1] - 1), axis=-1)
        return over_vocabulary(jnp.where((here >= 0) & (here < z.shape[-1]), found, 0.0))

    def part(args: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        h, t, kept = args
        z = output_logits(params, config, h) / temperature
        top = jax.lax.stop_gradient(z).max(-1, keepdims=True)
        z = z - (jax.lax.pmax(top, "tensor") if sliced else top)
        exp = jnp.exp(z)
        total = over_vocabulary(exp.sum(-1))
        entropy = jnp.log(total) - over_vocabulary((exp * z).sum(-1)) / total
        own = pick(z, t[..., None])[..., 0]
        logp = own - jnp.log(total)
        if kept is None:
            return logp, entropy
        return _among(own, pick(z, jnp.maximum(kept, 0)), kept >= 0, logp, entropy)

    rows, length = targets.shape
    width = max(1, chunk // rows)
    if length <= width:
        return part((hidden, targets, support))
    parts = -(-length // width)
    width = -(-length // parts)
    pad = parts * width - length

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(rows, parts, width, *x.shape[2:]).swapaxes(0, 1)

    def join(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(rows, parts * width)[:, :length]

    pieces = jax.tree.map(cut, (hidden, targets, support))
    logp, entropy = jax.lax.map(jax.checkpoint(part), pieces)
    return join(logp), join(entropy)


def _among(
    own: Array, among: Array, inside: Array, logp: Array, entropy: Array
) -> tuple[Array, Array]:
    """Log-probability and entropy among the kept ids, or as given where there are none."""
    some = inside.any(-1)
    among = jnp.where(inside, among, jnp.where(some[..., None], -jnp.inf, 0.0))
    each = jax.nn.log_softmax(among, axis=-1)
    own = own - jax.nn.logsumexp(among, axis=-1)
    spread = -jnp.sum(jnp.where(inside, jnp.exp(each) * jnp.where(inside, each, 0.0), 0.0), axis=-1)
    return jnp.where(some, own, logp), jnp.where(some, spread, entropy)
