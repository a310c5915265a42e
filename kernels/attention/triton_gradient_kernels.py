"""Triton kernels of flash attention's gradients; see `triton_kernels` for the shapes and the ways.

The probabilities are worked out anew from the scores and the softmax's logarithm; `delta` is the
sum of output times its gradient (FlashAttention-2, section 3.1). Nothing is added by atomics: a
program owns a block of queries, or a block of keys and a head of theirs with some of the queries'
heads that read it, so runs repeat to the bit.
"""

import triton
import triton.language as tl
from rljax_kernels.attention.triton_kernels import (
    key_ranges,
    load_tile,
    query_range,
    seen_keys,
    store_tile,
    token_fields,
)


@triton.jit
def add_queries_gradient(
    dq_main, dq_rest, q_main, q_rest, d_out, lse, delta, q_index, q_position, q_segment, q_prefix,
    k, v, k_tokens, keys, row, head, first, last, all_first, all_last,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, DV_PADDED: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of keys from first to last to the gradient of a block of queries."""
    k_at = k + ((row * keys + first * BLOCK_K) * KV_HEADS + head) * D
    v_at = v + ((row * keys + first * BLOCK_K) * KV_HEADS + head) * DV
    for j in range(first, last):
        left = keys - j * BLOCK_K
        k_main = load_tile(k_at, left, KV_HEADS * D, 0, MAIN, D, BLOCK_K)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
        k_rest = k_main
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
        probs = tl.exp2(scores * SCALE - lse[:, None])
        values = load_tile(v_at, left, KV_HEADS * DV, 0, DV_PADDED, DV, BLOCK_K)
        d_probs = tl.dot(d_out, tl.trans(values), input_precision=PRECISION)
        d_scores = (probs * (d_probs - delta[:, None])).to(k_main.dtype)
        dq_main = tl.dot(d_scores, k_main, dq_main, input_precision=PRECISION)
        if REST > 0:
            dq_rest = tl.dot(d_scores, k_rest, dq_rest, input_precision=PRECISION)
        k_at += BLOCK_K * KV_HEADS * D
        v_at += BLOCK_K * KV_HEADS * DV
    return dq_main, dq_rest


@triton.jit
def queries_gradient(
    q, k, v, d_out, lse, delta, q_tokens, k_tokens, q_extents, k_extents, queries, keys, dq,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, DV_PADDED: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, one head."""
    q_blocks, k_blocks = tl.num_programs(0), tl.cdiv(keys, BLOCK_K)
    i = q_blocks - 1 - tl.program_id(0)  # those that see most first
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // (HEADS // KV_HEADS)
    at, left = (row * queries + i * BLOCK_Q) * HEADS + head, queries - i * BLOCK_Q
    k_tokens += row * 4 * keys
    first, last, all_first, all_last, p_first, p_last, p_all_first, p_all_last = key_ranges(
        q_extents + row * 10 * q_blocks, q_blocks, i, k_extents + row * 10 * k_blocks, k_blocks,
        WINDOW, PREFIX, CHUNK,
    )  # fmt: skip
    q_index, q_position, q_segment, q_prefix = token_fields(
        q_tokens + row * 4 * queries, queries, i * BLOCK_Q, BLOCK_Q
    )
    q_main = load_tile(q + at * D, left, HEADS * D, 0, MAIN, D, BLOCK_Q)
    dq_main = tl.zeros([BLOCK_Q, MAIN], tl.float32)
    q_rest, dq_rest = q_main, dq_main
    if REST > 0:
        q_rest = load_tile(q + at * D, left, HEADS * D, MAIN, REST, D, BLOCK_Q)
        dq_rest = tl.zeros([BLOCK_Q, REST], tl.float32)
    go = load_tile(d_out + at * DV, left, HEADS * DV, 0, DV_PADDED, DV, BLOCK_Q)
    t = tl.arange(0, BLOCK_Q)
    line = (row * HEADS + head) * queries + i * BLOCK_Q
    lse_t = tl.load(lse + line + t, mask=t < left, other=0.0) * 1.4426950408889634
    delta_t = tl.load(delta + line + t, mask=t < left, other=0.0)
    if PREFIX:
        dq_main, dq_rest = add_queries_gradient(
            dq_main, dq_rest, q_main, q_rest, go, lse_t, delta_t, q_index, q_position, q_segment,
            q_prefix, k, v, k_tokens, keys, row, kv_head, p_first, p_last, p_all_first, p_all_last,
            KV_HEADS, D, DV, MAIN, REST, DV_PADDED, SCALE, WINDOW, PREFIX, BLOCK_K, PRECISION,
        )  # fmt: skip
    dq_main, dq_rest = add_queries_gradient(
        dq_main, dq_rest, q_main, q_rest, go, lse_t, delta_t, q_index, q_position, q_segment,
        q_prefix, k, v, k_tokens, keys, row, kv_head, first, last, all_first, all_last,
        KV_HEADS, D, DV, MAIN, REST, DV_PADDED, SCALE, WINDOW, PREFIX, BLOCK_K, PRECISION,
    )  # fmt: skip
    scale: tl.constexpr = SCALE * 0.6931471805599453
    store_tile(dq + at * D, left, dq_main * scale, HEADS * D, 0, MAIN, D, BLOCK_Q)
    if REST > 0:
        store_tile(dq + at * D, left, dq_rest * scale, HEADS * D, MAIN, REST, D, BLOCK_Q)


@triton.jit
def keys_gradient(
    q, k, v, d_out, lse, delta, q_tokens, k_tokens, q_extents, k_extents, queries, keys, dk, dv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, DV_PADDED: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, one head; scores are [keys, queries].

    The outputs are [PARTS, B, S, K, width]: each part is of some of the queries' heads.
    """
    q_blocks, k_blocks = tl.cdiv(queries, BLOCK_Q), tl.num_programs(0)
    j = tl.program_id(0)  # those that are seen most first
    head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    row = tl.program_id(2).to(tl.int64)
    group: tl.constexpr = HEADS // KV_HEADS // PARTS
    at, left = (row * keys + j * BLOCK_K) * KV_HEADS + head, keys - j * BLOCK_K
    q_tokens += row * 4 * queries
    first, last, all_first, all_last = query_range(
        q_extents + row * 10 * q_blocks, q_blocks, k_extents + row * 10 * k_blocks, k_blocks, j,
        WINDOW, PREFIX, CHUNK,
    )  # fmt: skip
    k_index, k_position, k_segment, _ = token_fields(
        k_tokens + row * 4 * keys, keys, j * BLOCK_K, BLOCK_K
    )
    k_main = load_tile(k + at * D, left, KV_HEADS * D, 0, MAIN, D, BLOCK_K)
    dk_main = tl.zeros([BLOCK_K, MAIN], tl.float32)
    k_rest, dk_rest = k_main, dk_main
    if REST > 0:
        k_rest = load_tile(k + at * D, left, KV_HEADS * D, MAIN, REST, D, BLOCK_K)
        dk_rest = tl.zeros([BLOCK_K, REST], tl.float32)
    values = load_tile(v + at * DV, left, KV_HEADS * DV, 0, DV_PADDED, DV, BLOCK_K)
    d_values = tl.zeros([BLOCK_K, DV_PADDED], tl.float32)
    t = tl.arange(0, BLOCK_Q)
    blocks = tl.maximum(last - first, 1)  # the compiler may divide by it where there are none
    for n in range(0, tl.maximum(last - first, 0) * group):
        i = first + n % blocks
        q_head = (head * PARTS + part) * group + n // blocks
        q_left = queries - i * BLOCK_Q
        q_at = (row * queries + i * BLOCK_Q) * HEADS + q_head
        line = (row * HEADS + q_head) * queries + i * BLOCK_Q
        q_main = load_tile(q + q_at * D, q_left, HEADS * D, 0, MAIN, D, BLOCK_Q)
        scores = tl.dot(k_main, tl.trans(q_main), input_precision=PRECISION)
        q_rest = q_main
        if REST > 0:
            q_rest = load_tile(q + q_at * D, q_left, HEADS * D, MAIN, REST, D, BLOCK_Q)
            scores = tl.dot(k_rest, tl.trans(q_rest), scores, input_precision=PRECISION)
        lse_t = tl.load(lse + line + t, mask=t < q_left, other=0.0) * 1.4426950408889634
        if (i < all_first) | (i >= all_last):
            q_index, q_position, q_segment, q_prefix = token_fields(
                q_tokens, queries, i * BLOCK_Q, BLOCK_Q
            )
            seen = seen_keys(
                q_index[None, :], q_position[None, :], q_segment[None, :], q_prefix[None, :],
                k_index[:, None], k_position[:, None], k_segment[:, None], WINDOW, PREFIX,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        probs = tl.exp2(scores * SCALE - lse_t[None, :])
        go = load_tile(d_out + q_at * DV, q_left, HEADS * DV, 0, DV_PADDED, DV, BLOCK_Q)
        d_values = tl.dot(probs.to(go.dtype), go, d_values, input_precision=PRECISION)
        d_probs = tl.dot(values, tl.trans(go), input_precision=PRECISION)
        delta_t = tl.load(delta + line + t, mask=t < q_left, other=0.0)
        d_scores = (probs * (d_probs - delta_t[None, :])).to(q_main.dtype)
        dk_main = tl.dot(d_scores, q_main, dk_main, input_precision=PRECISION)
        if REST > 0:
            dk_rest = tl.dot(d_scores, q_rest, dk_rest, input_precision=PRECISION)
    scale: tl.constexpr = SCALE * 0.6931471805599453
    at += part * tl.num_programs(2) * (row * 0 + keys) * KV_HEADS
    store_tile(dv + at * DV, left, d_values, KV_HEADS * DV, 0, DV_PADDED, DV, BLOCK_K)
    store_tile(dk + at * D, left, dk_main * scale, KV_HEADS * D, 0, MAIN, D, BLOCK_K)
    if REST > 0:
        store_tile(dk + at * D, left, dk_rest * scale, KV_HEADS * D, MAIN, REST, D, BLOCK_K)
