"""Attention's TPU kernels in Pallas's interpreter, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rljax_kernels.attention import (
    OPERATION,
    RINGS,
    Asked,
    block_pairs,
    pallas,
    ring,
    sees,
    splash,
    whole_rows,
)

TOKENS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 300, 4, 2, 32, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in short rows."""
    monkeypatch.setattr(pallas, "_MOST", (128, 256))
    monkeypatch.setattr(splash, "_MOST", (128, 128))


def packed(prefix, tokens=TOKENS, rows=2):
    """Rows packed with sequences of all lengths, prompts with responses, and padding at the end."""
    rng = np.random.default_rng(0)
    segments, positions, ahead = (np.zeros((rows, tokens), np.int32) for _ in range(3))
    for row in range(rows):
        at, number, prompt, start = 0, 0, 0, 0
        while at < tokens - 20:
            number += 1
            opens = prefix and number % 4 == 1
            length = min(int(rng.integers(5, 60 if prefix else 200)), tokens - at)
            if opens:
                prompt, start = number, length
            here = slice(at, at + length)
            segments[row, here] = number
            positions[row, here] = np.arange(length) + (0 if opens else start)
            ahead[row, here] = 0 if opens else prompt
            at += length
    places = map(jnp.asarray, (positions, segments))
    return whole_rows(*places, jnp.asarray(ahead) if prefix else None)


def arrays(places, dtype=jnp.float32):
    """Queries, keys, values, sinks, and the output's gradient, 0 at padding."""
    keys = jax.random.split(jax.random.key(0), 5)
    rows, tokens = places.segments.shape
    q = jax.random.normal(keys[0], (rows, tokens, HEADS, WIDTH), dtype)
    k = jax.random.normal(keys[1], (rows, tokens, KV_HEADS, WIDTH), dtype)
    v = jax.random.normal(keys[2], (rows, tokens, KV_HEADS, VALUE_WIDTH), dtype)
    g = jax.random.normal(keys[4], (rows, tokens, HEADS, VALUE_WIDTH), dtype)
    sinks = jax.random.normal(keys[3], (HEADS,))
    return (q, k, v, sinks), jnp.where(real(places), g, 0)


def real(places):
    return (places.segments > 0)[:, :, None, None]


def with_gradients(name, inputs, g, places, window=None, sinks=False):
    """The output where there are tokens, and the gradients of queries, keys, values and sinks."""
    run = OPERATION.named(name).run

    @jax.jit
    def both(inputs, g):
        def out(q, k, v, s):
            s = s if sinks else None
            return run(q, k, v, places, places, scale=0.2, window=window, sinks=s)

        y, pull = jax.vjp(out, *inputs)
        return jnp.where(real(places), y, 0), pull(g)

    return both(inputs, g)


def assert_close(found, expected, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.mark.parametrize(
    ("name", "prefix", "sinks", "window"),
    [
        ("pallas", False, False, None),
        ("pallas", False, True, 50),
        ("pallas", True, False, None),
        ("pallas", True, True, 50),
        ("splash", False, False, None),
        ("splash", False, True, 50),
    ],
)
def test_values_and_gradients_equal_the_references(name, prefix, sinks, window):
    places = packed(prefix)
    inputs, g = arrays(places)
    found = with_gradients(name, inputs, g, places, window, sinks)
    assert_close(found, with_gradients("reference", inputs, g, places, window, sinks), 5e-6)


@pytest.mark.parametrize("name", ["pallas", "splash"])
def test_bfloat16_is_as_near_as_its_rounding(name):
    places = packed(prefix=False)
    inputs, g = arrays(places, jnp.bfloat16)
    found = with_gradients(name, inputs, g, places, sinks=True)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs, g))
    expected = with_gradients("reference", *wide, places, sinks=True)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(a - b).max()) < 0.03 * float(jnp.abs(b).max())


def test_queries_of_a_part_of_a_row_see_the_keys_of_the_whole_row():
    places = packed(prefix=True)
    (q, k, v, _), _ = arrays(places)
    part = slice(130, 230)
    queries = jax.tree.map(lambda x: x[:, part], places)
    found = pallas.run(q[:, part], k, v, queries, places, scale=0.2, window=40)
    expected = OPERATION.named("reference").run(q, k, v, places, places, scale=0.2, window=40)
    assert_close(*(jnp.where(real(queries), x, 0) for x in (found, expected[:, part])), 5e-6)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_only_blocks_that_no_query_sees_are_skipped(prefix, window):
    places, (bq, bk) = packed(prefix, tokens=512), (32, 64)
    allowed = np.asarray(sees(places, places, window) & (places.segments > 0)[:, :, None])
    cut = allowed.reshape(2, 512 // bq, bq, 512 // bk, bk)
    seen, full = block_pairs.block_pairs(places, places, window, (bq, bk))
    assert not (cut.any((2, 4)) & ~np.asarray(seen)).any()
    assert not (np.asarray(full) & ~cut.all((2, 4))).any()
    assert np.asarray(seen).sum() < 0.6 * seen.size
    # Every block of results is visited, its pairs one after the other.
    for by_keys in (False, True):
        listed = block_pairs.list_pairs(seen, full, by_keys)
        count = int(listed.count)
        rows, blocks = (np.asarray(x)[:count] for x in (listed.rows, listed.blocks))
        results = list(zip(rows >> 4, (blocks & 0xFFFF) if by_keys else blocks >> 16, strict=True))
        assert results == sorted(results)
        assert len(set(results)) == 2 * seen.shape[2 if by_keys else 1]
        assert int(((rows & block_pairs.FIRST) > 0).sum()) == len(set(results))
        assert int(((rows & block_pairs.LAST) > 0).sum()) == len(set(results))
        assert int(((rows & block_pairs.SEEN) > 0).sum()) == int(seen.sum())


def test_one_long_sequence_needs_masks_on_the_diagonal_only():
    ones = jnp.ones((1, 512), jnp.int32)
    places = whole_rows(jnp.cumsum(ones, 1), ones)
    seen, full = block_pairs.block_pairs(places, places, None, (64, 64))
    np.testing.assert_array_equal(seen[0], np.tril(np.ones((8, 8), bool)))
    np.testing.assert_array_equal(full[0], np.tril(np.ones((8, 8), bool), -1))


@pytest.mark.parametrize("name", ["pallas", "splash"])
def test_heads_and_rows_cut_over_devices_equal_one_device(name):
    places = packed(prefix=False)
    (q, k, v, sinks), g = arrays(places)
    run = OPERATION.named(name).run

    def attend(q, k, v, sinks, places):
        return run(q, k, v, places, places, scale=0.2, sinks=sinks)

    def gradients(attend):
        def loss(q, k, v, sinks):
            return (attend(q, k, v, sinks, places) * g).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads = P("data", None, "tensor")
    specs = (heads, heads, heads, P("tensor"), P("data"))
    with jax.set_mesh(mesh):  # Pallas's interpreter knows nothing of manual axes
        found = gradients(jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False))
    assert_close(found, gradients(attend), 5e-6)


def test_rows_cut_over_devices_equal_one_device():
    """Keys go round the devices; each meets them by the kernels."""
    places = packed(prefix=True, tokens=320)
    (q, k, v, sinks), g = arrays(places)
    how = {"scale": 0.2, "window": 60}

    def meet(q, k, v, sinks, places):
        parts = RINGS["pallas"]
        return ring.run(q, k, v, places, places, axis="context", parts=parts, sinks=sinks, **how)

    def whole(q, k, v, sinks, places):
        return OPERATION.named("reference").run(q, k, v, places, places, sinks=sinks, **how)

    def gradients(attend):
        def loss(q, k, v, sinks):
            return (attend(q, k, v, sinks, places) * g).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)

    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("context",), axis_types=auto, devices=jax.devices()[:2])
    rows = P(None, "context")
    specs = (rows, rows, rows, P(), rows)
    with jax.set_mesh(mesh):
        found = gradients(jax.shard_map(meet, in_specs=specs, out_specs=rows, check_vma=False))
    assert_close(found, gradients(whole), 5e-6)


def test_a_library_s_kernel_refuses_the_checks_of_shard_map():
    places = packed(prefix=False, rows=1)
    (q, k, v, _), _ = arrays(places)
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    heads = P(None, None, "tensor")

    def attend(q, k, v):
        return splash.run(q, k, v, places, places, scale=0.2)

    attend = jax.shard_map(attend, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
    with pytest.raises(ValueError, match="'splash' does not say over which mesh axes"):
        jax.eval_shape(attend, q, k, v)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("pallas", {"dtype": "float16"}, "bfloat16 and float32, not in float16"),
        ("pallas", {"rows": 4096, "queries": 2**15, "keys": 2**15}, "pairs of blocks"),
        ("splash", {"prefix": True}, "no shared prefixes"),
        ("splash", {"queries": 128}, "whole rows, not 128 queries and 256 keys"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_reason(name, change, reason):
    asked = {"dtype": "bfloat16", "rows": 1, "queries": 256, "keys": 256, "heads": 4}
    asked = Asked(**{**asked, "kv_heads": 2, "head_dim": 64, "value_dim": 64, **change})
    with pytest.raises(ValueError, match=reason):
        OPERATION.choose(name, asked, "tpu")
    assert OPERATION.choose("auto", asked, "tpu").name != name


def test_auto_takes_the_kernels_but_for_short_rows():
    def chosen(rows, tokens, **change):
        asked = {"dtype": "bfloat16", "rows": rows, "queries": tokens, "keys": tokens, "heads": 8}
        asked = Asked(**asked, kv_heads=2, head_dim=128, value_dim=128, **change)
        return OPERATION.choose("auto", asked, "tpu").name

    assert chosen(1, 256) == chosen(1, 32768, prefix=True, window=128, sinks=True) == "pallas"
    assert chosen(8, 192) == "reference"
    assert chosen(2048, 192) == "pallas"
    # More pairs of blocks than a core's scalar memory lists.
    assert chosen(64, 32768 * 2) == "blocked"
