"""The engine's programs on the device: prefill, and a chunk of decode steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt
from rljax_kernels.paged_attention import PageTables

from rljax.mesh import true_anywhere, vary_over
from rljax.models.config import ModelConfig
from rljax.models.forward import Attend, hidden_states, output_logits
from rljax.models.parameters import Params
from rljax.sampling.adjustments import Adjustments, adjust
from rljax.sampling.attention import decode_attention, gathered_attention, prefill_attention
from rljax.sampling.pool import Gathered, Pool, gather_pages, scatter_tokens
from rljax.sampling.token_sampling import keep_mask, keys_at, likeliest, row_keys, sample_tokens

GATHERED = "gathered"
"""A chunk copies the rows' pages out of the pool once, works on the copy layer by layer, and writes
the new tokens back at its end. Otherwise each step reads and writes the pages themselves, by an
implementation of `rljax_kernels.paged_attention`."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """What decode programs are compiled for.

    Attributes:
      chunk: Most steps of a chunk, C.
      attention: How steps reach the pages: `GATHERED`, or the name of an implementation of
        `rljax_kernels.paged_attention`.
      with_routing: Whether to return the experts of each fed token.
      max_support: Most tokens that a row which cuts its distribution keeps, and returns; 0: any
        number, and none are returned.
      top_logprobs: How many of the likeliest tokens to return with each.
    """

    chunk: int
    attention: str
    with_routing: bool = False
    max_support: int = 0
    top_logprobs: int = 0


@struct.dataclass
class DecodeCarry:
    """Where each row stands: what one chunk leaves to the next one of the same rows.

    Attributes:
      token: int32 [R], the next token to feed.
      position: int32 [R], its position; all before it are in the cache.
      active: bool [R], whether the row is decoding.
      remaining: int32 [R], tokens it may still draw.
    """

    token: Int[Array, " R"]
    position: Int[Array, " R"]
    active: Bool[Array, " R"]
    remaining: Int[Array, " R"]


@struct.dataclass
class RowSampling:
    """How each row draws.

    Attributes:
      key: uint32 [R, 7], its random key, see `token_sampling.key_words`.
      temperature: float32 [R], 0 for greedy.
      top_p: float32 [R].
      top_k: int32 [R].
      min_p: float32 [R].
      stop: int32 [R, K], end ids, -1 where unset.
    """

    key: UInt[Array, "R 7"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    top_k: Int[Array, " R"]
    min_p: Float[Array, " R"]
    stop: Int[Array, "R K"]


@struct.dataclass
class DecodeInputs:
    """What a decode chunk knows of its rows; made anew by the host for each chunk.

    Attributes:
      carry: Where each row stands.
      sampling: How it draws.
      tables: Its pages, for all tokens that the chunk may write.
      min_active: int32 [1], the chunk ends once no more rows than these are active.
      adjustments: Changes to the logits; None: there are none.
    """

    carry: DecodeCarry
    sampling: RowSampling
    tables: PageTables
    min_active: Int[Array, " 1"]
    adjustments: Adjustments | None = None


@struct.dataclass
class DecodeOutput:
    """What a decode chunk drew; R rows, C the chunk's length.

    Attributes:
      tokens: int32 [R, C].
      logp: float32 [R, C].
      count: int32 [R], how many of the C each row drew.
      stopped: bool [R], whether the row's last token was an end id.
      records: By the names of `Response`, what else was requested: `routing` int32
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

    Memory grows with the tokens, and not with the pages that they read. Rows may be parts of one
    prompt that follow each other.

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
        prefill_attention(table, positions, live),
        cache=pool,
        counted=live,
    )
    return pool, None if router is None else router.experts


def decode_chunk(
    params: Params,
    pool: Pool,
    inputs: DecodeInputs,
    *,
    config: ModelConfig,
    options: DecodeOptions,
    filtered: bool,
) -> tuple[Pool, DecodeOutput, DecodeCarry]:
    """Up to `options.chunk` decode steps in one loop that ends when few enough rows are active.

    Args:
      params: The weights.
      pool: The KV pool; donated.
      inputs: The rows.
      config: The model; its layers unstacked where pages are gathered or attention is `native`.
      options: What to compile for.
      filtered: Whether any row cuts its distribution (spares the sort where none does).

    Returns:
      The pool, what was drawn, and what is left to do.
    """
    keys = row_keys(inputs.sampling.key)
    first, tables = inputs.carry, inputs.tables
    cache, shared = _cache(pool, inputs, options)

    def step(state: tuple) -> tuple:
        i, cache, token, position, active, output = state
        hidden, cache, router = hidden_states(
            params,
            config,
            token[:, None],
            position[:, None],
            _attend(tables, shared, position, active, options.attention),
            cache=cache,
            counted=active[:, None],
        )
        with jax.named_scope("sampling"):
            logits = output_logits(params, config, hidden[:, 0])
            if inputs.adjustments is not None:
                logits = adjust(
                    logits, inputs.adjustments, inputs.sampling.stop, output.tokens, output.count
                )
            at = keys_at(keys, position + 1)
            new, logp, records = _sample(logits, inputs.sampling, at, options, filtered)
        if router is not None and options.with_routing:
            records["routing"] = router.experts[:, 0]
        stopped = active & jnp.any(new[:, None] == inputs.sampling.stop, axis=1)
        count = output.count + active
        output = output.replace(
            tokens=output.tokens.at[:, i].set(jnp.where(active, new, 0)),
            logp=output.logp.at[:, i].set(jnp.where(active, logp, 0.0)),
            count=count,
            stopped=output.stopped | stopped,
            records={name: output.records[name].at[:, i].set(x) for name, x in records.items()},
            steps=output.steps + 1,
        )
        active = active & ~stopped & (count < first.remaining)
        return i + 1, cache, new, position + 1, active, output

    expert_axes = vary_over(params)  # over these, devices exchange their tokens for experts

    def more(state: tuple) -> Array:
        i, _, _, _, active, _ = state
        more_rows = jnp.sum(active) > inputs.min_active[0]
        return (i < options.chunk) & true_anywhere(more_rows, expert_axes)

    output = _blank_output(first.token, config, options, filtered)
    state = (jnp.int32(0), cache, first.token, first.position, first.active, output)
    _, cache, token, position, active, output = jax.lax.while_loop(more, step, state)
    if options.attention == GATHERED:
        steps = jnp.arange(options.chunk)
        place = (first.position - tables.base)[:, None] + steps
        written = steps < output.count[:, None]
        cache = scatter_tokens(pool, cache, tables.own, place, written)
    rest = DecodeCarry(token, position, active, first.remaining - output.count)
    return cache, output, rest


def _cache(pool: Pool, inputs: DecodeInputs, options: DecodeOptions) -> tuple[Any, Gathered]:
    """What the steps read and write, and what blocks of rows read together."""
    if options.attention != GATHERED:
        return pool, {}
    tables = inputs.tables
    own = gather_pages(pool, tables.own, inputs.carry.position - tables.base)
    blocks, columns = tables.shared.shape
    filled = jnp.max(tables.base.reshape(blocks, -1), axis=1)
    return own, gather_pages(pool, tables.shared, filled) if columns else {}


def _attend(
    tables: PageTables, shared: Gathered, position: Array, active: Array, attention: str
) -> Attend:
    if attention == GATHERED:
        return gathered_attention(position[:, None], active[:, None], tables.base, shared)
    return decode_attention(tables, position, active, attention)


def _sample(
    logits: Array, sampling: RowSampling, keys: Array, options: DecodeOptions, filtered: bool
) -> tuple[Array, Array, dict[str, Array]]:
    """The next token of each row, its log-probability, and what is recorded of the step."""
    z = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    kept, records = None, {}
    if filtered:
        kept = keep_mask(z, sampling.top_p, sampling.top_k, sampling.min_p)
        if options.max_support:
            cut = (sampling.top_p < 1) | (sampling.top_k > 0) | (sampling.min_p > 0)
            cut &= sampling.temperature > 0
            kept, records["support"] = likeliest(z, kept, cut, options.max_support)
    if options.top_logprobs:
        top = jax.lax.top_k(jax.nn.log_softmax(z, axis=-1), options.top_logprobs)
        records["top_logp"], records["top_tokens"] = top
    return *sample_tokens(keys, z, sampling.temperature, kept), records


def _blank_output(
    token: Int[Array, " R"], config: ModelConfig, options: DecodeOptions, filtered: bool
) -> DecodeOutput:
    """An empty output, made of an input so that it lies on the same mesh axes."""
    rows, chunk = token.shape[0], options.chunk
    blank = jnp.broadcast_to((token * 0)[:, None], (rows, chunk))

    def record(dtype: Any, *shape: int) -> Array:
        start = blank.reshape(rows, chunk, *[1] * len(shape)).astype(dtype)
        return jnp.broadcast_to(start, (rows, chunk, *shape))

    records = {}
    if options.with_routing:
        records["routing"] = record(jnp.int32, len(config.mixture_layers), config.top_k)
    if filtered and options.max_support:
        records["support"] = record(jnp.int32, options.max_support)
    if options.top_logprobs:
        records["top_tokens"] = record(jnp.int32, options.top_logprobs)
        records["top_logp"] = record(jnp.float32, options.top_logprobs)
    return DecodeOutput(
        tokens=blank,
        logp=blank.astype(jnp.float32),
        count=blank[:, 0],
        stopped=blank[:, 0] > 0,
        records=records,
        steps=blank[:1, 0],
    )
