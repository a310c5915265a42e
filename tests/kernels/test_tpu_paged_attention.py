"""Paged attention's TPU kernels in Pallas's interpreter, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import paged_attention as paged
from rljax_kernels.paged_attention import pallas_tpu, reference
from rljax_kernels.paged_attention.pages import from_bits, to_bits

PAGE, PAGES, LAYERS, ROWS, BLOCKS, OWN, SHARED = 128, 48, 2, 6, 2, 5, 3
HEADS, WIDTH, VALUE_WIDTH = 6, 32, 16
# Rows end at a page's start, its end and in its middle; the third holds no token.
BEHIND = np.array([0, 5, 127, 128, 300, OWN * PAGE - 1])
LIVE = np.array([1, 1, 0, 1, 1, 1], bool)


def inputs(sharing, latent, dtype=jnp.float32):
    """Arguments of paged attention; what no row sees is not a number."""
    rng, kv = np.random.default_rng(0), 1 if latent else 2
    pages = rng.permutation(PAGES)
    own, shared = pages[: ROWS * OWN].reshape(ROWS, OWN), np.zeros((1, 0), int)
    base = np.zeros(ROWS, int)
    if sharing:
        shared = pages[ROWS * OWN :][: BLOCKS * SHARED].reshape(BLOCKS, SHARED)
        base = np.repeat([3 * PAGE, 2 * PAGE], ROWS // BLOCKS)
    seen = np.zeros((PAGES, PAGE), bool)
    for row in np.flatnonzero(LIVE):
        at = np.arange(BEHIND[row])
        seen[own[row, at // PAGE], at % PAGE] = True
        at = np.arange(base[row])
        seen[shared[row // (ROWS // len(shared)), at // PAGE], at % PAGE] = True

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    keys, values = (LAYERS, PAGES, kv, WIDTH, PAGE), (LAYERS, PAGES, kv, PAGE, VALUE_WIDTH)
    pool = {"k": to_bits(jnp.where(seen[None, :, None, None, :], draw(*keys), jnp.nan))}
    q, k, v = draw(ROWS, HEADS, WIDTH), draw(ROWS, kv, WIDTH), draw(ROWS, kv, VALUE_WIDTH)
    if latent:
        v = k[..., :VALUE_WIDTH]
    else:
        pool["v"] = to_bits(jnp.where(seen[None, :, None, :, None], draw(*values), jnp.nan))
    tables = paged.PageTables(*(jnp.asarray(x, jnp.int32) for x in (own, base, shared)))
    positions = jnp.asarray(base + BEHIND, jnp.int32)
    return q, k, v, pool, tables, positions, jnp.asarray(LIVE)


def attend(module, arrays, **how):
    q, k, v, pool, *rows = arrays

    @jax.jit
    def run(layer):
        return module.run(q, k, v, pool, layer, *rows, scale=0.3, **how)

    return run(jnp.int32(1))


@pytest.mark.parametrize(
    ("sharing", "latent", "window", "sinks"),
    [
        (False, False, 200, False),
        (True, False, 600, True),
        (True, True, None, False),
    ],
)
def test_output_and_pool_equal_the_references(sharing, latent, window, sinks):
    arrays = inputs(sharing, latent)
    how = {"window": window, "sinks": jnp.linspace(-1, 1, HEADS) if sinks else None}
    out, pool = attend(pallas_tpu, arrays, **how)
    want, want_pool = attend(reference, arrays, **how)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(out, want, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, pool, want_pool)


def test_bfloat16_lies_as_bits():
    arrays = inputs(sharing=True, latent=False, dtype=jnp.bfloat16)
    out, pool = attend(pallas_tpu, arrays)
    q, k, v, old, *rows = arrays
    wide = {name: from_bits(x).astype(jnp.float32) for name, x in old.items()}
    want, want_pool = attend(reference, (*(x.astype(jnp.float32) for x in (q, k, v)), wide, *rows))
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.02)
    for name, x in want_pool.items():
        np.testing.assert_array_equal(from_bits(pool[name]).astype(jnp.float32), x)


def test_only_the_pages_that_are_seen_are_visited():
    start, stop = (
        jnp.asarray([[0, 130], [0, 0], [500, 600]]),
        jnp.asarray([[10, 300], [0, 0], [520, 610]]),
    )
    steps, low, high, count = pallas_tpu._list_steps(start, stop, 128, 3 * 8)
    listed = [(int(s) >> 16, (int(s) & 0xFFFF) >> 3) for s in steps[: int(count)]]
    assert listed == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 3), (2, 4)]
    assert (low.tolist(), high.tolist()) == ([0, 0, 500], [300, 0, 610])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16 and float32, not in float16"),
        ({"page_size": 64}, "pages of a multiple of 128 tokens, not 64"),
        ({"value_dim": 64}, "values of a multiple of 128 numbers, not 64"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_reason(change, reason):
    asked = {"dtype": "bfloat16", "rows": 8, "heads": 8, "kv_heads": 2, "page_size": 128}
    asked = {**asked, "head_dim": 128, "value_dim": 128}
    assert paged.OPERATION.choose("auto", paged.Asked(**asked), "tpu").name == "pallas"
    with pytest.raises(ValueError, match=reason):
        paged.OPERATION.choose("pallas", paged.Asked(**{**asked, **change}), "tpu")
