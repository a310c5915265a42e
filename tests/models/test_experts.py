"""The mixture layer against a loop over experts, whichever way it is computed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rljax_kernels import cpu
from rljax_kernels import grouped_matmul as gmm

from rljax import mesh as meshes
from rljax.errors import InputError, MissingDependencyError
from rljax.models import experts

N, D, F, E, K = 96, 8, 6, 8, 2


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    plain = {"gate": draw(E, D, F), "up": draw(E, D, F), "down": draw(E, F, D)}
    biases = {"gate_bias": draw(E, F), "up_bias": draw(E, F), "down_bias": draw(E, D)}
    params = {"silu": plain, "clamped": plain | biases}
    weights = jnp.asarray(rng.uniform(0.1, 1, (N, K)), jnp.float32)
    rows = [rng.permutation(E)[:K] for _ in range(N)]
    even = jnp.asarray(rows, jnp.int32)
    chosen = {
        "even": even,
        # Experts 4 to 7 get nothing.
        "empty experts": jnp.stack([even[:, 0] % 4, (even[:, 0] + 1 + even[:, 1] % 3) % 4], 1),
        # Every token goes to expert 3 first.
        "overfull": jnp.stack([jnp.full(N, 3), jnp.where(even[:, 1] == 3, 0, even[:, 1])], 1),
        "two experts only": jnp.broadcast_to(jnp.asarray([6, 1]), (N, K)),
    }
    return params, draw(N, D), weights, chosen, draw(N, D)


def loop(params, x, chosen, weights, activation):
    """Each expert on every token, kept where it was chosen."""
    out = jnp.zeros_like(x)
    for e in range(E):
        p = {name: values[e] for name, values in params.items()}
        gate = x @ p["gate"] + p.get("gate_bias", 0)
        up = x @ p["up"] + p.get("up_bias", 0)
        if activation == "clamped":
            gate, up = (
                jnp.where(gate > 7, 7, gate),
                jnp.where(jnp.abs(up) > 7, 7 * jnp.sign(up), up),
            )
            hidden = gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)
        else:
            hidden = jax.nn.silu(gate) * up
        share = jnp.where(chosen == e, weights, 0).sum(1, keepdims=True)
        out += share * (hidden @ p["down"] + p.get("down_bias", 0))
    return out


@functools.partial(jax.jit, static_argnums=(0, 6))
def run(way, params, x, weights, chosen, cotangent, activation="silu"):
    """`way` is the caller's to set, or `loop`."""

    def f(params, x, weights):
        if way == "loop":
            return loop(params, x, chosen, weights, activation)
        return experts.experts(params, x, chosen, weights, activation)

    out, pull = jax.vjp(f, params, x, weights)
    return out, *pull(cotangent)


# Rows that are expected to have an expert, by which the layout is chosen; None: as it is.
WAYS = {
    "blocks": ("blocks", None),
    "room for all": ("blocks", 8 * N * K),
    "small blocks": ("blocks", E),
    "used blocks alone": ("blocks", 1),
    "ragged": ("ragged", None),
    "one at a time": ("ragged", None),
    "in parts": ("ragged", None),
    "native": ("native", None),
}
EACH_WAY = pytest.mark.parametrize(
    "way", [*list(WAYS)[:-2], pytest.param("native", marks=pytest.mark.compiler)]
)


@pytest.fixture
def lay(monkeypatch):
    """Sets the way in which rows are laid out."""
    row_layout = gmm.row_layout

    def set_way(way):
        backend, rows = WAYS[way]
        if way in ("one at a time", "in parts"):
            monkeypatch.setattr(experts, "_MOST_BYTES", 0)
        if way == "in parts":
            monkeypatch.setattr(experts, "_MOST_MET", 4 * N * D // 3)

        def laid(*args, expected, largest):
            return row_layout(*args[:2], backend, expected=rows or expected, largest=largest)

        monkeypatch.setattr(gmm, "row_layout", laid)

    return set_way


def assert_equal(got, want, chosen):
    """Of what `run` gives; the gradients of an expert that was not chosen are exactly 0."""
    (out, dp, dx, dw), (want_out, want_dp, want_dx, want_dw) = got, want
    np.testing.assert_allclose(out, want_out, atol=2e-5)
    np.testing.assert_allclose(dx, want_dx, atol=1e-4)
    np.testing.assert_allclose(dw, want_dw, atol=1e-4)
    used = np.isin(np.arange(E), np.asarray(chosen))
    for name in want_dp:
        for e in range(E):
            scale = max(1, np.abs(want_dp[name][e]).max())
            np.testing.assert_allclose(
                dp[name][e], want_dp[name][e], atol=1e-5 * scale, err_msg=f"{name} of expert {e}"
            )
        assert (np.asarray(dp[name])[~used] == 0).all()


@pytest.mark.parametrize("routing", ["even", "empty experts", "overfull", "two experts only"])
@EACH_WAY
@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_equals_the_loop_in_values_and_gradients(arrays, lay, way, routing, activation):
    lay(way)
    params, x, weights, choices, cotangent = arrays
    params, chosen = params[activation], choices[routing]
    assert (chosen[:, 0] != chosen[:, 1]).all()
    given = params, x, weights, chosen, cotangent, activation
    assert_equal(run(way, *given), run("loop", *given), chosen)


AXES = {
    **dict.fromkeys(("gate", "up"), P("expert", None, "tensor")),
    **dict.fromkeys(("gate_bias", "up_bias", "down"), P("expert", "tensor")),
    "down_bias": P("expert"),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_parallel(mesh, dispatch, way, params, x, weights, chosen, cotangent):
    """As `run`, over a mesh that splits tokens and experts; `way` is the caller's to set."""
    rows = P(("fsdp", "expert"))

    def f(params, x, weights):
        local = functools.partial(
            experts.parallel_experts,
            expert_axes=("expert",),
            activation="clamped",
            dispatch=dispatch,
        )
        specs = ({name: AXES[name] for name in params}, rows, rows, rows)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)(
            params, x, chosen, weights
        )

    out, pull = jax.vjp(f, params, x, weights)
    return out, *pull(cotangent)


@pytest.mark.parametrize(
    "way",
    [
        "room for all",
        "small blocks",
        "one at a time",
        "in parts",
        pytest.param("native", marks=pytest.mark.compiler),
    ],
)
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("sizes", [{"expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}])
def test_experts_on_other_devices_are_met_without_loss(arrays, lay, sizes, dispatch, way):
    lay(way)
    params, x, weights, choices, cotangent = arrays
    params = params["clamped"]
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = meshes.make(devices=devices, **sizes)
    norms = []
    for chosen in choices.values():
        given = params, x, weights, chosen, cotangent
        got, want = run_parallel(mesh, dispatch, way, *given), run("loop", *given, "clamped")
        assert_equal(got, want, chosen)
        norms.append(float(optax.tree.norm(got[1]) / optax.tree.norm(want[1])))
    np.testing.assert_allclose(norms, 1, rtol=1e-6)


def test_tokens_are_sent_where_that_moves_less():
    assert experts.cheaper_dispatch(512, K, 8, ragged=True) == "all_to_all"
    assert experts.cheaper_dispatch(512, K, 8, ragged=False) == "all_gather"
    assert experts.cheaper_dispatch(512, K, K, ragged=True) == "all_gather"
    assert experts.cheaper_dispatch(64, K, 8, ragged=True) == "all_gather"


def test_so_many_tokens_are_exchanged_at_a_time_as_there_is_memory_for(monkeypatch):
    monkeypatch.setattr(experts, "_MOST_MET", 100)
    assert [experts.token_parts(12, each) for each in (8, 9, 30, 100, 200)] == [1, 2, 4, 12, 12]


def test_the_ragged_dispatch_sends_each_row_to_its_slot(monkeypatch):
    """As the program that XLA on CPU has not got is asked, by hand."""
    mesh = meshes.make(expert=4, devices=jax.devices()[:4])
    asked = []

    def ragged(rows, out, starts, sent, into, awaited, *, axis_name):
        asked.append((rows.shape, axis_name))
        every = [jax.lax.all_gather(a, axis_name) for a in (rows, starts, sent, into)]
        me = jax.lax.axis_index(axis_name)
        for peer in range(4):
            theirs, begin, count, place = (a[peer] for a in every)
            step = jnp.arange(rows.shape[0])
            source = jnp.where(step < count[me], begin[me] + step, rows.shape[0])
            piece = theirs.at[source].get(mode="fill", fill_value=0)
            target = jnp.where(step < count[me], place[me] + step, rows.shape[0])
            out = out.at[target].set(piece, mode="drop")
        return out

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (4, 4)).astype(np.int32)  # [from, to]
    filled = np.arange(3) < counts[:, :, None]
    rows = np.where(filled[..., None], rng.normal(size=(4, 4, 3, 2)), 0).astype(np.float32)
    found = {}
    for is_ragged in (False, True):
        monkeypatch.setattr(experts, "_ragged_dispatch", lambda answer=is_ragged: answer)

        def f(rows, sent, awaited):
            def local(rows, sent, awaited):
                return experts._swap(rows[0].reshape(12, 2), sent[0], awaited[0], ("expert",))[None]

            e = P("expert")
            mapped = jax.shard_map(local, mesh=mesh, in_specs=(e, e, e), out_specs=e)
            return mapped(rows, sent, awaited)

        out, pull = jax.vjp(jax.jit(f), rows, counts, counts.T)
        found[is_ragged] = out, pull(out)[0]
    assert set(asked) == {((12, 2), ("expert",))}
    np.testing.assert_array_equal(found[True][0], found[False][0])
    np.testing.assert_array_equal(found[True][0].reshape(4, 4, 3, 2), rows.swapaxes(0, 1))
    np.testing.assert_array_equal(found[True][1], rows)


@EACH_WAY
def test_a_token_s_bits_do_not_depend_on_the_others(arrays, lay, way):
    lay(way)
    params, x, weights, choices, cotangent = arrays
    params, chosen = params["clamped"], choices["even"]
    want = run(way, params, x, weights, chosen, cotangent, "clamped")[0]
    mine = (jnp.arange(N) % 3 == 0)[:, None]
    moved = jnp.where(mine, chosen, choices["overfull"])
    others = jnp.where(mine, x, 7.0)
    got = run(way, params, others, weights, moved, cotangent, "clamped")[0]
    assert np.array_equal(np.asarray(got)[::3], np.asarray(want)[::3])


def test_native_experts_that_cannot_be_built_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "no compiler; install one")
    with pytest.raises(
        MissingDependencyError, match=r"^expert_backend='native': no compiler; inst"
    ):
        experts.choose_backend("native", jnp.float32)
    assert experts.choose_backend("auto", jnp.float32) == "blocks"
    with pytest.raises(InputError, match=r"expert_backend='native': .* got bfloat16; use 'auto'"):
        experts.choose_backend("native", jnp.bfloat16)


def test_the_backend_that_is_taken_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "no compiler; install one")
    experts._log_choice.cache_clear()
    with caplog.at_level("INFO", logger="rljax"):
        for _ in range(3):
            experts.choose_backend("auto", jnp.float32)
    assert [r.getMessage() for r in caplog.records] == [
        "experts are multiplied by backend 'blocks' (expert_backend='auto')"
    ]
