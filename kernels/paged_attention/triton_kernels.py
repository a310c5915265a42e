"""Triton kernels of decode attention: over parts of the rows' tokens, and putting them together.

The softmax goes over parts of a sequence at once (Dao et al. 2023, Flash-Decoding), with running
maxima inside a part; scores are in units of log 2. `attend` serves a block of rows that read the
same pages: all their query heads of one key head are the rows of one product, so that a tile of
keys is read once for all of them. Over its own pages a row is a block of its own.

A pool's pages are taken in pieces of PIECE tokens, PIECES of them a tile: consecutive tokens of a
piece lie next to each other, which the compiler has to see to read them in one go.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)


@triton.jit
def bits(x, BFLOAT16: tl.constexpr):
    """What a pool holds as numbers."""
    return x.to(tl.bfloat16, bitcast=True) if BFLOAT16 else x


@triton.jit
def query_tile(q, at, real, first, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Columns [first, first + PADDED) of queries, 0 beyond DIM."""
    d = first + tl.arange(0, PADDED)
    return tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0)


@triton.jit
def key_tile(
    pages, base, offset, inside, first,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + WIDTH) of the keys of some pieces, as [PADDED, PIECES · PIECE]."""
    d = tl.arange(0, PADDED)
    within = base[:, None, None] + ((first + d) * PAGE)[None, :, None]
    at = within + offset[:, None, None] + tl.arange(0, PIECE)[None, None, :]
    mask = inside[:, None, None] & (d < WIDTH)[None, :, None]
    x = bits(tl.load(pages + at, mask=mask, other=0), BFLOAT16)
    return tl.reshape(tl.permute(x, (1, 0, 2)), (PADDED, PIECES * PIECE))


@triton.jit
def value_tile(
    pages, base, offset, inside,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    BFLOAT16: tl.constexpr,
):  # fmt: skip
    """The values of some pieces, as [PIECES · PIECE, PADDED]."""
    d = tl.arange(0, PADDED)
    token = offset[:, None, None] + tl.arange(0, PIECE)[None, :, None]
    at = base[:, None, None] + token * WIDTH + d[None, None, :]
    mask = inside[:, None, None] & (d < WIDTH)[None, None, :]
    x = bits(tl.load(pages + at, mask=mask, other=0), BFLOAT16)
    return tl.reshape(x, (PIECES * PIECE, PADDED))


@triton.jit
def add_tile(
    highest, weight, found, q_main, q_rest, keys, values, table, before, kv, place, end, first,
    last, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, VALUES_PADDED: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, SCALE: tl.constexpr, BFLOAT16: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The greatest scores, sums of weights and weighted values with a tile of tokens more.

    MASKED says that the tile reaches past the end, where pages may hold anything, NaN too.
    """
    span: tl.constexpr = PIECE * PIECES
    pieces: tl.constexpr = PAGE // PIECE
    piece = place // PIECE + tl.arange(0, PIECES)
    inside = piece * PIECE < end
    page = tl.load(table + piece // pieces, mask=inside, other=0)
    at = (before + page) * KV_HEADS + kv
    offset = piece % pieces * PIECE
    k = key_tile(
        keys, at * DIM * PAGE, offset, inside, 0,
        PAGE, min(MAIN, DIM), MAIN, PIECES, PIECE, BFLOAT16,
    )  # fmt: skip
    scores = tl.dot(q_main, k, input_precision=PRECISION)
    if REST > 0:
        k_rest = key_tile(
            keys, at * DIM * PAGE, offset, inside, MAIN,
            PAGE, DIM - MAIN, REST, PIECES, PIECE, BFLOAT16,
        )  # fmt: skip
        scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
    token = place + tl.arange(0, span)
    seen = (token[None, :] >= first[:, None]) & (token[None, :] < last[:, None])
    scores = tl.where(seen, scores * SCALE, LOWEST)
    now = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - now[:, None]), 0.0)
    shrink = tl.exp2(highest - now)
    weight = weight * shrink + tl.sum(weights, 1)
    if LATENT:
        v = tl.trans(k)
    else:
        v = value_tile(
            values, at * VALUE_DIM * PAGE, offset, inside,
            VALUE_DIM, VALUES_PADDED, PIECES, PIECE, BFLOAT16,
        )  # fmt: skip
    if MASKED:
        v = tl.where((token < end)[:, None], v, tl.zeros_like(v))
    found = tl.dot(weights.to(v.dtype), v, found * shrink[:, None], input_precision=PRECISION)
    return now, weight, found


@triton.jit
def attend(
    q, keys, values, layer, table, start, stop, sums, top, total,
    ROWS: tl.constexpr, SHARING: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUES_PADDED: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, APART: tl.constexpr, SCALE: tl.constexpr, BFLOAT16: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the tokens of a block of rows, for one key head and a tile of their queries.

    It takes queries q [ROWS, HEADS, DIM], the pool's arrays, the layer [1], the pages that each
    block of rows reads, table [ROWS / SHARING, COLUMNS], and the places [start, stop) that each row
    sees in them. It writes the greatest score, top [parts, ROWS, HEADS], the sum of the weights
    exp2(score - top), total, and the values so weighted, sums [parts, ROWS, HEADS, VALUE_DIM],
    these only where something is seen.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    tiles: tl.constexpr = (SHARING * group + TILE - 1) // TILE
    block = tl.program_id(0) // tiles
    kv = tl.program_id(1)
    part = tl.program_id(2)
    m = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    real = m < SHARING * group
    row = tl.where(real, block * SHARING + m // group, 0)
    head = kv * group + m % group
    first = tl.load(start + row, mask=real, other=0)
    last = tl.load(stop + row, mask=real, other=0)
    sees = last > first

    # Whole tiles from the first place that any row sees.
    span: tl.constexpr = PIECE * PIECES
    begin = tl.min(tl.where(sees, first, COLUMNS * PAGE), 0) // span * span + part * PART
    end = tl.minimum(tl.max(tl.where(sees, last, 0), 0), begin + PART)

    at_q = (row * HEADS + head) * DIM
    q_main = query_tile(q, at_q, real, 0, DIM, MAIN)
    q_rest = query_tile(q, at_q, real, MAIN, DIM, REST) if REST > 0 else q_main

    highest = tl.full((TILE,), LOWEST, tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    found = tl.zeros((TILE, VALUES_PADDED), tl.float32)
    before = tl.load(layer).to(tl.int64) * PAGES
    # Which of the two takes fewer registers depends on the sizes.
    if APART:
        whole = begin + tl.maximum(end - begin, 0) // span * span
        for place in range(begin, whole, span):
            highest, weight, found = add_tile(
                highest, weight, found, q_main, q_rest, keys, values, table + block * COLUMNS,
                before, kv, place, end, first, last, KV_HEADS, DIM, VALUE_DIM, MAIN, REST,
                VALUES_PADDED, LATENT, PAGE, PIECE, PIECES, SCALE, BFLOAT16, PRECISION, False,
            )  # fmt: skip
        if whole < end:
            highest, weight, found = add_tile(
                highest, weight, found, q_main, q_rest, keys, values, table + block * COLUMNS,
                before, kv, whole, end, first, last, KV_HEADS, DIM, VALUE_DIM, MAIN, REST,
                VALUES_PADDED, LATENT, PAGE, PIECE, PIECES, SCALE, BFLOAT16, PRECISION, True,
            )  # fmt: skip
    else:
        for place in range(begin, end, span):
            highest, weight, found = add_tile(
                highest, weight, found, q_main, q_rest, keys, values, table + block * COLUMNS,
                before, kv, place, end, first, last, KV_HEADS, DIM, VALUE_DIM, MAIN, REST,
                VALUES_PADDED, LATENT, PAGE, PIECE, PIECES, SCALE, BFLOAT16, PRECISION, True,
            )  # fmt: skip

    out = (part * ROWS + row) * HEADS + head
    tl.store(top + out, highest, mask=real)
    tl.store(total + out, weight, mask=real)
    dv = tl.arange(0, VALUES_PADDED)
    at_sums = out.to(tl.int64)[:, None] * VALUE_DIM + dv[None, :]
    mask = (real & (weight > 0))[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(sums + at_sums, found, mask=mask)


@triton.jit
def greatest(top, total, at, ROWS_HEADS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """The greatest score of all parts that see something, and the sum of their weights at it."""
    part = tl.arange(0, PADDED)
    inside = part < PARTS
    totals = tl.load(total + part * ROWS_HEADS + at, mask=inside, other=0.0)
    tops = tl.load(top + part * ROWS_HEADS + at, mask=inside & (totals > 0), other=LOWEST)
    highest = tl.max(tops, 0)
    return highest, tl.sum(totals * tl.exp2(tops - highest), 0)


@triton.jit
def add_parts(
    found, sums, top, total, at, highest,
    ROWS_HEADS: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES_PADDED: tl.constexpr,
):  # fmt: skip
    """`found` with the values of all parts, their weights those at a greatest score."""
    dv = tl.arange(0, VALUES_PADDED)
    for part in range(PARTS):
        place = part * ROWS_HEADS + at
        if tl.load(total + place) > 0:  # else nothing was written
            at_sums = place.to(tl.int64) * VALUE_DIM + dv
            part_sums = tl.load(sums + at_sums, mask=dv < VALUE_DIM, other=0.0)
            found += tl.exp2(tl.load(top + place) - highest) * part_sums
    return found


@triton.jit
def merge(
    sums, top, total, shared_sums, shared_top, shared_total, sinks, out,
    HEADS: tl.constexpr, ROWS_HEADS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    SHARED_PARTS: tl.constexpr, SHARED_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES_PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The output of one row and head, from the parts of its own and of its block's shared pages."""
    at = tl.program_id(0)
    highest, weight = greatest(top, total, at, ROWS_HEADS, PARTS, PADDED)
    if SHARED_PARTS > 0:
        other, other_weight = greatest(
            shared_top, shared_total, at, ROWS_HEADS, SHARED_PARTS, SHARED_PADDED
        )
        both = tl.maximum(highest, other)
        weight = weight * tl.exp2(highest - both) + other_weight * tl.exp2(other - both)
        highest = both
    found = tl.zeros((VALUES_PADDED,), tl.float32)
    found = add_parts(
        found, sums, top, total, at, highest, ROWS_HEADS, PARTS, VALUE_DIM, VALUES_PADDED
    )
    if SHARED_PARTS > 0:
        found = add_parts(
            found, shared_sums, shared_top, shared_total, at, highest,
            ROWS_HEADS, SHARED_PARTS, VALUE_DIM, VALUES_PADDED,
        )  # fmt: skip
    if SINKS:
        # In the units of the scores; it may be far above all of them.
        sink = tl.load(sinks + at % HEADS)
        above = tl.maximum(sink, highest)
        found *= tl.exp2(highest - above)
        weight = weight * tl.exp2(highest - above) + tl.exp2(sink - above)
    dv = tl.arange(0, VALUES_PADDED)
    result = tl.where(weight > 0, found / tl.where(weight > 0, weight, 1.0), 0.0)
    at_out = at.to(tl.int64) * VALUE_DIM + dv
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=dv < VALUE_DIM)
