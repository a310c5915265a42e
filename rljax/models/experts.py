"""Experts: dropless products of rows sorted by expert, on one device or dispatched over several."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from rljax_kernels import cpu
from rljax_kernels import grouped_matmul as gmm

from rljax.errors import InputError, MissingDependencyError
from rljax.mesh import gather, varies, vary_alike, vary_over
from rljax.models.expert_loop import block_size, loop_experts
from rljax.models.row_gathers import gather_rows, pick_rows, rows_at

_log = logging.getLogger(__name__)

Dispatch = Literal["all_gather", "all_to_all"]

Backend = Literal["auto", "native", "blocks", "triton", "pallas", "megablox", "ragged"]

_MOST_BYTES = 2**30  # of the rows of all experts; more are never laid out at once
_MOST_MET = 2**30  # bytes of the tokens that devices exchange at a time

CLAMP = 7.0
"""Where gpt-oss clamps its experts' gates (from above) and what they gate (on both sides)."""
GAIN = 1.702
"""The factor inside the sigmoid of gpt-oss's experts."""


def choose_backend(wanted: Backend, dtype: Any) -> str:
    """`rljax_kernels.grouped_matmul.choose_backend`; the first choice of each kind is logged.

    Raises:
      InputError: The backend is not for these devices or this dtype.
      MissingDependencyError: `native` is asked for and its kernels cannot be built.
    """
    try:
        chosen = gmm.choose_backend(wanted, dtype)
    except cpu.UnavailableError as e:
        raise MissingDependencyError(f"expert_backend={wanted!r}: {e}") from e
    except ValueError as e:
        raise InputError(f"expert_backend={wanted!r}: {e}") from e
    _log_choice(wanted, chosen)
    return chosen


@functools.cache
def _log_choice(wanted: Backend, chosen: str) -> None:
    _log.info("experts are multiplied by backend %r (expert_backend=%r)", chosen, wanted)


def experts(
    params: dict[str, Any],
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    activation: Literal["silu", "clamped"] = "silu",
    devices: int = 1,
    backend: Backend = "auto",
) -> Float[Array, "N D"]:
    """Σ over the chosen experts of weight · expert; no token is dropped.

    A token's bits do not depend on the other tokens.

    Args:
      params: `gate`, `up` [E, D, F] and `down` [E, F, D]; with biases also `gate_bias`, `up_bias`
        [E, F] and `down_bias` [E, D].
      x: Hidden states, in the compute dtype.
      chosen: Experts of each token, none of them twice; those not below E add nothing.
      weights: Their weights, float32.
      activation: As in `Experts`.
      devices: Over how many devices all experts are split, of which these are one's.
      backend: As `ModelConfig.expert_backend`.
    """
    n, k = chosen.shape
    e, expected = params["gate"].shape[0], -(-n * k // devices)
    way = choose_backend(backend, x.dtype)
    params = jax.tree.map(lambda p: p.astype(x.dtype), params)
    if way != "native" and not at_once(n * k * x.shape[1] * x.dtype.itemsize):
        size = block_size(expected, e)
        return loop_experts(_STAGES[activation], params, x, chosen, weights, size).astype(x.dtype)
    laid = gmm.row_layout(n * k, e, way, expected=expected, largest=n)
    run = functools.partial(gmm.grouped, _STAGES[activation], params=params, laid=laid)
    if laid.first == n:
        # Every expert has a place for each token: they need not be moved.
        out = run(jnp.tile(x, (e, 1)), group_sizes=jnp.full((e,), n, jnp.int32))
        place = jnp.where(chosen < e, chosen * n + jnp.arange(n)[:, None], e * n)
        return _weighed(rows_at(out, place), weights, x.dtype)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=e).astype(jnp.int32)
    places = laid.places(flat[order], sizes)
    source = jnp.full((laid.rows,), n * k, jnp.int32).at[places].set(order, mode="drop")
    place = jnp.zeros((n * k,), jnp.int32).at[order].set(places)
    copies = gather_rows(x, source // k, place.reshape(n, k))
    out = run(copies, group_sizes=sizes)
    return _weighed(pick_rows(out, place, source).reshape(n, k, -1), weights, x.dtype)


def at_once(rows_bytes: int) -> bool:
    """Whether the rows of all experts are laid out together, by the bytes that they take.

    Else experts are computed one after the other, see `expert_loop`.
    """
    return rows_bytes <= _MOST_BYTES


def _weighed(outputs: Float[Array, "N k D"], weights: Array, dtype: Any) -> Float[Array, "N D"]:
    return jnp.einsum("nkd,nk->nd", outputs.astype(jnp.float32), weights).astype(dtype)


def parallel_experts(
    params: dict[str, Any],
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    expert_axes: tuple[str, ...],
    activation: Literal["silu", "clamped"] = "silu",
    dispatch: Dispatch | None = None,
    backend: Backend = "auto",
) -> Float[Array, "N D"]:
    """`experts` inside `shard_map`, where devices hold different experts, or slices of them.

    Every token meets all of its experts, however many others want the same. Devices add up in
    float32.

    Args:
      params: As for `experts`, this device's: where they vary over `tensor`, slices of the inner
        size.
      x: This device's tokens.
      chosen: Their experts, numbered over all devices.
      weights: As for `experts`.
      expert_axes: The mesh axes along which devices have different experts.
      activation: As for `experts`.
      dispatch: How tokens meet experts of other devices, with equal results. `all_gather` gathers
        all tokens on all devices and adds up their experts' outputs. `all_to_all` sends a token to
        the devices that have one of its experts, and their outputs back. None: the one that moves
        less.
      backend: As for `experts`.
    """
    (n, k), here = chosen.shape, params["gate"].shape[0]
    sliced = "tensor" in vary_over(params["gate"])
    devices = jax.lax.axis_size(expert_axes) if expert_axes else 1
    # Along the others of them, all devices have the same tokens.
    gathered = tuple(axis for axis in expert_axes if varies(x, axis))
    first = jax.lax.axis_index(expert_axes) * here if expert_axes else 0
    dispatch = dispatch or cheaper_dispatch(n, k, devices, _ragged_dispatch())
    if sliced and "down_bias" in params:  # the sum over slices is to hold it once
        params, once = vary_alike((params, jax.lax.axis_index("tensor") == 0))
        params["down_bias"] = jnp.where(once, params["down_bias"], 0)

    def compute(params: dict[str, Any], x: Array, chosen: Array, weights: Array) -> Array:
        """What this device's experts add to some tokens."""
        local = chosen - first
        local = jnp.where((local >= 0) & (local < here), local, here)
        mine, x, local, weights = vary_alike((params, x, local, weights))
        out = experts(mine, x, local, weights, activation, devices, backend)
        return out.astype(jnp.float32)

    def meet(params: dict[str, Any], x: Array, chosen: Array, weights: Array) -> Array:
        """What all experts add to this device's tokens."""
        run = functools.partial(compute, params)
        if dispatch == "all_to_all" and expert_axes and gathered == expert_axes:
            out = _all_to_all(run, x, chosen, weights, chosen // here, expert_axes)
        else:
            tokens = (gather(a, gathered) if gathered else a for a in (x, chosen, weights))
            out = run(*tokens)
            summed = tuple(axis for axis in expert_axes if axis not in gathered)
            out = jax.lax.psum(out, summed) if summed else out
            out = jax.lax.psum_scatter(out, gathered, tiled=True) if gathered else out
        return (jax.lax.psum(out, "tensor") if sliced else out).astype(x.dtype)

    met = math.prod(jax.lax.axis_size(axis) for axis in gathered)
    parts = token_parts(n, met * x.shape[1] * x.dtype.itemsize)
    return (
        meet(params, x, chosen, weights)
        if parts == 1
        else _in_parts(meet, parts, params, x, chosen, weights)
    )


def token_parts(tokens: int, each: int) -> int:
    """Into how many parts a device's tokens are cut that meet the experts one after the other.

    Args:
      tokens: Those of one device.
      each: Bytes of one of them, on all devices that exchange tokens.
    """
    divisors = [n for n in range(1, tokens + 1) if tokens % n == 0]
    return next((n for n in divisors if tokens // n * each <= _MOST_MET), divisors[-1])


def _in_parts(
    meet: Callable[..., Array], parts: int, params: Any, x: Array, chosen: Array, weights: Array
) -> Array:
    """`meet` for one part of the tokens after the other, each computed again in the backward pass.

    The gradients of parameters add up over the parts in float32.
    """
    dtypes = jax.tree.map(lambda p: p.dtype, params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)

    @jax.checkpoint
    def part(tokens: tuple[Array, Array, Array]) -> Array:
        return meet(jax.tree.map(lambda p, dtype: p.astype(dtype), wide, dtypes), *tokens)

    cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, chosen, weights))
    return jax.lax.map(part, cut).reshape(x.shape)


def cheaper_dispatch(tokens: int, k: int, devices: int, ragged: bool) -> Dispatch:
    """The way by which tokens meet experts of other devices that moves less.

    A token goes to k devices at most. Few tokens cost latency, of which gather has less.

    Args:
      tokens: Those of one device.
      k: Experts of a token.
      devices: Over how many devices experts are split.
      ragged: Whether only the rows that there are need to be sent; else all to all sends as much
        as gather.
    """
    return "all_to_all" if ragged and devices > k and tokens >= 256 else "all_gather"


def _ragged_dispatch() -> bool:
    """Whether only the rows that there are need to be sent; XLA on CPU has no such program."""
    device = jax.sharding.get_abstract_mesh().abstract_device  # described chips may not be at hand
    return device is not None and device.platform != "cpu"


def _all_to_all(
    compute: Callable[..., Array],
    x: Array,
    chosen: Array,
    weights: Array,
    owner: Array,
    axes: tuple[str, ...],
) -> Array:
    """Sends each token to the devices that own one of its experts, and adds up what they return.

    Each device has a slot for every token of every other one, so that none is ever dropped.
    """
    n, devices = chosen.shape[0], jax.lax.axis_size(axes)
    goes = (owner[None] == jnp.arange(devices)[:, None, None]).any(-1)  # [devices, n]
    count = goes.sum(1).astype(jnp.int32)
    awaited = jax.lax.all_to_all(count, axes, 0, 0, tiled=True)
    # Slot [d, i] holds the i-th token that goes to device d.
    token = jnp.argsort(~goes, axis=1, stable=True)
    device, filled = jnp.arange(devices)[:, None], jnp.arange(n) < count[:, None]
    index = jnp.where(filled, token, n).reshape(-1)
    reader = jnp.where(filled, token * devices + device, n * devices).reshape(-1)
    slot = jnp.where(goes, device * n + jnp.cumsum(goes, axis=1) - 1, devices * n).T

    def send(a: Array) -> Array:
        return _swap(gather_rows(a, index, slot), count, awaited, axes)

    # Counted from 1, so that empty slots have no expert.
    numbers = _swap(rows_at(chosen + 1, index), count, awaited, axes) - 1
    answers = _swap(compute(send(x), numbers, send(weights)), awaited, count, axes)
    mine = pick_rows(answers, slot.reshape(-1), reader)
    return mine.reshape(n, devices, -1).sum(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _swap(rows: Array, sent: Array, awaited: Array, axes: tuple[str, ...]) -> Array:
    """Trades slots [devices · n, ...]: the first `sent[d]` of block d go to device d along `axes`.

    Block d of the result is what came from device d, `awaited[d]` rows and then zeros.
    """
    devices = sent.shape[0]
    if not _ragged_dispatch():
        return jax.lax.all_to_all(rows, axes, 0, 0, tiled=True)
    n = rows.shape[0] // devices
    starts = jnp.arange(devices, dtype=jnp.int32) * n
    into = jnp.full_like(sent, jax.lax.axis_index(axes) * n)
    return jax.lax.ragged_all_to_all(
        rows, jnp.zeros_like(rows), starts, sent, into, awaited, axis_name=axes
    )


def _swap_forward(
    rows: Array, sent: Array, awaited: Array, axes: tuple[str, ...]
) -> tuple[Array, tuple[Array, Array]]:
    return _swap(rows, sent, awaited, axes), (sent, awaited)


def _swap_backward(
    axes: tuple[str, ...], saved: tuple[Array, Array], g: Array
) -> tuple[Array, None, None]:
    sent, awaited = saved
    return _swap(g, awaited, sent, axes), None, None


_swap.defvjp(_swap_forward, _swap_backward)


def _gate_and_up(dot: gmm.Dot, x: Array, params: dict[str, Array]) -> tuple[Array, Array]:
    gate = dot(x, params["gate"], params.get("gate_bias"))
    return gate, dot(x, params["up"], params.get("up_bias"))


def _down_silu(dot: gmm.Dot, hidden: tuple[Array, Array], params: dict[str, Array]) -> Array:
    gate, up = hidden
    return dot(jax.nn.silu(gate) * up, params["down"], params.get("down_bias"))


def _down_clamped(dot: gmm.Dot, hidden: tuple[Array, Array], params: dict[str, Array]) -> Array:
    gate, up = jnp.minimum(hidden[0], CLAMP), jnp.clip(hidden[1], -CLAMP, CLAMP)
    gated = gate * jax.nn.sigmoid(GAIN * gate) * (up + 1)
    return dot(gated, params["down"], params.get("down_bias"))


_STAGES = {"silu": (_gate_and_up, _down_silu), "clamped": (_gate_and_up, _down_clamped)}
