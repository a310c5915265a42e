"""The engine's programs on the device: prefill, page copies, and a chunk of decode steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import true_anywhere
from rljax.models.config import LatentAttention, ModelConfig
from rljax.models.forward import Attend, attend_masked, hidden_states, output_logits
from rljax.models.parameters import Params
from rljax.sampling.draw import draw, keep_mask, row_keys

Pool = dict[str, Array]
"""`k` and `v`, each [layers, pages, page_size, kv_heads, head_dim] in the compute dtype; bfloat16
as its bits in uint16, since XLA on CPU scatters bfloat16 by converting the whole operand.

Of latent attention there is only `k`, one head that holds the latent and then the rotary key:
values are the leading part of keys."""


@struct.dataclass
class Slots:
    """What a decode chunk knows of each slot; S slots, made anew by the host for each chunk.

    Attributes:
      token: int32 [S], the next token to feed.
      position: int32 [S], its position; all before it are in the cache.
      active: bool [S], whether the slot is decoding.
      remaining: int32 [S], tokens it may still draw.
      ids: int32 [S, 4], seed, prompt id, draw, sample id: its random key.
      temperature: float32 [S], 0 for greedy.
      top_p: float32 [S].
      top_k: int32 [S].
      min_p: float32 [S].
      stop: int32 [S, K], end ids, -1 where unset.
    """

    token: Int[Array, " S"]
    position: Int[Array, " S"]
    active: Bool[Array, " S"]
    remaining: Int[Array, " S"]
    ids: Int[Array, "S 4"]
    temperature: Float[Array, " S"]
    top_p: Float[Array, " S"]
    top_k: Int[Array, " S"]
    min_p: Float[Array, " S"]
    stop: Int[Array, "S K"]


@struct.dataclass
class Drawn:
    """What a decode chunk drew; C is the chunk's length.

    Attributes:
      tokens: int32 [S, C].
      logp: float32 [S, C].
      count: int32 [S], how many of the C each slot drew.
      stopped: bool [S], whether the slot's last token was an end id.
      routing: int32 [S, C, layers, k], of the token fed at each step; None unless asked for.
      steps: int32 [1], how many steps the chunk ran (on one shard).
    """

    tokens: Int[Array, "S C"]
    logp: Float[Array, "S C"]
    count: Int[Array, " S"]
    stopped: Bool[Array, " S"]
    routing: Int[Array, "S C layers k"] | None
    steps: Int[Array, " 1"]


def make_pool(config: ModelConfig, num_pages: int, page_size: int) -> Pool:
    """An empty KV pool.

    Raises:
      ValueError: Layers differ in their KV heads, which one pool cannot hold.
    """
    shapes = {
        (("k",), 1, a.kv_rank + a.rope_dim)
        if isinstance(a, LatentAttention)
        else (("k", "v"), a.num_kv_heads, a.head_dim)
        for a in (block.attention for block in config.layers)
    }
    if len(shapes) > 1:
        raise ValueError(
            f"layers differ in (arrays, kv_heads, head_dim) ({sorted(shapes)}); one pool "
            "holds equal layers only"
        )
    names, *head = shapes.pop()
    shape = (config.num_layers, num_pages, page_size, *head)
    return {name: _to_bits(jnp.zeros(shape, config.dtype)) for name in names}


def _to_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def paged_attention(
    table: Int[Array, "S P"], positions: Int[Array, "S q"], live: Bool[Array, "S q"]
) -> Attend:
    """Writes the new keys and values into their pages, then attends over all pages of each row.

    Where the pool keeps no values, those given must be the leading part of the keys.

    Args:
      table: The pages of each row, in order; entries past a row's length may be anything valid.
      positions: Positions of the new tokens.
      live: Which of them exist; others are neither written nor read by anyone.
    """

    def attend(
        q: Array,
        k: Array,
        v: Array,
        layer: Array,
        pool: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        num_pages, page_size = pool["k"].shape[1:3]
        page = jnp.take_along_axis(table, positions // page_size, axis=1, mode="clip")
        page = jnp.where(live, page, num_pages)  # out of bounds: dropped
        offset = positions % page_size
        new = {"k": k, "v": v}
        pool = {
            name: kept.at[layer, page, offset].set(_to_bits(new[name]), mode="drop")
            for name, kept in pool.items()
        }
        rows, pages = table.shape
        read = {
            name: _from_bits(kept[layer, table]).reshape(rows, pages * page_size, *k.shape[2:])
            for name, kept in pool.items()
        }
        keys = read["k"]
        values = read["v"] if "v" in read else keys[..., : v.shape[-1]]
        place = jnp.arange(pages * page_size)
        allowed = place[None, None, :] <= positions[:, :, None]
        if window is not None:
            allowed &= positions[:, :, None] - place[None, None, :] < window
        # Old pages may hold anything: 0 · NaN is NaN, so what no query sees must be 0.
        last = jnp.max(jnp.where(live, positions, -1), axis=1)
        seen = (place[None, :] <= last[:, None])[:, :, None, None]
        keys, values = jnp.where(seen, keys, 0), jnp.where(seen, values, 0)
        return attend_masked(q, keys, values, allowed, scale, sinks), pool

    return attend


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


def copy_pages(pool: Pool, source: Int[Array, " S"], target: Int[Array, " S"]) -> Pool:
    """Copies pages; a target out of bounds is dropped."""
    return {n: x.at[:, target].set(x[:, source], mode="drop") for n, x in pool.items()}


def decode_chunk(
    params: Params,
    pool: Pool,
    table: Int[Array, "S P"],
    slots: Slots,
    *,
    config: ModelConfig,
    chunk: int,
    filtered: bool,
    with_routing: bool,
) -> tuple[Pool, Drawn]:
    """Up to `chunk` decode steps in one loop that ends early when every slot is done.

    Args:
      params: The weights.
      pool: The KV pool; donated.
      table: Page table, with pages for all tokens that the chunk may write.
      slots: The slots.
      config: The model.
      chunk: Most steps C.
      filtered: Whether any row cuts its distribution (spares the sort where none does).
      with_routing: Whether to return the experts of each fed token.

    Returns:
      The pool and what was drawn.
    """
    keys = row_keys(slots.ids)
    rows = slots.token.shape[0]
    blank = jnp.broadcast_to((slots.token * 0)[:, None], (rows, chunk))
    layers = len(config.mixture_layers)
    routing = (
        jnp.broadcast_to(blank[..., None, None] - 1, (rows, chunk, layers, config.top_k))
        if with_routing and layers
        else None
    )
    scale = jnp.where(slots.temperature > 0, slots.temperature, 1.0)[:, None]

    def step(carry: tuple) -> tuple:
        i, pool, token, position, active, drawn = carry
        hidden, pool, router = hidden_states(
            params,
            config,
            token[:, None],
            position[:, None],
            paged_attention(table, position[:, None], active[:, None]),
            cache=pool,
            counted=active[:, None],
        )
        with jax.named_scope("sampling"):
            z = output_logits(params, config, hidden[:, 0]) / scale
            kept = keep_mask(z, slots.top_p, slots.top_k, slots.min_p) if filtered else None
            step_keys = jax.vmap(jax.random.fold_in)(keys, position + 1)
            new, logp = draw(step_keys, z, slots.temperature, kept)
        stopped = active & jnp.any(new[:, None] == slots.stop, axis=1)
        count = drawn.count + active
        drawn = drawn.replace(
            tokens=drawn.tokens.at[:, i].set(jnp.where(active, new, 0)),
            logp=drawn.logp.at[:, i].set(jnp.where(active, logp, 0.0)),
            count=count,
            stopped=drawn.stopped | stopped,
            routing=None
            if drawn.routing is None or router is None
            else drawn.routing.at[:, i].set(
                jnp.where(active[:, None, None], router.experts[:, 0], -1)
            ),
            steps=drawn.steps + 1,
        )
        active = active & ~stopped & (count < slots.remaining)
        return i + 1, pool, new, position + 1, active, drawn

    drawn = Drawn(
        tokens=blank,
        logp=blank.astype(jnp.float32),
        count=blank[:, 0],
        stopped=blank[:, 0] > 0,
        routing=routing,
        steps=blank[:1, 0],
    )
    carry = (jnp.int32(0), pool, slots.token, slots.position, slots.active, drawn)
    carry = jax.lax.while_loop(
        lambda c: (c[0] < chunk) & true_anywhere(jnp.any(c[4]), "expert"), step, carry
    )
    return carry[1], carry[5]
