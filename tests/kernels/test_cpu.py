"""The C++ kernels against the plain functions whose values they give."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import cpu
from rljax_kernels import grouped_matmul as gmm
from rljax_kernels import paged_attention as paged

pytestmark = pytest.mark.compiler


def step(backend, table, positions, live):
    """Attention of one new token a row, of rows that share no pages."""
    tables = paged.PageTables(table, jnp.zeros_like(positions), jnp.zeros((1, 0), jnp.int32))

    def attend(q, k, v, layer, pool, **how):
        given = q, k, v, pool, layer, tables, positions, live
        return paged.paged_attention(*given, backend=backend, **how)

    return attend


def draw(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


# Whole tiles and parts of them; depths past what is packed at a time.
@pytest.mark.smoke
@pytest.mark.parametrize(
    "depth,width,sizes",
    [
        (64, 128, (1,)),
        (512, 64, (0, 5, 6, 7, 0)),
        (257, 192, (12, 13, 25, 90)),
        (300, 75, (3, 0, 40)),
        (7, 3, (2, 14)),
        (1, 1, (0, 0)),
    ],
)
def test_grouped_matmul_and_its_gradients_are_those_of_the_loop(depth, width, sizes):
    rng = np.random.default_rng(depth)
    x, w = draw(rng, sum(sizes) + 4, depth), draw(rng, len(sizes), depth, width)
    sizes = jnp.asarray(sizes, jnp.int32)
    given = draw(rng, len(x), width)

    @functools.partial(jax.jit, static_argnums=0)
    def run(multiply, x, w):
        out, pull = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return out, *pull(given)

    got, want = run(cpu.grouped_matmul, x, w), run(gmm.reference.run, x, w)
    for a, b, length in zip(got, want, (depth, width, len(x)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * length**0.5)
    assert (got[0][sizes.sum() :] == 0).all() and (got[1][sizes.sum() :] == 0).all()
    assert (got[2][sizes == 0] == 0).all()


@pytest.mark.parametrize("depth,width", [(512, 96), (300, 75)])
def test_a_row_has_the_same_bits_whatever_rows_it_is_among(depth, width):
    rng = np.random.default_rng(0)
    x, w = draw(rng, 70, depth), draw(rng, depth, width)
    matmul = jax.jit(cpu.matmul)
    whole = matmul(x, w)
    for rows in (1, 4, 6, 7, 12, 13, 31):
        np.testing.assert_array_equal(matmul(x[5 : 5 + rows], w), whole[5 : 5 + rows])


def test_a_nan_stays_in_its_row():
    rng = np.random.default_rng(0)
    x, w = draw(rng, 20, 32), draw(rng, 32, 64)
    bad = cpu.matmul(x.at[3, 5].set(jnp.nan), w)
    assert jnp.isnan(bad[3]).all()
    np.testing.assert_array_equal(jnp.delete(bad, 3, axis=0), jnp.delete(cpu.matmul(x, w), 3, 0))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "page,dim,heads,kv_heads,window,sinks",
    [
        (16, 64, 4, 2, None, False),
        (16, 64, 3, 1, 20, True),
        (32, 40, 2, 2, 7, False),
        (4, 8, 4, 2, None, True),
        (4, 8, 3, 1, 7, False),
        (5, 70, 6, 2, 20, False),
    ],
)
def test_decode_attention_is_paged_attention(page, dim, heads, kv_heads, window, sinks):
    rows, columns, layers = 6, -(-60 // page), 2
    pages = rows * columns
    rng = np.random.default_rng(page)
    pool = {
        "k": draw(rng, layers, pages, kv_heads, dim, page),
        "v": draw(rng, layers, pages, kv_heads, page, dim),
    }
    table = jnp.asarray(rng.permutation(pages).reshape(rows, columns), jnp.int32)
    positions = jnp.asarray([0, 3, 15, 16, 41, 59], jnp.int32)
    live = jnp.asarray([True, True, True, False, True, True])
    # What was never written may be anything.
    unseen = jnp.arange(columns * page) > positions[:, None]
    place = table[:, jnp.arange(columns * page) // page], jnp.arange(columns * page) % page
    lost = jnp.where(unseen, place[0], pages)
    pool["k"] = pool["k"].at[:, lost, :, :, place[1]].set(jnp.nan, mode="drop")
    pool["v"] = pool["v"].at[:, lost, :, place[1]].set(jnp.nan, mode="drop")
    q, k, v = (draw(rng, rows, n, dim) for n in (heads, kv_heads, kv_heads))
    options = {"scale": 0.3, "window": window, "sinks": draw(rng, heads) if sinks else None}

    @jax.jit
    def run(pool):
        return step("native", table, positions, live)(q, k, v, 1, pool, **options)

    want, after = step("reference", table, positions, live)(q, k, v, 1, pool, **options)
    got, written = run(pool)
    np.testing.assert_allclose(got[live], want[live], atol=1e-5)
    assert (got[~live] == 0).all()
    for name in pool:
        np.testing.assert_array_equal(written[name], after[name])


def test_decode_attention_survives_large_scores_and_keeps_a_nan_in_its_row():
    rng = np.random.default_rng(0)
    pool = {"k": draw(rng, 1, 4, 1, 8, 16), "v": draw(rng, 1, 4, 1, 16, 8)}
    table = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
    positions, live = jnp.asarray([20, 9], jnp.int32), jnp.ones(2, bool)
    q, k, v = (draw(rng, 2, 1, 8) for _ in range(3))
    run = step("native", table, positions, live)
    plain = step("reference", table, positions, live)
    for scale in (1.0, 300.0):
        want, _ = plain(q, k, v, 0, pool, scale=scale)
        got, _ = run(q, k, v, 0, pool, scale=scale)
        np.testing.assert_allclose(got, want, atol=1e-5)
    got, _ = run(q.at[0].set(jnp.nan), k, v, 0, pool, scale=1.0)
    assert jnp.isnan(got[0]).all() and jnp.isfinite(got[1]).all()


def test_attention_has_no_gradient():
    pool = {"k": jnp.ones((1, 1, 1, 4, 16)), "v": jnp.ones((1, 1, 1, 16, 4))}
    attend = step(
        "native", jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    )
    x = jnp.ones((1, 1, 4))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: attend(q, x, x, 0, pool, scale=1.0)[0].sum())(x)


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="compute in float32, not in bfloat16"):
        cpu.Native(jnp.ones((2, 2))).astype(jnp.bfloat16)


def test_the_library_is_compiled_once_for_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = cpu.library()
    assert os.listdir(tmp_path / "rljax") == [library.name]
    made = library.stat().st_mtime_ns
    assert cpu.library() == library and library.stat().st_mtime_ns == made


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """A process that has built no kernels yet, on a machine that has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "register", cpu.register.__wrapped__)
    cpu._build_failure.cache_clear()
    yield tmp_path
    cpu._build_failure.cache_clear()


def test_kernels_are_available_where_they_can_be_built():
    assert cpu.unavailable_reason() is None


def test_a_compiler_that_is_missing_is_the_reason(monkeypatch, no_library):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = cpu.unavailable_reason()
    assert reason.startswith("the CPU kernels need a C++ compiler, and none of $CXX, c++, g++ and")
    with pytest.raises(cpu.UnavailableError, match="need a C"):
        cpu.library()


def test_a_compiler_that_fails_is_named_in_one_line_and_run_once(monkeypatch, no_library):
    broken, calls = no_library / "broken", no_library / "calls"
    broken.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exit\necho run >>{calls}\n"
        "printf 'kernel.cpp:1: error\\nno such flag\\n' >&2; exit 3\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    reasons = {cpu.unavailable_reason() for _ in range(2)}
    assert reasons == {
        f"{broken} failed to compile the CPU kernels (exit status 3): kernel.cpp:1: error | no "
        "such flag; set $CXX to another compiler, or do without the kernels"
    }
    assert calls.read_text() == "run\n"
    assert os.listdir(no_library / "rljax") == []  # no half-written library is left


def test_a_folder_that_cannot_be_written_is_named_in_one_line(monkeypatch, no_library):
    (no_library / "rljax").write_text("a file, where the folder would be")
    reason = cpu.unavailable_reason()
    assert reason.startswith("the CPU kernels cannot be kept or loaded (")
    assert str(no_library / "rljax") in reason and "\n" not in reason
