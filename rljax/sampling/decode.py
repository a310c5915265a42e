"""The engine's programs on the device: prefill, and a chunk of decode steps."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import true_anywhere, vary_over
from rljax.models.config import ModelConfig
from rljax.models.forward import Attend, hidden_states, output_logits
from rljax.models.parameters import Params
from rljax.sampling.cache import (
    Kept,
    Pool,
    gather_rows,
    native_attention,
    paged_attention,
    row_attention,
    scatter_rows,
)
from rljax.sampling.draw import draw, keep_mask, keys_at, likeliest, row_keys

Attention = Literal["copy", "place", "native"]
"""`copy`: a chunk copies the rows' pages out of the pool once, works on the copy layer by layer,
and writes the new tokens back at its end. `place`: each step reads and writes the pages themselves.
`native`: so do the kernels of `rljax_kernels.cpu`, at the cost of the tokens that there are."""


@struct.dataclass
class Slots:
    """What a decode chunk knows of each row; made anew by the host for each chunk.

    Attributes:
      token: int32 [R], the next token to feed.
      position: int32 [R], its position; all before it are in the cache.
      active: bool [R], whether the row is decoding.
      remaining: int32 [R], tokens it may still draw.
      ids: int32 [R, 4], seed, prompt id, draw, sample id: its random key.
      temperature: float32 [R], 0 for greedy.
      top_p: float32 [R].
      top_k: int32 [R].
      min_p: float32 [R].
      stop: int32 [R, K], end ids, -1 where unset.
      enough: int32 [1], the chunk ends once no more rows than these are active.
      table: int32 [R, P], the row's own pages.
      base: int32 [R], how many tokens before its own the row reads from pages its block shares.
      shared: int32 [B, Q], the pages that each R / B rows share; [1, 0] where none do.
    """

    token: Int[Array, " R"]
    position: Int[Array, " R"]
    active: Bool[Array, " R"]
    remaining: Int[Array, " R"]
    ids: Int[Array, "R 4"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    top_k: Int[Array, " R"]
    min_p: Float[Array, " R"]
    stop: Int[Array, "R K"]
    enough: Int[Array, " 1"]
    table: Int[Array, "R P"]
    base: Int[Array, " R"]
    shared: Int[Array, "B Q"]


@struct.dataclass
class Drawn:
    """What a decode chunk drew; R rows, C the chunk's length.

    Attributes:
      tokens: int32 [R, C].
      logp: float32 [R, C].
      count: int32 [R], how many of the C each row drew.
      stopped: bool [R], whether the row's last token was an end id.
      records: By the names of `Response`, what else was asked for: `routing` int32
        [R, C, layers, k] of the token fed at each step, `support` int32 [R, C, K] (where some row
        cuts its distribution), `top_tokens` int32 and `top_logp` float32 [R, C, N].
      steps: int32 [1], how many steps the chunk ran (on one shard).
    """

    tokens: Int[Array, "R C"]
    logp: Float[Array, "R C"]
    count: Int[Array, " R"]
    stopped: Bool[Array, " R"]
    records: dict[str, Array]
    steps: Int[Array, " 1"]


@struct.dataclass
class Rest:
    """What the next chunk of the same rows begins with: fields of `Slots`."""

    token: Int[Array, " R"]
    position: Int[Array, " R"]
    active: Bool[Array, " R"]
    remaining: Int[Array, " R"]


def prefill(
    params: Params,
    pool: Pool,
    tokens: Int[Array, "R q"],
    start: Int[Array, " R"],
    count: Int[Array, " R"],
    table: Int[Array, "R P"],
    *,
    config: ModelConfig,
) -> tuple[Pool, Array | None]:
    """Runs `count` tokens of each row from position `start`, filling its pages.

    Returns:
      The pool, and the routing int32 [R, q, layers, k] (None for a dense model).
    """
    step = jnp.arange(tokens.shape[1])
    positions = start[:, None] + step
    live = step < count[:, None]
    _, pool, router = hidden_states(
        params,
        config,
        tokens,
        positions,
        paged_attention(table, positions, live),
        cache=pool,
        counted=live,
    )
    return pool, None if router is None else router.experts


def decode_chunk(
    params: Params,
    pool: Pool,
    slots: Slots,
    *,
    config: ModelConfig,
    chunk: int,
    filtered: bool,
    with_routing: bool,
    attention: Attention,
    max_support: int = 0,
    top_logprobs: int = 0,
) -> tuple[Pool, Drawn, Rest]:
    """Up to `chunk` decode steps in one loop that ends when few enough rows are active.

    Args:
      params: The weights.
      pool: The KV pool; donated.
      slots: The rows, and their pages for all tokens that the chunk may write.
      config: The model; with its layers apart unless pages are read in `place`.
      chunk: Most steps C.
      filtered: Whether any row cuts its distribution (spares the sort where none does).
      with_routing: Whether to return the experts of each fed token.
      attention: How steps reach the pages.
      max_support: Most tokens that a row which cuts its distribution keeps, and returns; 0: any
        number, and none are returned.
      top_logprobs: How many of the likeliest tokens to return with each.

    Returns:
      The pool, what was drawn, and what is left to do.
    """
    keys = row_keys(slots.ids)
    rows = slots.token.shape[0]
    blank = jnp.broadcast_to((slots.token * 0)[:, None], (rows, chunk))
    cut = (slots.top_p < 1) | (slots.top_k > 0) | (slots.min_p > 0)
    cut &= slots.temperature > 0
    scale = jnp.where(slots.temperature > 0, slots.temperature, 1.0)[:, None]
    start = slots.position - slots.base  # places in a row's own pages
    cache: Any = pool
    if attention == "copy":
        cache = gather_rows(pool, slots.table, start)
        blocks, most = slots.shared.shape
        filled = jnp.max(slots.base.reshape(blocks, -1), axis=1)
        shared: Kept = gather_rows(pool, slots.shared, filled) if most else {}

    def attend(position: Array, active: Array) -> Attend:
        if attention == "copy":
            return row_attention(position[:, None], active[:, None], slots.base, shared)
        if attention == "native":
            return native_attention(slots.table, position, active)
        return paged_attention(slots.table, position[:, None], active[:, None])

    def step(carry: tuple) -> tuple:
        i, cache, token, position, active, drawn = carry
        hidden, cache, router = hidden_states(
            params,
            config,
            token[:, None],
            position[:, None],
            attend(position, active),
            cache=cache,
            counted=active[:, None],
        )
        with jax.named_scope("sampling"):
            z = output_logits(params, config, hidden[:, 0]) / scale
            kept = keep_mask(z, slots.top_p, slots.top_k, slots.min_p) if filtered else None
            now: dict[str, Array] = {}
            if router is not None and with_routing:
                now["routing"] = router.experts[:, 0]
            if kept is not None and max_support:
                kept, now["support"] = likeliest(z, kept, cut, max_support)
            if top_logprobs:
                top = jax.lax.top_k(jax.nn.log_softmax(z, axis=-1), top_logprobs)
                now["top_logp"], now["top_tokens"] = top
            new, logp = draw(keys_at(keys, position + 1), z, slots.temperature, kept)
        stopped = active & jnp.any(new[:, None] == slots.stop, axis=1)
        count = drawn.count + active
        drawn = drawn.replace(
            tokens=drawn.tokens.at[:, i].set(jnp.where(active, new, 0)),
            logp=drawn.logp.at[:, i].set(jnp.where(active, logp, 0.0)),
            count=count,
            stopped=drawn.stopped | stopped,
            records={name: drawn.records[name].at[:, i].set(x) for name, x in now.items()},
            steps=drawn.steps + 1,
        )
        active = active & ~stopped & (count < slots.remaining)
        return i + 1, cache, new, position + 1, active, drawn

    def record(dtype: Any, *shape: int) -> Array:
        start = blank.reshape(rows, chunk, *[1] * len(shape)).astype(dtype)
        return jnp.broadcast_to(start, (rows, chunk, *shape))

    records = {}
    if with_routing:
        records["routing"] = record(jnp.int32, len(config.mixture_layers), config.top_k)
    if filtered and max_support:
        records["support"] = record(jnp.int32, max_support)
    if top_logprobs:
        records["top_tokens"] = record(jnp.int32, top_logprobs)
        records["top_logp"] = record(jnp.float32, top_logprobs)
    drawn = Drawn(
        tokens=blank,
        logp=blank.astype(jnp.float32),
        count=blank[:, 0],
        stopped=blank[:, 0] > 0,
        records=records,
        steps=blank[:1, 0],
    )
    carry = (jnp.int32(0), cache, slots.token, slots.position, slots.active, drawn)
    spread = vary_over(params)  # over these, devices meet each other's experts

    def goes_on(carry: tuple) -> Array:
        i, _, _, _, active, _ = carry
        return (i < chunk) & true_anywhere(jnp.sum(active) > slots.enough[0], spread)

    carry = jax.lax.while_loop(goes_on, step, carry)
    _, cache, token, position, active, drawn = carry
    if attention == "copy":
        steps = jnp.arange(chunk)
        written = steps < drawn.count[:, None]
        cache = scatter_rows(pool, cache, slots.table, start[:, None] + steps, written)
    rest = Rest(token, position, active, slots.remaining - drawn.count)
    return cache, drawn, rest
