"""Triton kernels of log-probabilities: statistics of logits, and the gradients of some of them.

Logits are worked out in tiles of tokens by ids of the vocabulary and never leave the chip in
`statistics`, whose running sums follow Milakov and Gimelshein 2018 (online softmax); `slopes` forms
them anew. The matrix is read by strides, so that it may be [D, V] or an embedding [V, D].
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)


@triton.jit
def logits(
    hidden, matrix, row, column, last, tokens, inverse_temperature, first,
    D: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_V: tl.constexpr, NUM_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of tokens `row` for ids `column`, those before `last` that have a token.

    Returns:
      The logits, the lowest for all others, and which those are not.
    """
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    d = tl.arange(0, BLOCK_D)
    at_hidden = hidden + row.to(tl.int64)[:, None] * D + d[None, :]
    at_matrix = (
        matrix + d.to(tl.int64)[:, None] * STRIDE_D + column.to(tl.int64)[None, :] * STRIDE_V
    )
    for begin in range(0, D, BLOCK_D):
        inside = begin + d < D
        x = tl.load(at_hidden, mask=(row < tokens)[:, None] & inside[None, :], other=0)
        w = tl.load(at_matrix, mask=inside[:, None] & (column < last)[None, :], other=0)
        z = tl.dot(x, w, z, input_precision=PRECISION)
        at_hidden += BLOCK_D
        at_matrix += BLOCK_D * STRIDE_D
    real = column < last
    if NUM_TOKENS > 0:
        real = real & (first + column < NUM_TOKENS)
    return tl.where(real[None, :], z * inverse_temperature, LOWEST), real


@triton.jit
def statistics(
    hidden, matrix, ids, temperature, first, tokens, picked, top, total, weighted,
    D: tl.constexpr, V: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_V: tl.constexpr,
    NUM_TOKENS: tl.constexpr, PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of the vocabulary for a block of tokens.

    It takes hidden states [tokens, D], the matrix, the place of each token's id in it (-1: none),
    the temperature [1] and the first id [1]. It writes [parts, tokens]: the logit of the id, or 0,
    the greatest logit, and the sums of exp(logit - greatest) and of that times the logit.
    """
    part = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.load(ids + row, mask=row < tokens, other=-1)
    inverse = 1.0 / tl.load(temperature)
    offset = tl.load(first)
    last = tl.minimum((part + 1) * PART, V)
    own = tl.zeros((BLOCK_T,), tl.float32)
    highest = tl.full((BLOCK_T,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK_T,), tl.float32)
    products = tl.zeros((BLOCK_T,), tl.float32)
    for begin in range(part * PART, last, BLOCK_V):
        column = begin + tl.arange(0, BLOCK_V)
        z, real = logits(
            hidden, matrix, row, column, last, tokens, inverse, offset, D, STRIDE_D, STRIDE_V,
            NUM_TOKENS, BLOCK_T, BLOCK_V, BLOCK_D, PRECISION,
        )  # fmt: skip
        own += tl.sum(tl.where(column[None, :] == mine[:, None], z, 0.0), 1)
        now = tl.maximum(highest, tl.max(z, 1))
        weights = tl.where(real[None, :], tl.exp(z - now[:, None]), 0.0)
        shrink = tl.exp(highest - now)
        sums = sums * shrink + tl.sum(weights, 1)
        products = products * shrink + tl.sum(weights * z, 1)
        highest = now
    at = part * tokens + row
    tl.store(picked + at, own, mask=row < tokens)
    tl.store(top + at, highest, mask=row < tokens)
    tl.store(total + at, sums, mask=row < tokens)
    tl.store(weighted + at, products, mask=row < tokens)


@triton.jit
def slopes(
    hidden, matrix, ids, lse, constant, slope, picked, temperature, first, begin, tokens, out,
    D: tl.constexpr, V: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_V: tl.constexpr,
    NUM_TOKENS: tl.constexpr, PART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the products of hidden states and PART columns of the matrix, from `begin` [1].

    That is a multiple of 16. Of a logit z of probability p it is p (constant + slope z), and for
    the token's own id `picked` more, over the temperature. Tiles of tokens that follow each other
    read the same columns.
    """
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    within = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.multiple_of(tl.load(begin), 16)
    column = start + within
    last = tl.minimum(start + PART, V)
    inverse = 1.0 / tl.load(temperature)
    z, real = logits(
        hidden, matrix, row, column, last, tokens, inverse, tl.load(first), D, STRIDE_D, STRIDE_V,
        NUM_TOKENS, BLOCK_T, BLOCK_V, BLOCK_D, PRECISION,
    )  # fmt: skip
    inside = row < tokens
    a = tl.load(constant + row, mask=inside, other=0.0)
    b = tl.load(slope + row, mask=inside, other=0.0)
    p = tl.exp(z - tl.load(lse + row, mask=inside, other=0.0)[:, None])
    found = tl.where(real[None, :], p * (a[:, None] + b[:, None] * z), 0.0)
    mine = tl.load(ids + row, mask=inside, other=-1)
    g = tl.load(picked + row, mask=inside, other=0.0)
    found += tl.where(column[None, :] == mine[:, None], g[:, None], 0.0)
    at = row.to(tl.int64)[:, None] * PART + within[None, :]
    mask = inside[:, None] & (within < PART)[None, :]
    tl.store(out + at, (found * inverse).to(out.dtype.element_ty), mask=mask)
