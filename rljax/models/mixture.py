"""The mixture-of-experts layer: routing in float32, then the experts, on any mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from rljax.mesh import BATCH_AXES, axes_of, fit, map_shards, vary_over
from rljax.models.balance import balance_loss
from rljax.models.config import Experts, ModelConfig
from rljax.models.experts import parallel_experts
from rljax.models.layers import dense, enter, gather_part
from rljax.models.parameters import Params

_TINY = 1e-20  # added to the sum that sigmoids are divided by, as in DeepSeek-V3


@struct.dataclass
class RouterInputs:
    """What the routers of all mixture layers are told.

    Attributes:
      replay: int32 [B, T, layers, k], experts to use, -1 where unset; None: the routers' own.
      load: float32 [layers, E], tokens given to each expert over the whole optimizer batch; with it
        the routers report their load-balancing loss.
    """

    replay: Int[Array, "B T layers k"] | None = None
    load: Float[Array, "layers E"] | None = None

    def of_stack(
        self, first: int, repeats: int, mixtures: int
    ) -> tuple[
        Int[Array, "repeats mixtures B T k"] | None, Float[Array, "repeats mixtures E"] | None
    ]:
        """Those of a stack that repeats so many mixtures, the first-th of the model onwards."""
        replay = load = None
        layers = slice(first, first + mixtures * repeats)
        if self.replay is not None and mixtures:
            part = self.replay[:, :, layers]
            replay = part.transpose(2, 0, 1, 3).reshape(
                repeats, mixtures, *part.shape[:2], part.shape[3]
            )
        if self.load is not None and mixtures:
            load = self.load[layers].reshape(repeats, mixtures, -1)
        return replay, load


@struct.dataclass
class RouterOutputs:
    """What the routers of all mixture layers did; sums, so that micro-batches add.

    Attributes:
      experts: int32 [B, T, layers, k], the experts used at each token, in layer order.
      load: float32 [layers, E], tokens that each expert was given (padding not counted).
      entropy: float32 [layers], sum over tokens of the router distribution's entropy, nats.
      flips: float32 [layers], tokens whose own top-k set differs from the replayed one.
      tokens: float32 scalar, tokens counted.
      auxiliary: float32 [B, T], each token's load-balancing loss, a mean over the layers, with its
        gradient; None unless the load was given.
    """

    experts: Int[Array, "B T layers k"]
    load: Float[Array, "layers E"]
    entropy: Float[Array, " layers"]
    flips: Float[Array, " layers"]
    tokens: Float[Array, ""]
    auxiliary: Float[Array, "B T"] | None = None


def route(
    router: Float[Array, "D E"],
    x: Float[Array, "N D"],
    config: Experts,
    replay: Int[Array, "N k"] | None = None,
    bias: Float[Array, " E"] | None = None,
    correction: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "N E"], Int[Array, "N k"], Int[Array, "N k"], Float[Array, "N k"]]:
    """Scores of all experts in float32, then the top k.

    Args:
      router: The router's matrix.
      x: Normalised hidden states.
      config: The mixture.
      replay: Experts to use instead of the router's own choice, -1 where unset. Their weights
        are the live scores gathered at these indices, so that the router learns.
      bias: Added to the router's logits.
      correction: Added to the scores by which experts are chosen, and to no weight.

    Returns:
      Probabilities (sigmoid scores divided by the sum over all experts), the router's own choice,
      the experts used, and the weights of those.
    """
    # Named precision: float32 matmuls run in bfloat16 passes on TPU and may use TF32 on GPU.
    logits = jnp.matmul(
        x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if config.router.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probs = scores / (scores.sum(-1, keepdims=True) + _TINY)
    else:
        probs = scores = jax.nn.softmax(logits, axis=-1)
    own = _choose(scores, config, correction)
    used = own if replay is None else jnp.where(replay >= 0, replay, own)
    if config.router.norm_topk_prob:
        # In logarithms, so that replayed experts whose scores have underflowed make no 0/0.
        z = jnp.take_along_axis(logits, used, axis=-1)
        if config.router.scoring == "sigmoid":
            floor = jnp.full_like(z[:, :1], math.log(_TINY))
            z = jnp.concatenate([jax.nn.log_sigmoid(z), floor], axis=-1)
        weights = jax.nn.softmax(z, axis=-1)[:, : config.top_k]
    else:
        weights = jnp.take_along_axis(scores, used, axis=-1)
    return probs, own, used, weights if config.router.scale == 1 else weights * config.router.scale


def _choose(scores: Array, config: Experts, correction: Array | None) -> Array:
    """The k experts of highest corrected score, in the groups whose two best add up to most."""
    if correction is not None:
        scores = scores + correction.astype(jnp.float32)
    if config.router.top_groups < config.router.groups:
        grouped = scores.reshape(scores.shape[0], config.router.groups, -1)
        value = jax.lax.top_k(grouped, 2)[0].sum(-1)
        best = jax.lax.top_k(value, config.router.top_groups)[1]
        kept = (best[:, :, None] == jnp.arange(config.router.groups)).any(1)
        scores = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, config.top_k)[1]


def _shared(p: Params, x: Array, c: Experts) -> Array:
    y = dense(p["shared"], x)
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


def mixture(
    p: Params,
    x: Float[Array, "B T D"],
    c: Experts,
    config: ModelConfig,
    counted: Shaped[Array, "B T"],
    replay: Int[Array, "B T k"] | None,
    load: Float[Array, " E"] | None,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """One mixture layer: each device routes its own tokens; what the routers did is added up.

    Args:
      p: The layer's feed-forward parameters.
      x: Normalised hidden states.
      c: The mixture.
      config: The model.
      counted: Whether, or how often, tokens count in the statistics.
      replay: Experts to use, -1 where unset; None: the router's own.
      load: Tokens given to each expert over the optimizer batch; None: no balancing loss.

    Returns:
      What is added to the residual stream, and the fields of `RouterOutputs` for this layer.
    """
    rows = fit(x.shape, BATCH_AXES, "context")
    axes = axes_of(rows)
    # Cast before they are gathered, which halves the bytes in bfloat16.
    routed = {
        name: w.astype(x.dtype) if name in _EXPERT_AXES else w
        for name, w in p.items()
        if not name.startswith("shared")
    }
    specs, gathered = {}, {}
    for name, w in routed.items():
        specs[name], gathered[name] = enter(w, _EXPERT_AXES.get(name, ()), axes)
    # While sampling, a device has its experts already; each stage has all of its layers'.
    expert_axes = tuple(axis for axis in vary_over(p["gate"]) if axis != "stage")
    expert_axes += axes_of(specs["gate"][:1])
    stats_specs = {"experts": rows, "load": P(), "entropy": P(), "flips": P()}
    if load is not None:
        stats_specs["auxiliary"] = rows
    local = functools.partial(_mixture_part, c, config, _Axes(axes, expert_axes, gathered))
    out, stats = map_shards(local, (specs, rows, rows, rows, P()), (rows, stats_specs))(
        routed, x, counted, replay, load
    )
    return (out + _shared(p, x, c) if c.shared_size else out), stats


class _Axes(NamedTuple):
    """How a mixture lies on the mesh.

    Attributes:
      tokens: The mesh axes over which devices have different tokens.
      experts: Those over which they have different experts.
      gathered: Parameter -> its dimension that is gathered over `fsdp`, or None.
    """

    tokens: tuple[str, ...]
    experts: tuple[str, ...]
    gathered: Mapping[str, int | None]


def _mixture_part(
    c: Experts,
    config: ModelConfig,
    axes: _Axes,
    p: Params,
    x: Array,
    counted: Array,
    replay: Array | None,
    load: Array | None,
) -> tuple[Array, dict[str, Array]]:
    """`mixture` of one device, without the shared expert."""
    p = {name: gather_part(w, x, axes.gathered[name]) for name, w in p.items()}
    b, t, width = x.shape
    flat = x.reshape(b * t, width)
    old = None if replay is None else replay.reshape(b * t, c.top_k)
    bias, correction = p.get("router_bias"), p.get("correction")
    probs, own, used, weights = route(p["router"], flat, c, old, bias, correction)
    out = parallel_experts(
        p,
        flat,
        used,
        weights,
        axes.experts,
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
    sums = jax.lax.psum(sums, axes.tokens) if axes.tokens else sums
    stats = {"experts": used.reshape(b, t, c.top_k), **sums}
    if load is not None:
        stats["auxiliary"] = balance_loss(probs, load[: c.num_experts]).reshape(b, t)
    return out.reshape(b, t, width), stats


def join_outputs(
    found: Sequence[dict[str, Array]], counted: Shaped[Array, "B T"], num_experts: int
) -> RouterOutputs:
    """The outputs of all mixture layers, from those of some of them, each leaf [layers, ...].

    The load of layers with fewer experts than `num_experts` is padded with 0.
    """

    def padded(load: Array) -> Array:
        return jnp.pad(load, ((0, 0), (0, num_experts - load.shape[1])))

    def joined(name: str) -> Array:
        return jnp.concatenate([f[name] for f in found])

    return RouterOutputs(
        experts=joined("experts").transpose(1, 2, 0, 3),
        load=jnp.concatenate([padded(f["load"]) for f in found]),
        entropy=joined("entropy"),
        flips=joined("flips"),
        tokens=jnp.sum(counted.astype(jnp.float32)),
        auxiliary=joined("auxiliary").mean(0) if "auxiliary" in found[0] else None,
    )
