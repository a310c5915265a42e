"""Grouped matmul's TPU kernels in Pallas's interpreter, against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels.grouped_matmul import megablox, pallas, reference

IMPLEMENTATIONS = {"pallas": pallas, "megablox": megablox}
M, D, F, E = 200, 200, 150, 6  # no multiples of any block

SIZES = {
    "even": (34, 33, 33, 34, 33, 33),
    "skewed, some empty": (0, 0, 190, 0, 9, 1),
    "aligned to blocks": (32, 64, 0, 0, 64, 40),
    "rows left over": (7, 0, 30, 3, 0, 0),
    "none": (0,) * 6,
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_and_gradients_equal_the_loops(monkeypatch, name):
    module = IMPLEMENTATIONS[name]
    monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(module, "_SIDE", 128)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (M, D))
    weights = jax.random.normal(keys[1], (E, D, F)) / D**0.5
    g = jax.random.normal(keys[2], (M, F)) / F**0.5

    def run(multiply):
        def both(sizes):
            y, pull = jax.vjp(lambda x, weights: multiply(x, weights, sizes), x, weights)
            return y, *pull(g)

        return jax.jit(both)

    own, plain = run(module.run), run(reference.run)
    for case, sizes in SIZES.items():
        sizes = jnp.asarray(sizes, jnp.int32)
        y, dx, dw = own(sizes)
        for found, expected in zip((y, dx, dw), plain(sizes), strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=case)
        assert (np.asarray(dw)[np.asarray(sizes) == 0] == 0).all(), case
        assert (np.asarray(y)[int(sizes.sum()) :] == 0).all(), case
        assert (np.asarray(dx)[int(sizes.sum()) :] == 0).all(), case


def test_what_is_not_a_number_stays_in_its_group(monkeypatch):
    monkeypatch.setattr(pallas, "_ROWS", 32)
    x, g = jnp.ones((96, 8)).at[50].set(jnp.nan), jnp.ones((96, 8)).at[95].set(jnp.nan)
    found = pallas.gradient_of_weights(x, g, jnp.asarray([40, 30, 20]))
    np.testing.assert_array_equal(jnp.isnan(found).any((1, 2)), [False, True, False])
