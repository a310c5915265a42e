"""Every implementation of attention against the reference, in values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rljax_kernels import attention as attn
from rljax_kernels.attention import OPERATION, blocked, blocks, ring
from rljax_kernels.attention.blocks import Blocks

from tests.kernels import interpreter


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    rows: int = 2
    tokens: int = 44  # no multiple of a block
    window: int | None = None
    sinks: bool = False
    prefix: bool = False
    dtype: str = "float32"


CASES = {
    "packed": Case(),
    "prefix": Case(prefix=True, kv_heads=4, value_dim=12),
    "window and sinks": Case(window=5, sinks=True, heads=6, value_dim=4),
    "all at once": Case(prefix=True, window=9, sinks=True, kv_heads=1, value_dim=4, rows=3),
    "bfloat16": Case(prefix=True, sinks=True, dtype="bfloat16"),
}
SMALL = Blocks(16, 8)


def places(case, seed=0):
    """Rows with different sequences: of uneven lengths, with padding behind them."""
    rng = np.random.default_rng(seed)
    segments, positions, prefix = (np.zeros((case.rows, case.tokens), np.int32) for _ in range(3))
    for row in range(case.rows):
        start, number = 0, 0
        while (stop := start + int(rng.integers(2, case.tokens // 2))) <= case.tokens - 3:
            number += 1
            here = slice(start, stop)
            segments[row, here], positions[row, here] = number, np.arange(stop - start)
            if case.prefix and number > 1:
                prefix[row, here] = 1
                positions[row, here] += (segments[row] == 1).sum()
            start = stop
    given = jnp.asarray(prefix) if case.prefix else None
    return attn.whole_rows(jnp.asarray(positions), jnp.asarray(segments), given)


def arrays(case):
    """Queries, keys, values, sinks or None, and the gradient of the output."""
    rng = np.random.default_rng(1)
    shapes = [(case.heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim)]
    shapes.append((case.heads, case.value_dim))
    q, k, v, g = (
        jnp.asarray(rng.normal(size=(case.rows, case.tokens, *s)), case.dtype) for s in shapes
    )
    sinks = jnp.asarray(rng.normal(size=case.heads), jnp.float32) if case.sinks else None
    return q, k, v, sinks, g


def by_ring(q, k, v, queries, keys, *, scale, window, sinks):
    """Rows cut over four devices."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    run = functools.partial(
        ring.run, axis="context", parts=attn.RINGS["blocked"], scale=scale, window=window
    )
    rows = P(None, "context")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows,) * 5 + (P(),), out_specs=rows)
    def local(q, k, v, queries, keys, sinks):
        if sinks is not None:
            sinks = jax.lax.pcast(sinks, "context", to="varying")
        return run(q, k, v, queries, keys, sinks=sinks)

    return local(q, k, v, queries, keys, sinks)


RUNS = {
    i.name: i.run
    for i in OPERATION.implementations
    if "cpu" in i.platforms and i.name != OPERATION.reference
}
RUNS["ring"] = by_ring
RUNS |= {i.name: i.run for i in OPERATION.implementations if i.platforms == ("tpu",)}
RUNS["triton"] = OPERATION.named("triton").run


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "block_sizes", lambda queries, keys, heads: SMALL)
    with interpreter.interpreting():
        yield


def both(run, case, given):
    """The output and the gradients of queries, keys, values and sinks; padding left out."""
    tokens = places(case)
    real = (tokens.segments > 0)[..., None, None]

    @jax.jit
    def step(q, k, v, sinks, g):
        def f(q, k, v, sinks):
            options = {"scale": 0.3, "window": case.window, "sinks": sinks}
            return jnp.where(real, run(q, k, v, tokens, tokens, **options), 0)

        out, pull = jax.vjp(f, q, k, v, sinks)
        return out, *pull(g)

    return step(*given)


@functools.cache
def wanted(name):
    """By the reference, in float32 whatever the case's dtype is."""
    given = jax.tree.map(lambda x: x.astype(jnp.float32), arrays(CASES[name]))
    return both(OPERATION.named(OPERATION.reference).run, CASES[name], given)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.targets if n == "triton" else ()) for n in RUNS],
)
def test_values_and_gradients_equal_the_reference(name, case):
    if name == "triton" and not interpreter.available():
        pytest.skip("Triton's interpreter needs triton and torch")
    if name == "splash" and CASES[case].prefix:
        pytest.skip("it has no shared prefixes")
    found = both(RUNS[name], CASES[case], arrays(CASES[case]))
    for a, b in zip(found, wanted(case), strict=True):
        if b is None:
            assert a is None
        elif CASES[case].dtype == "float32":
            np.testing.assert_allclose(a, b, atol=2e-6)
        else:
            assert np.abs(a.astype(jnp.float32) - b).max() < 0.02 * np.abs(b).max()


@pytest.mark.parametrize("name", ["blocked", "ring"])
def test_queries_that_see_nothing_get_zero_and_leave_no_gradient(name):
    case = Case(tokens=32, rows=1)
    q, k, v, _, g = arrays(case)
    segments = jnp.asarray([[0] * 8 + [1] * 16 + [0] * 8])
    tokens = attn.whole_rows(jnp.arange(32)[None], segments)

    @jax.jit
    def step(q, k, v):
        def run(*a):
            return RUNS[name](*a, tokens, tokens, scale=0.3, window=None, sinks=None)

        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(g)

    for x in step(q, k, v):
        x = np.asarray(x)
        assert (x[:, :8] == 0).all() and (x[:, 24:] == 0).all()
        assert np.isfinite(x).all() and (x[:, 8:24] != 0).any()


PATTERNS = {
    "causal": {},
    "packed": {"lengths": (16, 48, 32, 32)},
    "window": {"window": 16},
    "prefix": {"lengths": (16, 32, 32, 48), "prefix": True},
    "padding": {"lengths": (32, 32)},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_are_visited_where_a_query_sees_a_key_and_nowhere_else(pattern):
    asked = PATTERNS[pattern]
    lengths = np.asarray(asked.get("lengths", (128,)))
    segments = np.pad(np.repeat(np.arange(len(lengths)) + 1, lengths), (0, 128 - lengths.sum()))
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.pad(np.arange(lengths.sum()) - starts, (0, 128 - lengths.sum()))
    prefix = jnp.asarray(np.where(segments > 1, 1, 0)[None]) if asked.get("prefix") else None
    tokens = attn.whole_rows(jnp.asarray(positions[None]), jnp.asarray(segments[None]), prefix)
    window = asked.get("window")
    seen = np.asarray(attn.sees(tokens, tokens, window)[0]) & (segments > 0)
    tiles = seen.reshape(128 // 16, 16, 128 // 8, 8).any((1, 3))
    assert int(blocks.visited(tokens, tokens, SMALL, window)[0]) == tiles.sum()
    assert tiles.sum() <= 0.6 * tiles.size


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_that_no_query_sees_are_not_read(direction):
    # Queries of the second sequence only, as a device of a ring may have; the first one's keys,
    # two whole blocks, hold what would spoil any result.
    case = Case(tokens=32, rows=1)
    q, k, v, _, g = arrays(case)
    segments = jnp.asarray([[1] * 16 + [2] * 16])
    tokens = attn.whole_rows(jnp.arange(32)[None], segments)
    queries = jax.tree.map(lambda x: x[:, 16:], tokens)
    how = blocked.How(0.3, None, SMALL)
    spoilt = [x.at[:, :16].set(jnp.nan) for x in (k, v)]
    if direction == "forward":
        a, b = (blocked.forward(how, q[:, 16:], *x, queries, tokens) for x in ((k, v), spoilt))
    else:
        more = (queries, tokens, g[:, 16:], *jnp.ones((2, 1, 16, case.heads)))
        a, b = (blocked.backward(how, q[:, 16:], *x, *more) for x in ((k, v), spoilt))
        assert not b[1][:, :16].any() and not b[2][:, :16].any()
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("devices", [3, 4])
def test_devices_of_a_ring_share_the_work_evenly(devices):
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,))
    rows = P(None, "context")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=rows, out_specs=(rows, rows, P("context"))
    )
    def step(index):
        moved = ring.balance(index, "context")
        queries = attn.Tokens(moved, moved, jnp.ones_like(moved))
        everything = jnp.broadcast_to(jnp.arange(32 * devices), (1, 32 * devices))
        keys = attn.Tokens(everything, everything, jnp.ones_like(everything))
        work = blocks.visited(queries, keys, Blocks(8, 8))
        return moved, ring.unbalance(moved, "context"), work

    index = jnp.arange(32 * devices)[None]
    moved, back, work = step(index)
    assert np.array_equal(back, index) and len(set(np.asarray(work))) == 1
    halves = np.asarray(moved).reshape(devices, 2, 16)[:, :, 0] // 16
    assert halves.tolist() == [[i, 2 * devices - 1 - i] for i in range(devices)]


def test_it_works_under_vmap_scan_and_recomputation():
    case = Case()
    q, k, v, _, _ = arrays(case)
    tokens = places(case)

    def loss(q, k, v):
        def layer(x, _):
            out = blocked.run(x, k, v, tokens, tokens, scale=0.3)
            return x + out, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0] ** 2)

    def plain(q, k, v):
        run = OPERATION.named("reference").run
        for _ in range(2):
            q = q + run(q, k, v, tokens, tokens, scale=0.3)
        return jnp.sum(jnp.where((tokens.segments > 0)[..., None, None], q, 0) ** 2)

    def only_real(*a):
        real = (tokens.segments > 0)[..., None, None]
        return loss(*(jnp.where(real, x, 0) for x in a))

    some = jnp.stack([q, 0.5 * q])
    found = jax.jit(jax.vmap(jax.grad(only_real), (0, None, None)))(some, k, v)
    for x, y in zip(some, found, strict=True):
        want = jax.jit(jax.grad(plain))(x, k, v)
        np.testing.assert_allclose(y, want, atol=1e-4)


@pytest.mark.parametrize("save", [False, True])
def test_a_policy_that_saves_its_results_leaves_attention_out_of_the_recomputation(save):
    case = Case(rows=1)
    q, k, v, _, _ = arrays(case)
    tokens = places(case)
    names = (blocked.OUT, blocked.LSE) if save else ()
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q):
        return blocked.run(jnp.sin(q), k, v, tokens, tokens, scale=0.3) ** 2

    text = str(jax.make_jaxpr(jax.grad(lambda q: layer(q).sum()))(q))
    # The forward pass has one loop over blocks of keys, the backward pass another.
    assert text.count("while[") == (2 if save else 3)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_temporaries_of_a_gradient_are_linear_in_the_tokens(tokens):
    ones = jnp.ones((1, tokens), jnp.int32)

    def loss(q, k, v, segments):
        at = attn.whole_rows(segments, segments)
        return jnp.sum(attn.attention(q, k, v, at, scale=0.1))

    shapes = [(1, tokens, heads, 16) for heads in (4, 2, 2)]
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given, ones).compile()
    inputs = 4 * sum(np.prod(s) for s in shapes)
    assert step.memory_analysis().temp_size_in_bytes < 8 * inputs


def test_the_rule_prefers_blocks_for_long_rows_and_says_why_it_refuses():
    long = attn.Asked("float32", 1, 4096, 4096, 8, 4, 64, 64)
    short = dataclasses.replace(long, queries=64, keys=64)
    assert OPERATION.choose("auto", long, "cpu").name == "blocked"
    assert OPERATION.choose("auto", short, "cpu").name == "reference"
    assert OPERATION.choose("blocked", short, "cpu").name == "blocked"
    assert attn.choose("auto", short, "context").name == "blocked"
    with pytest.raises(ValueError, match="all keys of a row on one device"):
        attn.choose("reference", short, "context")
    with pytest.raises(ValueError, match="no implementation 'flash'"):
        attn.choose("flash", short)
