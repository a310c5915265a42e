"""The mixture-of-experts layer: router, dropless dispatch, combination, load."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int
from rljax_kernels import grouped_matmul as gmm

from rljax.models.config import Experts

Dispatch = Literal["all", "sorted"]


@struct.dataclass
class RouterOutputs:
    """What the routers of all mixture layers did; sums, so that micro-batches add.

    Attributes:
      experts: int32 [B, T, layers, k], the experts used at each token, in layer order.
      load: float32 [layers, E], tokens that each expert was given (padding not counted).
      entropy: float32 [layers], sum over tokens of the router distribution's entropy, nats.
      flips: float32 [layers], tokens whose own top-k set differs from the replayed one.
      tokens: float32 scalar, tokens counted.
    """

    experts: Int[Array, "B T layers k"]
    load: Float[Array, "layers E"]
    entropy: Float[Array, " layers"]
    flips: Float[Array, " layers"]
    tokens: Float[Array, ""]


def route(
    router: Float[Array, "D E"],
    x: Float[Array, "N D"],
    config: Experts,
    replay: Int[Array, "N k"] | None = None,
) -> tuple[Float[Array, "N E"], Int[Array, "N k"], Int[Array, "N k"], Float[Array, "N k"]]:
    """Softmax over all experts in float32, then the top k.

    Args:
      router: The router's matrix.
      x: Normalised hidden states.
      config: The mixture.
      replay: Experts to use instead of the router's own choice, -1 where unset. Their weights
        are the live probabilities gathered at these indices, so that the router learns.

    Returns:
      Probabilities, the router's own choice, the experts used, and the weights of those.
    """
    # Named precision: float32 matmuls run in bfloat16 passes on TPU and may use TF32 on GPU.
    logits = jnp.matmul(
        x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    probs = jax.nn.softmax(logits, axis=-1)
    _, own = jax.lax.top_k(probs, config.top_k)
    used = own if replay is None else jnp.where(replay >= 0, replay, own)
    if config.norm_topk_prob:
        # Their probabilities divided by the sum, without 0/0 where replayed ones have underflowed.
        weights = jax.nn.softmax(jnp.take_along_axis(logits, used, axis=-1), axis=-1)
    else:
        weights = jnp.take_along_axis(probs, used, axis=-1)
    return probs, own, used, weights


def experts(
    params: dict[str, Any],
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    dispatch: Dispatch | None = None,
) -> Float[Array, "N D"]:
    """Σ over the chosen experts of weight · SwiGLU expert; no token is dropped.

    Args:
      params: `gate`, `up` [E, D, F] and `down` [E, F, D].
      x: Hidden states, in the compute dtype.
      chosen: Experts of each token.
      weights: Their weights, float32.
      dispatch: `all` sends every token through every expert, for few tokens or few experts: its
        row bits do not depend on the other rows. `sorted` sorts tokens by expert for
        `grouped_matmul`. None: the cheaper by count of rows.
    """
    n, k = chosen.shape
    e = params["gate"].shape[0]
    block = gmm.block_size(n * k, e) if gmm.default_backend() == "blocks" else 1
    if dispatch is None:
        dispatch = "all" if n * e <= 2 * (n * k + e * block) else "sorted"
    gate, up, down = (params[m].astype(x.dtype) for m in ("gate", "up", "down"))
    if dispatch == "all":

        def every(m: Array) -> Array:
            if n < m.shape[1]:
                # Few rows: as a batch of E, for turning the weights round would cost more.
                each = jnp.broadcast_to(x, (e, *x.shape))
                return jnp.einsum("end,edf->enf", each, m).swapaxes(0, 1)
            # Many rows: one plain matmul over [D, E·F] is faster than a batch of E on CPU.
            return (x @ m.transpose(1, 0, 2).reshape(m.shape[1], -1)).reshape(n, e, -1)

        share = jnp.zeros((n, e), jnp.float32).at[jnp.arange(n)[:, None], chosen].add(weights)
        hidden = jax.nn.silu(every(gate)) * every(up)
        weighed = hidden.astype(jnp.float32) * share[:, :, None]
        return weighed.reshape(n, -1).astype(x.dtype) @ down.reshape(-1, down.shape[2])

    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=e).astype(jnp.int32)
    if block > 1:
        sizes, target = gmm.align(sizes, n * k, block)
        rows = gmm.aligned_rows(n * k, e, block)
    else:
        target, rows = jnp.arange(n * k, dtype=jnp.int32), n * k
    source = jnp.full((rows,), n * k, jnp.int32).at[target].set(order)
    place = jnp.zeros((n * k,), jnp.int32).at[order].set(target)
    spread = _gather_rows(x, source // k, place.reshape(n, k), n)

    def matmul(a: Array, w: Array) -> Array:
        return gmm.grouped_matmul(a, w, sizes, aligned=block if block > 1 else None)

    out = matmul(jax.nn.silu(matmul(spread, gate)) * matmul(spread, up), down)
    picked = _pick_rows(out, place, source).reshape(n, k, -1)
    return jnp.einsum("nkd,nk->nd", picked.astype(jnp.float32), weights).astype(x.dtype)


# Gathers whose transposes are gathers too: XLA's scatter-add is slow on CPU and unordered on GPU.


@jax.custom_vjp
def _pick_rows(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], where `inverse` says which output row reads each x row (out of range: none)."""
    return x[index]


def _pick_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple]:
    return x[index], (index, inverse)


def _pick_backward(saved: tuple, g: Array) -> tuple[Array, None, None]:
    _, inverse = saved
    return g.at[inverse].get(mode="fill", fill_value=0), None, None


_pick_rows.defvjp(_pick_forward, _pick_backward)


def _gather_rows(x: Array, index: Array, readers: Array, n: int) -> Array:
    """x[index] with zeros out of range; `readers` [N, k] are the output rows of each x row."""

    @jax.custom_vjp
    def gather(x: Array, index: Array, readers: Array) -> Array:
        return x.at[index].get(mode="fill", fill_value=0)

    def forward(x: Array, index: Array, readers: Array) -> tuple[Array, tuple]:
        return gather(x, index, readers), (readers,)

    def backward(saved: tuple, g: Array) -> tuple[Array, None, None]:
        return g[saved[0]].astype(jnp.float32).sum(1).astype(g.dtype), None, None

    gather.defvjp(forward, backward)
    return gather(x, index, readers)
