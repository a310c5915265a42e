"""Attention's TPU kernels: in Pallas's interpreter against the reference, and compiled by libtpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels.attention import OPERATION, pallas, splash, whole_rows

_TOKENS, _HEADS, _KV_HEADS, _WIDTH, _VALUE_WIDTH = 300, 4, 2, 32, 16


def _rows(rng, tokens, rows=2, prefix=False):
    """Rows packed with sequences of all lengths, padding at the end."""
    segments, positions, ahead = (np.zeros((rows, tokens), np.int32) for _ in range(3))
    for row in range(rows):
        at, number, prompt, start = 0, 0, 0, 0
        while at < tokens - 20:
            number += 1
            opens = prefix and number % 4 == 1
            length = min(int(rng.integers(5, 60 if prefix else 200)), tokens - at)
            prompt, start = (number, 0) if opens else (prompt, start)
            here = slice(at, at + length)
            segments[row, here] = number
            positions[row, here] = np.arange(length) + (0 if opens else start)
            ahead[row, here] = 0 if opens else prompt
            start = length if opens else start
            at += length
    return whole_rows(
        *map(jnp.asarray, (positions, segments)), jnp.asarray(ahead) if prefix else None
    )


def _arrays(tokens, prefix=False, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    places = _rows(np.random.default_rng(0), tokens, prefix=prefix)
    b = places.segments.shape[0]
    q = jax.random.normal(keys[0], (b, tokens, _HEADS, _WIDTH), dtype)
    k = jax.random.normal(keys[1], (b, tokens, _KV_HEADS, _WIDTH), dtype)
    v = jax.random.normal(keys[2], (b, tokens, _KV_HEADS, _VALUE_WIDTH), dtype)
    sinks = jax.random.normal(keys[3], (_HEADS,))
    g = jax.random.normal(keys[4], (b, tokens, _HEADS, _VALUE_WIDTH), dtype)
    return (q, k, v, sinks), jnp.where((places.segments > 0)[:, :, None, None], g, 0), places


def _with_gradients(name, arrays, g, places, window=None, sinks=False):
    run = OPERATION.named(name).run

    @jax.jit
    def both(q, k, v, s):
        def out(q, k, v, s):
            s = s if sinks else None
            return run(q, k, v, places, places, scale=0.2, window=window, sinks=s)

        y, pull = jax.vjp(out, q, k, v, s)
        return jnp.where((places.segments > 0)[:, :, None, None], y, 0), pull(g)

    return both(*arrays)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in short rows."""
    monkeypatch.setattr(pallas, "_MOST", (128, 256))
    monkeypatch.setattr(splash, "_MOST", (128, 128))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("name", "prefix"), [("pallas", False), ("pallas", True), ("splash", False)]
)
def test_values_and_gradients_equal_the_references(small_blocks, name, prefix, sinks, window):
    arrays, g, places = _arrays(_TOKENS, prefix)
    found = _with_gradients(name, arrays, g, places, window, sinks)
    expected = _with_gradients("reference", arrays, g, places, window, sinks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), found, expected)


@pytest.mark.parametrize("name", ["pallas", "splash"])
def test_bfloat16_is_as_near_as_its_rounding(small_blocks, name):
    arrays, g, places = _arrays(_TOKENS, dtype=jnp.bfloat16)
    found = _with_gradients(name, arrays, g, places, sinks=True)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, g))
    expected = _with_gradients("reference", *wide, places, sinks=True)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(a - b).max()) < 0.02 * float(jnp.abs(b).max())


def test_a_queries_part_of_a_row_sees_the_keys_of_the_whole_row(small_blocks):
    arrays, _, places = _arrays(_TOKENS, prefix=True)
    whole = _with_gradients("reference", arrays, jnp.zeros(()), places)[0] if False else None
    del whole
    (q, k, v, _), part = arrays, slice(130, 230)
    queries = jax.tree.map(lambda x: x[:, part], places)
    found = pallas.run(q[:, part], k, v, queries, places, scale=0.2, window=40)
    expected = OPERATION.named("reference").run(q, k, v, places, places, scale=0.2, window=40)
    real = (queries.segments > 0)[:, :, None, None]
    np.testing.assert_allclose(
        jnp.where(real, found, 0), jnp.where(real, expected[:, part], 0), atol=1e-5
    )
