"""Triton kernels of flash attention: forward, gradient of the queries, of the keys and values.

They follow Dao et al. 2022 and 2023 (FlashAttention, FlashAttention-2): softmax in blocks with
running maxima, scores worked out anew for the gradients. A program walks over those blocks only
that its own block has to do with; between two bounds, where every query sees every key, it builds
no mask. Scores are kept in units of log 2.

Arrays are [B, T, H, width], the tokens' fields [B, 4, T] (`token_fields`), the extents of their
blocks [B, 10, blocks] (`relation`). Widths need not be powers of two: the keys' is D, cut into MAIN
and REST columns which are; the values' is DV, filled up to DV_PADDED.
"""

import triton
import triton.language as tl


@triton.jit
def token_fields(tokens, count, first, BLOCK: tl.constexpr):
    """Index, position, segment and prefix of a block's tokens; beyond the row there is padding."""
    at = first + tl.arange(0, BLOCK)
    inside = at < count
    index = tl.load(tokens + at, mask=inside, other=0)
    position = tl.load(tokens + count + at, mask=inside, other=0)
    segment = tl.load(tokens + 2 * count + at, mask=inside, other=0)
    prefix = tl.load(tokens + 3 * count + at, mask=inside, other=0)
    return index, position, segment, prefix


@triton.jit
def seen_keys(
    q_index, q_position, q_segment, q_prefix, k_index, k_position, k_segment,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Which queries see which keys; one side is a column, the other a row. Padding sees nothing."""
    k_segment = tl.where(k_segment > 0, k_segment, -1)
    seen = q_segment == k_segment
    if PREFIX:
        seen = seen | (q_prefix == k_segment)
    seen = seen & (q_index >= k_index)
    if WINDOW > 0:
        seen = seen & (q_position - k_position < WINDOW)
    return seen


@triton.jit
def relation(q, q_blocks, i, k, k_blocks, j, WINDOW: tl.constexpr, PREFIX: tl.constexpr):
    """What blocks of queries i have to do with blocks of keys j; one of them is a scalar.

    Returns:
      Whether a query may see keys of its own segment, whether of its prefix; whether all see all of
      them as their own segment, or all as their prefix.
    """
    near = tl.load(q + q_blocks + i) >= tl.load(k + j)
    behind = tl.load(q + i) >= tl.load(k + k_blocks + j)
    if WINDOW > 0:
        near = near & (tl.load(q + 2 * q_blocks + i) - tl.load(k + 3 * k_blocks + j) < WINDOW)
        behind = behind & (tl.load(q + 3 * q_blocks + i) - tl.load(k + 2 * k_blocks + j) < WINDOW)
    k_least = tl.load(k + 4 * k_blocks + j)
    k_most = tl.load(k + 5 * k_blocks + j)
    behind = behind & (tl.load(k + 6 * k_blocks + j) == k_most)
    q_most = tl.load(q + 5 * q_blocks + i)
    own = near & (tl.load(q + 4 * q_blocks + i) <= k_most) & (k_least <= q_most)
    own_all = behind & (tl.load(q + 6 * q_blocks + i) == q_most) & (q_most == k_most)
    if PREFIX:
        most = tl.load(q + 8 * q_blocks + i)
        ahead = near & (tl.load(q + 7 * q_blocks + i) <= k_most) & (k_least <= most)
        ahead_all = behind & (tl.load(q + 9 * q_blocks + i) == most) & (most == k_most)
    else:
        ahead = own & False
        ahead_all = own & False
    return own, ahead, own_all, ahead_all


@triton.jit
def widen(first, last, count, at, chosen):
    """The bounds [first, last) of what was chosen so far, and their count, with some more."""
    first = tl.minimum(first, tl.min(tl.where(chosen, at, 1 << 30), 0))
    last = tl.maximum(last, tl.max(tl.where(chosen, at + 1, 0), 0))
    return first, last, count + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def key_ranges(
    q, q_blocks, i, k, k_blocks, WINDOW: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr
):
    """The blocks of keys that a block of queries sees.

    Returns:
      For its own segments and for its prefixes: first block and end, and first and end of those in
      between that all queries see whole. The two ranges do not overlap.
    """
    zero = i * 0
    first, last, count = zero + k_blocks, zero, zero
    all_first, all_last, all_count = zero + k_blocks, zero, zero
    p_first, p_last, p_count = zero + k_blocks, zero, zero
    p_all_first, p_all_last, p_all_count = zero + k_blocks, zero, zero
    for start in range(0, k_blocks, CHUNK):
        at = start + tl.arange(0, CHUNK)
        j = tl.minimum(at, k_blocks - 1)
        own, ahead, own_all, ahead_all = relation(q, q_blocks, i, k, k_blocks, j, WINDOW, PREFIX)
        inside = at < k_blocks
        first, last, count = widen(first, last, count, at, own & inside)
        all_first, all_last, all_count = widen(all_first, all_last, all_count, at, own_all & inside)
        if PREFIX:
            p_first, p_last, p_count = widen(p_first, p_last, p_count, at, ahead & inside)
            p_all_first, p_all_last, p_all_count = widen(
                p_all_first, p_all_last, p_all_count, at, ahead_all & inside
            )
    all_last = tl.where(all_count == all_last - all_first, all_last, 0)
    p_all_last = tl.where(p_all_count == p_all_last - p_all_first, p_all_last, 0)
    last = tl.maximum(last, p_last)
    p_last = tl.minimum(p_last, first)
    return first, last, all_first, all_last, p_first, p_last, p_all_first, p_all_last


@triton.jit
def query_range(
    q, q_blocks, k, k_blocks, j, WINDOW: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr
):
    """The queries' blocks that see a block of keys: first, end, and of those that see all of it."""
    zero = j * 0
    first, last, count = zero + q_blocks, zero, zero
    all_first, all_last, all_count = zero + q_blocks, zero, zero
    for start in range(0, q_blocks, CHUNK):
        at = start + tl.arange(0, CHUNK)
        i = tl.minimum(at, q_blocks - 1)
        own, ahead, own_all, ahead_all = relation(q, q_blocks, i, k, k_blocks, j, WINDOW, PREFIX)
        inside = at < q_blocks
        first, last, count = widen(first, last, count, at, (own | ahead) & inside)
        all_first, all_last, all_count = widen(
            all_first, all_last, all_count, at, (own_all | ahead_all) & inside
        )
    all_last = tl.where(all_count == all_last - all_first, all_last, 0)
    return first, last, all_first, all_last


@triton.jit
def tile(
    start, left, STRIDE: tl.constexpr, COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pointers to some columns of a block of rows, and which of them exist."""
    at = tl.arange(0, BLOCK)
    columns = COLUMN + tl.arange(0, COLUMNS)
    inside = (at < left)[:, None]
    if COLUMN + COLUMNS > WIDTH:
        inside = inside & (columns < WIDTH)[None, :]
    return start + at[:, None] * STRIDE + columns[None, :], inside


@triton.jit
def load_tile(
    start, left, STRIDE: tl.constexpr, COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of a block of rows, zeros where there are none."""
    pointers, inside = tile(start, left, STRIDE, COLUMN, COLUMNS, WIDTH, BLOCK)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(
    start, left, values, STRIDE: tl.constexpr, COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what `load_tile` reads."""
    pointers, inside = tile(start, left, STRIDE, COLUMN, COLUMNS, WIDTH, BLOCK)
    tl.store(pointers, values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    acc, highest, total, q_main, q_rest, q_index, q_position, q_segment, q_prefix,
    k, v, k_tokens, keys, row, head, first, last, all_first, all_last,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, DV_PADDED: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of keys from first to last to the running softmax of a block of queries."""
    k_at = k + ((row * keys + first * BLOCK_K) * KV_HEADS + head) * D
    v_at = v + ((row * keys + first * BLOCK_K) * KV_HEADS + head) * DV
    for j in range(first, last):
        left = keys - j * BLOCK_K
        k_main = load_tile(k_at, left, KV_HEADS * D, 0, MAIN, D, BLOCK_K)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
        if REST > 0:
            k_rest = load_tile(k_at, left, KV_HEADS * D, MAIN, REST, D, BLOCK_K)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        if (j < all_first) | (j >= all_last):
            k_index, k_position, k_segment, _ = token_fields(k_tokens, keys, j * BLOCK_K, BLOCK_K)
            seen = seen_keys(
                q_index[:, None], q_position[:, None], q_segment[:, None], q_prefix[:, None],
                k_index[None, :], k_position[None, :], k_segment[None, :], WINDOW, PREFIX,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        probs = tl.exp2(scores * SCALE - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(probs, 1)
        values = load_tile(v_at, left, KV_HEADS * DV, 0, DV_PADDED, DV, BLOCK_K)
        acc = acc * shrink[:, None]
        acc = tl.dot(probs.to(values.dtype), values, acc, input_precision=PRECISION)
        highest = higher
        k_at += BLOCK_K * KV_HEADS * D
        v_at += BLOCK_K * KV_HEADS * DV
    return acc, highest, total


@triton.jit
def forward(
    q, k, v, q_tokens, k_tokens, q_extents, k_extents, sinks, queries, keys, out, lse,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, DV_PADDED: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, SINKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output and the logarithm of the softmax's denominator of a block of queries, one head.

    A query that sees nothing gets zeros, and -1e30 for the logarithm.
    """
    q_blocks, k_blocks = tl.num_programs(0), tl.cdiv(keys, BLOCK_K)
    i = q_blocks - 1 - tl.program_id(0)  # those that see most first
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group: tl.constexpr = HEADS // KV_HEADS
    at, left = (row * queries + i * BLOCK_Q) * HEADS + head, queries - i * BLOCK_Q
    q_extents += row * 10 * q_blocks
    k_extents += row * 10 * k_blocks
    k_tokens += row * 4 * keys
    first, last, all_first, all_last, p_first, p_last, p_all_first, p_all_last = key_ranges(
        q_extents, q_blocks, i, k_extents, k_blocks, WINDOW, PREFIX, CHUNK
    )
    q_index, q_position, q_segment, q_prefix = token_fields(
        q_tokens + row * 4 * queries, queries, i * BLOCK_Q, BLOCK_Q
    )
    q_main = load_tile(q + at * D, left, HEADS * D, 0, MAIN, D, BLOCK_Q)
    q_rest = q_main
    if REST > 0:
        q_rest = load_tile(q + at * D, left, HEADS * D, MAIN, REST, D, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, DV_PADDED], tl.float32)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if PREFIX:
        acc, highest, total = attend(
            acc, highest, total, q_main, q_rest, q_index, q_position, q_segment, q_prefix,
            k, v, k_tokens, keys, row, head // group, p_first, p_last, p_all_first, p_all_last,
            KV_HEADS, D, DV, MAIN, REST, DV_PADDED, SCALE, WINDOW, PREFIX, BLOCK_K, PRECISION,
        )  # fmt: skip
    acc, highest, total = attend(
        acc, highest, total, q_main, q_rest, q_index, q_position, q_segment, q_prefix,
        k, v, k_tokens, keys, row, head // group, first, last, all_first, all_last,
        KV_HEADS, D, DV, MAIN, REST, DV_PADDED, SCALE, WINDOW, PREFIX, BLOCK_K, PRECISION,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
        highest = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_tile(out + at * DV, left, acc, HEADS * DV, 0, DV_PADDED, DV, BLOCK_Q)
    logarithm = tl.where(total > 0, (highest + tl.log2(total)) * 0.6931471805599453, -1e30)
    t = tl.arange(0, BLOCK_Q)
    lse_at = lse + (row * HEADS + head) * queries + i * BLOCK_Q
    tl.store(lse_at + t, logarithm, mask=t < left)
