"""Attention over pages and over rows copied out of them, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels.attention.reference import attend_masked
from rljax_kernels.paged_attention import PageTables
from rljax_kernels.paged_attention.blocked import Sizes, prompt_attention

from rljax import models
from rljax.sampling.attention import decode_attention, gathered_attention, prefill_attention
from rljax.sampling.decode import prefill
from rljax.sampling.pool import gather_pages, make_pool, scatter_tokens

PAGE, PAGES, ROWS, KV, HEADS, DIM, VALUE = 4, 32, 4, 2, 4, 8, 6
LENGTHS = np.array([9, 12, 5, 7])  # tokens kept before the new one; the first 4 are shared in pairs
TABLE = np.array([[3, 7, 1, 9], [3, 5, 8, 20], [11, 12, 0, 0], [11, 14, 0, 0]])


def example(latent):
    rng = np.random.default_rng(0)
    heads, dim = (1, DIM) if latent else (KV, DIM)
    history = rng.normal(size=(ROWS, 16, heads, dim)).astype(np.float32)
    history[1, :4], history[3, :4] = history[0, :4], history[2, :4]
    values = history[..., :VALUE] if latent else rng.normal(size=(ROWS, 16, heads, VALUE))
    values = values.astype(np.float32)
    values[1, :4], values[3, :4] = values[0, :4], values[2, :4]
    pool = {"k": np.full((2, PAGES, heads, dim, PAGE), np.nan, np.float32)}
    if not latent:
        pool["v"] = np.full((2, PAGES, heads, PAGE, VALUE), np.nan, np.float32)
    for r, n in enumerate(LENGTHS):
        for t in range(n):
            page, offset = TABLE[r, t // PAGE], t % PAGE
            pool["k"][1, page, :, :, offset] = history[r, t]
            if not latent:
                pool["v"][1, page, :, offset] = values[r, t]
    q = rng.normal(size=(ROWS, 1, HEADS, DIM)).astype(np.float32)
    return pool, history, values, q


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window,sinks", [(None, False), (3, True), (6, False)])
def test_pages_rows_and_shared_rows_give_plain_attention(latent, window, sinks):
    pool, history, values, q = example(latent)
    rows = np.arange(ROWS)
    new = history[rows, LENGTHS][:, None], values[rows, LENGTHS][:, None]
    sink = np.linspace(-1, 1, HEADS, dtype=np.float32) if sinks else None
    options = {"scale": 0.3, "window": window, "sinks": sink}
    back = LENGTHS[:, None] - np.arange(16)
    allowed = (back >= 0) & (back < (window or 99))
    keys, vals = np.nan_to_num(history), np.nan_to_num(values)
    expected = attend_masked(q, keys, vals, allowed[:, None], 0.3, sink)

    positions, live = jnp.asarray(LENGTHS)[:, None], jnp.ones((ROWS, 1), bool)
    table = jnp.asarray(TABLE)
    pool = jax.tree.map(jnp.asarray, pool)
    paged, written = prefill_attention(table, positions, live)(q, *new, 1, pool, **options)
    np.testing.assert_allclose(paged, expected, atol=1e-5)

    none = jnp.zeros(ROWS, jnp.int32)
    tables = PageTables(table, none, jnp.zeros((1, 0), jnp.int32))
    step = decode_attention(tables, positions[:, 0], live[:, 0], "blocked")
    out, after = step(q, *new, 1, pool, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, written)

    own = gather_pages(pool, table, jnp.asarray(LENGTHS))
    alone, kept = gathered_attention(positions, live, none, {})(q, *new, 1, own, **options)
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    back_in = scatter_tokens(pool, kept, table, positions, live)
    for name in pool:
        np.testing.assert_array_equal(back_in[name][1], written[name][1])

    base = none + PAGE  # one page, read once for each pair of rows
    shared = gather_pages(pool, table[::2, :1], base[::2])
    own = gather_pages(pool, table[:, 1:], jnp.asarray(LENGTHS) - base)
    together, _ = gathered_attention(positions, live, base, shared)(q, *new, 1, own, **options)
    np.testing.assert_allclose(together, expected, atol=1e-5)


def test_rows_that_are_not_live_write_nothing():
    pool, history, values, q = example(latent=False)
    pool = jax.tree.map(jnp.asarray, pool)
    new = history[:, :1], values[:, :1]
    positions, live = jnp.asarray(LENGTHS)[:, None], jnp.zeros((ROWS, 1), bool)
    _, after = prefill_attention(jnp.asarray(TABLE), positions, live)(q, *new, 1, pool, scale=1.0)
    own = gather_pages(pool, jnp.asarray(TABLE), jnp.asarray(LENGTHS))
    _, kept = gathered_attention(positions, live, jnp.zeros(ROWS, jnp.int32), {})(
        q, *new, 1, own, scale=1.0
    )
    for name in pool:
        np.testing.assert_array_equal(after[name], pool[name])
        np.testing.assert_array_equal(kept[name][1], own[name][1])


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window,sinks", [(None, False), (3, True), (6, False)])
@pytest.mark.parametrize("sizes", [Sizes(2, 4, True), Sizes(3, 8, False), Sizes(5, 64, True)])
def test_a_prompt_in_parts_gives_plain_attention(latent, window, sinks, sizes):
    pool, history, values, _ = example(latent)
    rng = np.random.default_rng(1)
    lengths, width = LENGTHS, 5
    q = rng.normal(size=(ROWS, 16, HEADS, DIM)).astype(np.float32)
    sink = np.linspace(-1, 1, HEADS, dtype=np.float32) if sinks else None
    options = {"scale": 0.3, "window": window, "sinks": sink}
    back = np.arange(16)[:, None] - np.arange(16)
    allowed = (back >= 0) & (back < (window or 99))
    allowed = np.repeat(allowed[None], ROWS, axis=0)
    expected = attend_masked(q, history, values, allowed, 0.3, sink)
    # The last tokens of each row, as many as there are, up to the width; the others are no tokens.
    start = np.maximum(lengths - width, 0)
    positions = jnp.asarray(start)[:, None] + jnp.arange(width)
    live = positions < jnp.asarray(lengths)[:, None]
    given = jnp.take_along_axis(jnp.asarray(q), positions[..., None, None], axis=1)
    out = prompt_attention(
        given,
        jax.tree.map(jnp.asarray, pool),
        1,
        jnp.asarray(TABLE),
        positions,
        live,
        VALUE,
        sizes=sizes,
        **options,
    )
    for r, n in enumerate(lengths):
        count = n - start[r]
        np.testing.assert_allclose(out[r, :count], expected[r, start[r] : n], atol=1e-5)
        np.testing.assert_array_equal(out[r, count:], 0)


def test_a_row_s_bits_do_not_depend_on_other_rows_or_on_the_table_s_width():
    pool, *_ = example(latent=False)
    pool = jax.tree.map(jnp.asarray, pool)
    q = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 4, HEADS, DIM)), jnp.float32)
    positions = jnp.asarray(LENGTHS)[:, None] - 4 + jnp.arange(4)
    for sizes in (Sizes(4, 4, True), Sizes(2, 8, False)):

        def run(table, live, sizes=sizes):
            return prompt_attention(
                q, pool, 1, table, positions, live, VALUE, scale=0.3, window=6, sizes=sizes
            )

        live = jnp.ones((ROWS, 4), bool)
        whole = run(jnp.asarray(TABLE), live)
        alone = run(jnp.asarray(TABLE), live & (jnp.arange(ROWS) == 1)[:, None])
        np.testing.assert_array_equal(whole[1], alone[1])
        np.testing.assert_array_equal(alone[jnp.array([0, 2, 3])], 0)
        wide = run(jnp.pad(jnp.asarray(TABLE), ((0, 0), (0, 60))), live)
        np.testing.assert_array_equal(whole, wide)


def test_the_memory_of_a_prefill_grows_with_its_own_tokens():
    config = models.PRESETS["speed-s"]()
    params = jax.eval_shape(lambda: models.init(jax.random.key(0), config))
    pool = jax.eval_shape(lambda: make_pool(config, 1100, 16))

    def temporaries(context):
        shapes = (1, 512), (1,), (1,), (1, context // 16)
        rows = [jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes]
        program = jax.jit(prefill, static_argnames="config", donate_argnums=1)
        compiled = program.lower(params, pool, *rows, config=config).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # All scores of 512 tokens and 16,384 keys would take 268 MB, over 8 heads.
    assert temporaries(16_384) < temporaries(2048) + 2**20 < 130 * 2**20
