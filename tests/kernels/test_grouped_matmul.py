"""Every backend of `grouped_matmul` against the plain loop, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import cpu
from rljax_kernels import grouped_matmul as gmm

from tests.kernels.implementations import able, others

M, D, F, E = 96, 12, 10, 4

BACKENDS = others(gmm.OPERATION)

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


@functools.cache
def program(backend):
    @jax.jit
    def both(x, w, cotangent, sizes):
        def f(x, w):
            return gmm.grouped_matmul(x, w, sizes, backend=backend)

        out, pull = jax.vjp(f, x, w)
        return out, *pull(cotangent)

    return both


def run(backend, *arguments):
    with able(gmm.OPERATION, backend, gmm.Asked("float32")):
        return program(backend)(*arguments)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles a group."""
    monkeypatch.setattr(gmm.triton, "_cut", lambda *sizes: gmm.triton.Blocks(16, 16, 16, 4, 1))


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_group_are_not_read(arrays, backend):
    x, w, cotangent = arrays
    sizes = jnp.asarray(SIZES["rows left over"], jnp.int32)
    want = run(backend, x, w, cotangent, sizes)
    used = (jnp.arange(M) < 40)[:, None]
    got = run(backend, jnp.where(used, x, jnp.nan), w, jnp.where(used, cotangent, jnp.nan), sizes)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


LAYOUTS = {
    "ragged": gmm.RowLayout(E, M, 0, 0),
    "first blocks and more": gmm.RowLayout(E, E * 24 + M, 24, 16),
    "first blocks alone": gmm.RowLayout(E, E * M, M, 16),
    "used blocks alone": gmm.RowLayout(E, (E + M // 16) * 16, 0, 16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_go_through_all_stages_with_their_group_s_parameters(arrays, name):
    x, w, cotangent = arrays
    rng = np.random.default_rng(1)
    params = {
        "w": w,
        "b": jnp.asarray(rng.normal(size=(E, F)), jnp.float32),
        "down": w.swapaxes(1, 2),
    }
    laid = LAYOUTS[name]

    @jax.jit
    def run_stages(x, params, sizes):
        group = jnp.repeat(
            jnp.arange(E + 1), jnp.append(sizes, M - sizes.sum()), total_repeat_length=M
        )
        place = laid.places(group, sizes)

        def f(x, params):
            spread = jnp.full((laid.rows, D), 3.0).at[place].set(x, mode="drop")
            out = gmm.grouped(STAGES, spread, params, sizes, laid)
            return out.at[place].get(mode="fill", fill_value=0)

        out, pull = jax.vjp(f, x, params)
        return out, pull(cotangent @ w[0].T)

    @jax.jit
    def run_loop(x, params, sizes):
        def f(x, params):
            hidden = gmm.reference.run(x, params["w"], sizes)
            ones = jnp.ones((M, 1))
            hidden = jnp.tanh(hidden + gmm.reference.run(ones, params["b"][:, None], sizes))
            return gmm.reference.run(hidden, params["down"], sizes)

        out, pull = jax.vjp(f, x, params)
        return out, pull(cotangent @ w[0].T)

    for split in SIZES.values():
        sizes = jnp.asarray(split, jnp.int32)
        got, want = run_stages(x, params, sizes), run_loop(x, params, sizes)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got, want)
        for dp in jax.tree.leaves(got[1][1]):
            assert (np.asarray(dp)[np.asarray(split) == 0] == 0).all()


def _first(dot, x, params):
    return (jnp.tanh(dot(x, params["w"], params["b"])),)


def _second(dot, hidden, params):
    return dot(hidden[0], params["down"])


STAGES = (_first, _second)


def test_a_layout_has_a_place_for_every_row_and_whole_blocks_for_every_group():
    for rows, groups, expected, largest in ((96, 4, None, None), (96, 4, 8, 24), (64, 64, 5, 8)):
        laid = gmm.row_layout(rows, groups, "blocks", expected=expected, largest=largest)
        most = largest or rows
        for split in (
            [most] * (rows // most),
            [1] * min(groups, rows),
            [0, 5, min(most, rows - 5)],
            [],
        ):
            sizes = jnp.asarray((list(split) + [0] * groups)[:groups], jnp.int32)
            total = int(sizes.sum())
            group = np.repeat(np.arange(groups), sizes)
            group = jnp.asarray(np.append(group, np.full(rows - total, groups)))
            place = np.asarray(laid.places(group, sizes))
            inside, head = place[:total], groups * laid.first
            assert (place[total:] == laid.rows).all()
            assert (inside < laid.rows).all() and len(set(inside)) == total
            # A block behind the first ones is all of one group.
            owner: dict[int, int] = {}
            for place, g in zip(inside, np.asarray(group), strict=False):
                if place < head:
                    assert place // laid.first == g
                else:
                    assert owner.setdefault((place - head) // laid.block, g) == g
    assert gmm.row_layout(6, 4, "blocks").first
    assert not gmm.row_layout(8, 64, "blocks").first


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
        (
            ((8, 4), (2, 4, 5), (2,)),
            {"backend": "magic"},
            "has no implementation 'magic'; use one of auto, native",
        ),
    ],
)
def test_refusals(shapes, kwargs, message):
    x, w, sizes = (jnp.ones(s) for s in shapes)
    with pytest.raises(ValueError, match=message):
        gmm.grouped_matmul(x, w, sizes, **kwargs)


def test_rows_laid_out_otherwise_are_refused(arrays):
    x, w, _ = arrays
    with pytest.raises(ValueError, match="96 rows are laid out; this layout has 192 places"):
        gmm.grouped(STAGES, x, {"w": w}, jnp.zeros(E, jnp.int32), LAYOUTS["first blocks and more"])


def mesh_of(platform, count=1):
    device = jax.sharding.AbstractDevice(platform, num_cores=1, platform=platform)
    return jax.sharding.AbstractMesh((count,), ("fsdp",), abstract_device=device)


@pytest.mark.compiler
def test_one_cpu_device_takes_native_in_float32_and_others_blocks():
    assert gmm.choose_backend() == "native"
    assert gmm.choose_backend(dtype=jnp.bfloat16) == "blocks"
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert gmm.choose_backend() == "native"
    with jax.sharding.use_abstract_mesh(mesh_of("cpu", 4)):
        assert gmm.choose_backend() == "blocks"
        assert gmm.choose_backend("native") == "native"  # slower there, but it works


def test_auto_does_without_kernels_that_cannot_be_built_and_native_does_not(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "no compiler; install one")
    assert gmm.choose_backend() == "blocks"
    with pytest.raises(cpu.UnavailableError, match="no compiler; install one"):
        gmm.choose_backend("native")


def test_the_backend_is_that_of_the_devices_compiled_for():
    for platform, name in (("tpu", "tpu"), ("cuda", "gpu")):
        with jax.sharding.use_abstract_mesh(mesh_of(platform)):
            assert gmm.choose_backend("ragged") == "ragged"
            assert gmm.choose_backend() not in ("native", "blocks", "reference")
            with pytest.raises(ValueError, match=f"it is for cpu, not for {name}; use 'auto'"):
                gmm.choose_backend("native")
    with pytest.raises(ValueError, match="computes in float32, got bfloat16; use 'auto'"):
        gmm.choose_backend("native", jnp.bfloat16)
