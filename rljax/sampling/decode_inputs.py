"""The arrays of a decode chunk, made on the host from its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from rljax_kernels.paged_attention import PageTables

from rljax.sampling import adjustments, decode
from rljax.sampling.adjustments import AdjustmentShape
from rljax.sampling.decode_rows import DecodeRows, Shapes
from rljax.sampling.scheduler import Sequence
from rljax.sampling.token_sampling import key_words


def blank_inputs(
    shapes: Shapes, count: int, stop_ids: int, min_active: list[int], columns: tuple[int, int]
) -> decode.DecodeInputs:
    """Inputs of empty rows, as numpy arrays; those of all shards follow each other.

    Args:
      shapes: The shapes of chunks.
      count: Rows of a shard.
      stop_ids: End ids of a row.
      min_active: For each shard, with how few active rows the chunk ends.
      columns: Pages of a row's own, and pages that a block of rows shares (0: no block does).
    """
    own, shared = columns
    shards = len(min_active)
    rows = shards * count
    blocks = count // shapes.share if shared else 1

    def full(value: float, *shape: int, dtype: Any = np.int32) -> Any:
        return np.full(shape, value, dtype)

    return decode.DecodeInputs(
        carry=decode.DecodeCarry(
            token=full(0, rows),
            position=full(0, rows),
            active=full(False, rows, dtype=bool),
            remaining=full(0, rows),
        ),
        sampling=decode.RowSampling(
            key=full(0, rows, 7, dtype=np.uint32),
            temperature=full(1, rows, dtype=np.float32),
            top_p=full(1, rows, dtype=np.float32),
            top_k=full(0, rows),
            min_p=full(0, rows, dtype=np.float32),
            stop=full(-1, rows, stop_ids),
        ),
        tables=PageTables(
            own=full(0, rows, own),
            base=full(0, rows),
            shared=full(0, shards * blocks, shared),
        ),
        min_active=full(0, shards) + np.asarray(min_active, np.int32),
    )


def shared_pages(sequence: Sequence, page_size: int) -> int:
    """Full pages of a sequence's prompt, which its group shares."""
    return (len(sequence.group.prompt) - 1) // page_size


def fill_inputs(
    rows: DecodeRows,
    shapes: Shapes,
    stop_ids: int,
    min_active: list[int],
    least_columns: tuple[int, int] = (0, 0),
) -> decode.DecodeInputs:
    """Inputs of a chunk's rows, as numpy arrays; arguments as of `blank_inputs`.

    Args:
      rows: The rows.
      shapes: The shapes of chunks.
      stop_ids: End ids of a row.
      min_active: For each shard, with how few active rows the chunk ends.
      least_columns: Page tables have at least so many columns.
    """
    own, most_shared = least_columns
    size, count = shapes.page_size, len(rows.of_shard[0])
    for _, _, q in rows:
        full = shared_pages(q, size) if rows.shared else 0
        own, most_shared = max(own, len(q.pages) - full), max(most_shared, full)
    columns = (shapes.pages(own, count), shapes.shared_pages(most_shared) if rows.shared else 0)
    inputs = blank_inputs(shapes, count, stop_ids, min_active, columns)
    carry, sampling, tables = inputs.carry, inputs.sampling, inputs.tables
    places = [s * count + row for s, row, _ in rows]
    if places:
        sampling.key[places] = key_words([q.key for _, _, q in rows])
    for at, (_, _, q) in zip(places, rows, strict=True):
        params, full = q.sampling, shared_pages(q, size) if rows.shared else 0
        carry.token[at], carry.position[at] = q.last_token, q.num_computed_tokens
        carry.active[at], carry.remaining[at] = True, q.limit - len(q.tokens)
        sampling.temperature[at], sampling.top_p[at] = params.temperature, params.top_p
        sampling.top_k[at], sampling.min_p[at] = params.top_k, params.min_p
        sampling.stop[at, : len(params.end_ids)] = params.end_ids
        tables.own[at, : len(q.pages) - full] = q.pages[full:]
        if rows.shared:
            tables.base[at] = full * size
            tables.shared[at // shapes.share, :full] = q.pages[:full]
    return inputs


def fill_adjustments(
    rows: DecodeRows, shape: AdjustmentShape, vocab_size: int
) -> adjustments.Adjustments:
    """Adjustments of a chunk's rows, as numpy arrays.

    Args:
      rows: The rows.
      shape: The shape of all adjustments of the call.
      vocab_size: Tokens that there are.
    """
    count = len(rows.of_shard[0])
    blank = shape.blank(len(rows.of_shard) * count, vocab_size)
    for s, row, q in rows:
        adjustments.fill(blank, s * count + row, q.sampling, q.group.prompt, q.tokens)
    return blank
