"""Triton kernels of grouped products: of rows, and of the gradients of matrices.

`multiply` works through a list of tiles of rows, each of one group, so that no row meets another
group's matrix (after Gale et al. 2022, MegaBlocks). `gradient` goes through the rows of one group.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(
    x, weights, group, first, stop, out,
    TILES: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, GROUPS: tl.constexpr,
    STRIDE_INNER: tl.constexpr, STRIDE_OUTER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows times BLOCK_N columns of their group's matrix, read by strides.

    Tile t has rows [first[t], min(first[t] + BLOCK_M, stop[t])) of group[t]. Rows of group GROUPS
    have no matrix: their result is 0. TOGETHER tiles go through the columns side by side, so that
    caches serve both what they share of the matrix and of the rows.
    """
    columns: tl.constexpr = (OUTER + BLOCK_N - 1) // BLOCK_N
    bunch = tl.program_id(0) // (TOGETHER * columns)
    within = tl.program_id(0) % (TOGETHER * columns)
    size = tl.minimum(TILES - bunch * TOGETHER, TOGETHER)
    tile = bunch * TOGETHER + within % size
    e = tl.load(group + tile)
    row = tl.load(first + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(stop + tile)
    column = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (row < end)[:, None]
    at_x = x + row.to(tl.int64)[:, None] * INNER + k[None, :]
    at_w = k[:, None] * STRIDE_INNER + column[None, :] * STRIDE_OUTER
    at_w = weights + e.to(tl.int64) * (INNER * OUTER) + at_w
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    inner = tl.where(e < GROUPS, tl.where(tl.load(first + tile) < end, INNER, 0), 0)
    for begin in range(0, inner, BLOCK_K):
        rest = begin + k < INNER
        a = tl.load(at_x, mask=inside & rest[None, :], other=0)
        b = tl.load(at_w, mask=rest[:, None] & (column < OUTER)[None, :], other=0)
        found = tl.dot(a, b, found, input_precision=PRECISION)
        at_x += BLOCK_K
        at_w += BLOCK_K * STRIDE_INNER
    at_out = row.to(tl.int64)[:, None] * OUTER + column[None, :]
    mask = inside & (column < OUTER)[None, :]
    tl.store(out + at_out, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gradient(
    x, g, starts, out,
    INNER: tl.constexpr, OUTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the product of a group's rows of x, transposed, and its rows of g; 0 without any.

    The rows of group e are [starts[e], starts[e + 1]).
    """
    e = tl.program_id(2)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(starts + e)
    end = tl.load(starts + e + 1)
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(begin, end, BLOCK_K):
        row = at + tl.arange(0, BLOCK_K)
        wide = row.to(tl.int64)
        inside = row < end
        a = tl.load(
            x + wide[None, :] * INNER + i[:, None],
            mask=inside[None, :] & (i < INNER)[:, None], other=0,
        )  # fmt: skip
        b = tl.load(
            g + wide[:, None] * OUTER + j[None, :],
            mask=inside[:, None] & (j < OUTER)[None, :], other=0,
        )  # fmt: skip
        found = tl.dot(a, b, found, input_precision=PRECISION)
    at_out = e.to(tl.int64) * (INNER * OUTER) + i[:, None] * OUTER + j[None, :]
    mask = (i < INNER)[:, None] & (j < OUTER)[None, :]
    tl.store(out + at_out, found.to(out.dtype.element_ty), mask=mask)
