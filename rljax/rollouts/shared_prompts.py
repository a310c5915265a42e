"""Rows in which a group's prompt stands once and its responses follow: the same loss, fewer tokens.

A row is `[prompt | response 1 | ... | response G]`. Responses see the prompt and themselves, and
count their positions on from it, so log-probabilities and gradients are those of separate rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from rljax.batch import Batch, Rows


@struct.dataclass
class Sharing:
    """Where each position of the shared rows [R, L] comes from; L = prompt + G · response.

    Attributes:
      source_row: int32 [R, L], the response's row in [B, T].
      source_column: int32 [R, L].
      segments: int32 [R, L], 1 to G for responses, G + 1 for the prompt, 0 for padding.
      prefix: int32 [R, L], G + 1 on responses: the segment that they see besides their own.
      start: int32 [B], where each response begins in its own row.
      group_size: G.
      prompt_length: Room for the prompt.
      response_length: Room for each response.
    """

    source_row: Int[Array, "R L"]
    source_column: Int[Array, "R L"]
    segments: Int[Array, "R L"]
    prefix: Int[Array, "R L"]
    start: Int[Array, " B"]
    group_size: int = struct.field(pytree_node=False)
    prompt_length: int = struct.field(pytree_node=False)
    response_length: int = struct.field(pytree_node=False)


def plan_sharing(
    mask: Bool[Array, "B T"],
    segments: Int[Array, "B T"],
    group_size: int,
    prompt_length: int,
    response_length: int,
) -> Sharing:
    """Plans shared rows for responses whose groups stand together, `group_size` at a time.

    Args:
      mask: The policy's own tokens; a response begins at the first of them.
      segments: 1 on tokens, 0 on padding.
      group_size: Responses of a prompt, G.
      prompt_length: At least the longest prompt.
      response_length: At least the longest response.
    """
    length = mask.shape[1]
    start = jnp.argmax(mask, axis=1).astype(jnp.int32)
    end = jnp.max(jnp.where(segments > 0, jnp.arange(1, length + 1), 0), axis=1)
    rows = mask.shape[0] // group_size
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * group_size

    column = jnp.arange(prompt_length, dtype=jnp.int32)[None]
    prompt = jnp.where(column < start[first], group_size + 1, 0)

    member = jnp.repeat(jnp.arange(group_size, dtype=jnp.int32), response_length)[None]
    step = jnp.tile(jnp.arange(response_length, dtype=jnp.int32), group_size)[None]
    own = start[first + member] + step
    response = jnp.where(own < end[first + member], member + 1, 0)

    def join(a: Array, b: Array) -> Array:
        a = jnp.broadcast_to(a, (rows, prompt_length))
        return jnp.concatenate([a, jnp.broadcast_to(b, (rows, b.shape[1]))], axis=1)

    return Sharing(
        source_row=join(first, first + member),
        source_column=jnp.minimum(join(column, own), length - 1),
        segments=join(prompt, response),
        prefix=join(jnp.zeros_like(prompt), jnp.where(response > 0, group_size + 1, 0)),
        start=start,
        group_size=group_size,
        prompt_length=prompt_length,
        response_length=response_length,
    )


def _take(plan: Sharing, leaf: Any, empty: float = 0, prompt_too: bool = True) -> Array:
    there = plan.segments > 0
    if not prompt_too:
        there = there & (plan.prefix > 0)
    taken = leaf[plan.source_row, plan.source_column]
    shape = there.shape + (1,) * (taken.ndim - 2)
    return jnp.where(there.reshape(shape), taken, jnp.asarray(empty, taken.dtype))


def share_rows(plan: Sharing, rows: Rows) -> Rows:
    """Lays unpacked rows out by a plan; weights, advantages and all else go with their tokens."""
    shared = jax.tree.map(lambda leaf: _take(plan, leaf), rows)
    return shared.replace(
        segments=plan.segments,
        prefix=plan.prefix,
        sequence=_take(plan, rows.sequence, -1, prompt_too=False),
        group=_take(plan, rows.group, -1, prompt_too=False),
        keep=_take(plan, rows.keep, False, prompt_too=False),
        routing=None if rows.routing is None else _take(plan, rows.routing, -1),
        support=None if rows.support is None else _take(plan, rows.support, -1, prompt_too=False),
        max_segments=plan.group_size + 1,
    )


def share_batch(plan: Sharing, batch: Batch) -> Batch:
    """The fields of a batch that a scoring pass reads, laid out by a plan."""
    return batch.replace(
        tokens=_take(plan, batch.tokens),
        mask=_take(plan, batch.mask, False),
        positions=_take(plan, batch.positions),
        segments=plan.segments,
        routing=None if batch.routing is None else _take(plan, batch.routing, -1),
        support=None if batch.support is None else _take(plan, batch.support, -1),
    )


def unshare(
    plan: Sharing, x: Array, length: int, empty: float = 0, prompt_too: bool = False
) -> Array:
    """Brings per-token results [R, L, ...] back to [B, length, ...].

    Args:
      plan: The plan by which they were laid out.
      x: Results on the shared rows.
      length: T.
      empty: The value where there is no result.
      prompt_too: Whether each response gets its prompt's results as well.
    """
    row = jnp.arange(plan.start.shape[0])
    column = jnp.arange(length)[None]
    step = column - plan.start[:, None]
    member = (row % plan.group_size)[:, None]
    place = plan.prompt_length + member * plan.response_length + step
    there = (step >= 0) & (step < plan.response_length)
    if prompt_too:
        place, there = jnp.where(step < 0, column, place), there | (step < 0)
    place = jnp.clip(place, 0, x.shape[1] - 1)
    group = (row // plan.group_size)[:, None]
    there = there & (plan.segments[group, place] > 0)
    shape = there.shape + (1,) * (x.ndim - 2)
    return jnp.where(there.reshape(shape), x[group, place], jnp.asarray(empty, x.dtype))
