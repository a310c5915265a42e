"""Every implementation of paged attention against the reference, and the reference by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import paged_attention as paged
from rljax_kernels.paged_attention import triton
from rljax_kernels.paged_attention.pages import from_bits, to_bits

from tests.kernels.implementations import able, others

R, LAYERS, PAGES, PAGE = 8, 2, 72, 8

# Heads, key heads, head size, value size, latent, rows that share pages, window, sinks.
CASES = {
    "plain": (4, 4, 16, 16, False, 0, None, False),
    "grouped": (8, 2, 16, 16, False, 0, None, False),
    "shared": (8, 2, 16, 16, False, 4, None, False),
    "one row a block": (4, 2, 16, 16, False, 1, None, False),
    "window": (4, 2, 16, 16, False, 0, 9, False),
    "shared, window": (4, 2, 16, 16, False, 4, 9, False),
    "sinks": (4, 2, 16, 16, False, 0, None, True),
    "shared, window, sinks": (8, 2, 16, 16, False, 4, 6, True),
    "latent": (8, 1, 40, 32, True, 0, None, False),
    "latent, shared": (8, 1, 40, 32, True, 4, None, False),
    "latent, shared, sinks": (8, 1, 40, 32, True, 8, 9, True),
}


def arguments(case, dtype, seed=0):
    """Rows of different lengths; pages that are not theirs, or past their end, hold NaN."""
    heads, kv, dim, value_dim, latent, sharing, window, sinks = CASES[case]
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    blocks = R // sharing if sharing else 1
    per_row, shared_pages = 6, 3 if sharing else 0
    free = iter(rng.permutation(PAGES))
    shared = np.array([[next(free) for _ in range(shared_pages)] for _ in range(blocks)])
    own = np.array([[next(free) for _ in range(per_row)] for _ in range(R)])
    base = np.zeros(R, np.int32)
    if sharing:
        base = np.repeat(rng.integers(1, shared_pages + 1, blocks) * PAGE, sharing)
        base[0] = 0  # a row of the block that shares nothing
    length = rng.integers(0, per_row * PAGE, R)
    length[1], length[2] = per_row * PAGE - 1, 0
    positions, live = base + length, np.ones(R, bool)
    live[3] = False
    lies = np.zeros((PAGES, PAGE), bool)
    for r in range(R):
        places = np.arange(length[r])
        lies[own[r, places // PAGE], places % PAGE] = True
    for b in range(blocks):
        places = np.arange(base.reshape(blocks, -1)[b].max()) if sharing else np.arange(0)
        lies[shared[b, places // PAGE] if sharing else places, places % PAGE] = True
    k, v = draw(LAYERS, PAGES, kv, dim, PAGE), draw(LAYERS, PAGES, kv, PAGE, value_dim)
    pool = {"k": to_bits(jnp.where(lies[None, :, None, None, :], k, jnp.nan))}
    new_k, new_v = draw(R, kv, dim), draw(R, kv, value_dim)
    if latent:
        new_v = new_k[..., :value_dim]
    else:
        pool["v"] = to_bits(jnp.where(lies[None, :, None, :, None], v, jnp.nan))
    tables = paged.PageTables(
        jnp.asarray(own, jnp.int32),
        jnp.asarray(base, jnp.int32),
        jnp.asarray(shared.reshape(blocks, shared_pages), jnp.int32),
    )
    how = dict(scale=dim**-0.5, window=window, sinks=draw(heads) if sinks else None)
    rows = (tables, jnp.asarray(positions, jnp.int32), jnp.asarray(live))
    return (draw(R, heads, dim), new_k, new_v, pool), rows, how


def attend(backend, arrays, rows, how, layer=1):
    @jax.jit
    def run(arrays, rows, sinks):
        given = how | {"sinks": sinks, "backend": backend}
        return paged.paged_attention(*arrays, layer, *rows, **given)

    return run(arrays, rows, how["sinks"])


def by_hand(arrays, rows, how, layer=1):
    """One row and one head after the other, in float64."""
    q, k, v, pool = (np.asarray(x, np.float64) for x in arrays[:3]) and (*arrays[:3], arrays[3])
    tables, positions, live = rows
    own, base, shared = (np.asarray(x) for x in (tables.own, tables.base, tables.shared))
    keys = np.asarray(from_bits(pool["k"])[layer], np.float64)
    values = np.asarray(from_bits(pool["v"])[layer], np.float64) if "v" in pool else None
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    for r in np.flatnonzero(np.asarray(live)):
        p, block = int(positions[r]), r // (len(q) // len(shared))
        first = 0 if how["window"] is None else max(0, p + 1 - how["window"])
        for h in range(q.shape[1]):
            j, scores, vals = h // group, [], []
            for place in range(first, p + 1):
                if place == p:
                    key, value = k[r, j], v[r, j]
                else:
                    table, at = (
                        (shared[block], place) if place < base[r] else (own[r], place - base[r])
                    )
                    page, offset = table[at // PAGE], at % PAGE
                    key = keys[page, j, :, offset]
                    value = key[: v.shape[2]] if values is None else values[page, j, offset]
                scores.append(q[r, h] @ key * how["scale"])
                vals.append(value)
            scores = np.array(scores)
            exp = np.exp(scores - scores.max())
            sink = 0.0
            if how["sinks"] is not None:
                sink = np.exp(float(how["sinks"][h]) - scores.max())
            out[r, h] = exp @ np.array(vals) / (exp.sum() + sink)
    return out


def assert_close(got, want, dtype):
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance
    )


def asked(case, dtype):
    heads, kv, dim, value_dim, latent, sharing, window, sinks = CASES[case]
    name = jnp.dtype(dtype).name
    return paged.Asked(name, R, heads, kv, dim, value_dim, PAGE, sharing, latent, window, sinks)


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_attention_over_each_row_s_tokens(case, dtype):
    arrays, rows, how = arguments(case, dtype)
    out, pool = attend("reference", arrays, rows, how)
    assert out.dtype == dtype
    assert_close(out, by_hand(arrays, rows, how), dtype)
    tables, positions, live = rows
    for r in range(R):
        place = int(positions[r] - tables.base[r])
        page, offset = int(tables.own[r, place // PAGE]), place % PAGE
        new = from_bits(pool["k"])[1, page, :, :, offset]
        assert np.array_equal(new, arrays[1][r]) == bool(live[r])
    changed = {n: (np.asarray(x) != np.asarray(arrays[3][n])).any() for n, x in pool.items()}
    assert all(changed.values())
    for name, x in pool.items():
        np.testing.assert_array_equal(x[0], arrays[3][name][0])  # the other layer


@pytest.fixture
def small_parts(monkeypatch):
    """Several tiles and parts in short rows."""
    monkeypatch.setattr(triton, "_cut", lambda *sizes: (16, 16, 4, 1))
    monkeypatch.setattr(triton, "LEAST", 32)
    monkeypatch.setattr(triton, "MOST", 32)


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", others(paged.OPERATION))
def test_equals_the_reference(small_parts, backend, case, dtype):
    arrays, rows, how = arguments(case, dtype)
    with able(paged.OPERATION, backend, asked(case, dtype)):
        out, pool = attend(backend, arrays, rows, how)
    want, want_pool = attend("reference", arrays, rows, how)
    assert_close(out, want, dtype)
    jax.tree.map(np.testing.assert_array_equal, pool, want_pool)


@pytest.mark.targets
def test_triton_computes_latents_in_the_tiles_that_it_takes():
    case, dtype = "latent, shared, sinks", jnp.bfloat16
    arrays, rows, how = arguments(case, dtype)
    with able(paged.OPERATION, "triton", asked(case, dtype)):
        out, _ = attend("triton", arrays, rows, how)
    assert_close(out, attend("reference", arrays, rows, how)[0], dtype)


def test_rows_that_are_no_whole_number_of_blocks_are_refused():
    arrays, (tables, *rest), how = arguments("shared", jnp.float32)
    tables = tables.replace(shared=jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="8 rows are not a multiple of the 3 blocks"):
        paged.paged_attention(*arrays, 0, tables, *rest, **how)
