"""TPU kernels compiled by libtpu for described chips, as they run there: what memory they take."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rljax_kernels import logprobs
from rljax_kernels.attention import OPERATION, Tokens
from rljax_kernels.grouped_matmul import megablox
from rljax_kernels.grouped_matmul import pallas as pallas_grouped
from rljax_kernels.paged_attention import PageTables, pallas_tpu

from rljax.planning import Topology

pytestmark = [
    pytest.mark.targets,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra tpu)"
    ),
]


@pytest.fixture(scope="module")
def chips():
    """Four described chips, as data and tensor axes."""
    devices = np.array(Topology.parse("v5p:2x2x1").devices()).reshape(2, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def compiled(function, mesh, *arrays, donate=()):
    """The program for one chip, or for all where arrays come with specs: (shape, dtype, spec)."""

    def abstract(shape, dtype, spec=None):
        spec = P() if spec is None else spec
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    arrays = [jax.tree.map(lambda a: abstract(*a), x, is_leaf=_is_array) for x in arrays]
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*arrays).compile()


def _is_array(x):
    return isinstance(x, tuple) and len(x) > 1 and isinstance(x[0], tuple)


def one(mesh):
    """A mesh of its first chip."""
    return Mesh(mesh.devices[:1, :1], mesh.axis_names, axis_types=mesh.axis_types)


ATTENTION = {  # T, H, K, d, dv, prefix, window, sinks
    ("pallas", "all options"): (8192, 8, 2, 128, 128, True, 4096, True),
    ("splash", "all options"): (4096, 8, 2, 128, 128, False, 1024, True),
}


@pytest.mark.parametrize(("name", "case"), ATTENTION)
def test_attention_and_its_gradients_hold_no_scores(chips, name, case):
    t, heads, kv_heads, d, dv, prefix, window, has_sinks = ATTENTION[name, case]
    dtype = jnp.bfloat16
    run = OPERATION.named(name).run

    def both(q, k, v, sinks, g, places):
        def out(q, k, v, sinks):
            sinks = sinks if has_sinks else None
            return run(q, k, v, places, places, scale=0.1, window=window, sinks=sinks)

        y, pull = jax.vjp(out, q, k, v, sinks)
        return y, pull(g)

    ints = ((1, t), jnp.int32)
    program = compiled(
        both,
        one(chips),
        ((1, t, heads, d), dtype),
        ((1, t, kv_heads, d), dtype),
        ((1, t, kv_heads, dv), dtype),
        ((heads,), jnp.float32),
        ((1, t, heads, dv), dtype),
        Tokens(ints, ints, ints, ints if prefix else None),
    )
    temporaries = program.memory_analysis().temp_size_in_bytes
    # Copies of what comes in, and numbers for each query that lie in whole registers (512 bytes).
    assert temporaries < t * heads * (8 * d + 8 * dv + 1024)
    assert temporaries < heads * t * t  # a byte for each score would be more


GROUPED = {"pallas": pallas_grouped.run, "megablox": megablox.run}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_matmul_and_its_gradients_cost_what_the_rows_cost(chips, name):
    m, d, f, groups = 8192, 2048, 1408, 16

    def both(x, weights, sizes, g):
        y, pull = jax.vjp(lambda x, weights: GROUPED[name](x, weights, sizes), x, weights)
        return y, pull(g)

    program = compiled(
        both,
        one(chips),
        ((m, d), jnp.bfloat16),
        ((groups, d, f), jnp.bfloat16),
        ((groups,), jnp.int32),
        ((m, f), jnp.bfloat16),
    )
    # XLA's own gradient of ragged_dot is a dense product over all groups: six times as much here.
    assert program.cost_analysis()["flops"] < 1.01 * 6 * m * d * f
    assert program.memory_analysis().temp_size_in_bytes < 2**22


@pytest.mark.parametrize("latent", [False, True])
def test_paged_attention_copies_no_pages(chips, latent):
    kv, d, value_dim = (1, 576, 512) if latent else (8, 128, 128)
    rows, blocks, layers, pages, page = 32, 4, 4, 256, 128
    pool = {"k": ((layers, pages, kv, d, page), jnp.uint16)}
    if not latent:
        pool["v"] = ((layers, pages, kv, page, value_dim), jnp.uint16)
    tables = PageTables(((rows, 32), jnp.int32), ((rows,), jnp.int32), ((blocks, 8), jnp.int32))

    def attend(pool, q, k, v, layer, tables, positions, live):
        return pallas_tpu.run(q, k, v, pool, layer, tables, positions, live, scale=0.1)

    program = compiled(
        attend,
        one(chips),
        pool,
        ((rows, 32, d), jnp.bfloat16),
        ((rows, kv, d), jnp.bfloat16),
        ((rows, kv, value_dim), jnp.bfloat16),
        ((), jnp.int32),
        tables,
        ((rows,), jnp.int32),
        ((rows,), jnp.bool_),
        donate=0,
    )
    memory = program.memory_analysis()
    size = sum(2 * np.prod(shape) for shape, _ in pool.values())
    assert memory.alias_size_in_bytes == size  # written in place
    assert memory.temp_size_in_bytes < size / 8


def test_logprobs_and_their_gradients_hold_no_logits(chips):
    tokens, d, size = 4096, 1024, 65536

    def both(hidden, matrix, ids, g):
        def found(hidden, matrix):
            return logprobs.logprobs(hidden, matrix, ids, temperature=0.7, backend="pallas")

        found, pull = jax.vjp(found, hidden, matrix)
        return found, pull((g, g))

    program = compiled(
        both,
        one(chips),
        ((tokens, d), jnp.bfloat16),
        ((d, size), jnp.bfloat16),
        ((tokens,), jnp.int32),
        ((tokens,), jnp.float32),
    )
    assert program.memory_analysis().temp_size_in_bytes < tokens * size  # a byte for each logit


def test_latent_attention_compiles_inside_shard_map_with_its_checks(chips):
    heads = P("data", None, "tensor")
    run = OPERATION.named("pallas").run

    def attend(q, k, v, sinks, places):
        return run(q, k, v, places, places, scale=0.1, sinks=sinks)

    def loss(q, k, v, sinks, places):
        specs = (heads, heads, heads, P("tensor"), P("data"))
        out = jax.shard_map(attend, in_specs=specs, out_specs=heads)(q, k, v, sinks, places)
        return (out.astype(jnp.float32) ** 2).sum()

    ints = ((4, 1024), jnp.int32, P("data"))
    program = compiled(
        jax.grad(loss, (0, 1, 2, 3)),
        chips,
        ((4, 1024, 8, 192), jnp.bfloat16, heads),
        ((4, 1024, 8, 192), jnp.bfloat16, heads),
        ((4, 1024, 8, 128), jnp.bfloat16, heads),
        ((8,), jnp.float32, P("tensor")),
        Tokens(ints, ints, ints, ints),
    )
    whole = 4 * 1024 * 8 * (192 + 192 + 128) * 2
    assert program.memory_analysis().argument_size_in_bytes < whole / 3  # a quarter of all
