"""Every backend of `grouped_matmul` against the plain loop, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import grouped_matmul as gmm

M, D, F, E = 96, 12, 10, 4

# Rows of each group: even, skewed with empty groups, all in one, fewer than there are rows, none.
SIZES = {
    "even": (24, 24, 24, 24),
    "skewed": (0, 90, 5, 1),
    "one group": (0, 0, 96, 0),
    "rows left over": (7, 0, 30, 3),
    "none": (0, 0, 0, 0),
}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = ((M, D), (E, D, F), (M, F))
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


@functools.partial(jax.jit, static_argnums=0)
def run(backend, x, w, cotangent, sizes):
    def f(x, w):
        if backend == "reference":
            return gmm.reference(x, w, sizes)
        return gmm.grouped_matmul(x, w, sizes, backend=backend)

    out, pull = jax.vjp(f, x, w)
    return out, *pull(cotangent)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["ragged", "blocks"])
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_loop_in_values_and_gradients(arrays, backend, name):
    x, w, cotangent = arrays
    sizes = jnp.asarray(SIZES[name], jnp.int32)
    out, dx, dw = run(backend, x, w, cotangent, sizes)
    want, want_dx, want_dw = run("reference", x, w, cotangent, sizes)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(dx, want_dx, atol=1e-5)
    for e in range(E):
        np.testing.assert_allclose(dw[e], want_dw[e], atol=1e-4, err_msg=f"group {e}")
    empty = np.asarray(sizes) == 0
    assert (np.asarray(dw)[empty] == 0).all()
    assert (np.asarray(out)[sum(SIZES[name]) :] == 0).all()
    assert (np.asarray(dx)[sum(SIZES[name]) :] == 0).all()


@pytest.mark.parametrize("backend", ["ragged", "blocks"])
def test_rows_past_the_last_group_are_not_read(arrays, backend):
    x, w, cotangent = arrays
    sizes = jnp.asarray(SIZES["rows left over"], jnp.int32)
    want = run(backend, x, w, cotangent, sizes)
    used = (jnp.arange(M) < 40)[:, None]
    got = run(backend, jnp.where(used, x, jnp.nan), w, jnp.where(used, cotangent, jnp.nan), sizes)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


def test_aligned_rows_are_not_moved(arrays):
    x, w, cotangent = arrays
    sizes = jnp.asarray((32, 0, 48, 0), jnp.int32)  # 16 rows stay without a group

    @jax.jit
    def aligned(x, w):
        f = functools.partial(gmm.grouped_matmul, backend="blocks", aligned=16)
        out, pull = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, *pull(cotangent)

    want = run("reference", x, w, cotangent, sizes)
    for a, b in zip(aligned(x, w), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    broken = aligned(x.at[80:].set(jnp.nan), w)
    assert all(np.isfinite(a).all() for a in broken)


def test_align_places_every_row_once_in_whole_blocks():
    for sizes in SIZES.values():
        padded, target = gmm.align(jnp.asarray(sizes, jnp.int32), M, 16)
        rows = gmm.aligned_rows(M, E, 16)
        padded, target = np.asarray(padded), np.asarray(target)
        assert (padded % 16 == 0).all() and (padded - sizes < 16).all()
        assert padded.sum() <= rows
        inside = target[: sum(sizes)]
        assert len(set(inside.tolist())) == len(inside)
        starts = np.cumsum(padded) - padded
        want = np.concatenate([s + np.arange(n) for s, n in zip(starts, sizes, strict=True)])
        assert np.array_equal(inside, want)
        assert (target[sum(sizes) :] >= rows).all()


def test_bfloat16_gradients_add_up_in_float32():
    x = jnp.ones((4096, 1), jnp.bfloat16)
    w = jnp.ones((1, 1, 1), jnp.bfloat16)
    for backend in ("ragged", "blocks"):
        f = functools.partial(gmm.grouped_matmul, backend=backend)
        dw = jax.grad(lambda w, f=f: f(x, w, jnp.asarray([4096])).astype(jnp.float32).sum())(w)
        assert dw.dtype == jnp.bfloat16 and dw[0, 0, 0] == 4096


@pytest.mark.parametrize(
    ("shapes", "kwargs", "message"),
    [
        (((8, 3), (2, 4, 5), (2,)), {}, r"x \[M, D\] and weights \[E, D, F\], got \(8, 3\)"),
        (((8, 4), (2, 4, 5), (3,)), {}, r"group_sizes \(3,\) must hold one size for each of the 2"),
        (((8, 4), (2, 4, 5), (2,)), {"backend": "magic"}, "backend 'magic' is unknown; use"),
        (
            ((8, 4), (2, 4, 5), (2,)),
            {"backend": "blocks", "aligned": 3},
            "8 rows are not whole blocks of 3",
        ),
    ],
)
def test_refusals(shapes, kwargs, message):
    x, w, sizes = (jnp.ones(s) for s in shapes)
    with pytest.raises(ValueError, match=message):
        gmm.grouped_matmul(x, w, sizes, **kwargs)


def test_cpu_uses_blocks():
    assert gmm.default_backend() == "blocks"


def test_the_default_backend_is_that_of_the_devices_compiled_for():
    def mesh(platform):
        device = jax.sharding.AbstractDevice(platform, num_cores=1, platform=platform)
        return jax.sharding.AbstractMesh((1,), ("fsdp",), abstract_device=device)

    assert gmm.default_backend() == "blocks"
    for platform, backend in (("tpu", "ragged"), ("cuda", "ragged"), ("cpu", "blocks")):
        with jax.sharding.use_abstract_mesh(mesh(platform)):
            assert gmm.default_backend() == backend
