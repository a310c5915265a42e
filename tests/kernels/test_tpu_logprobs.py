"""Log-probabilities' TPU kernels in Pallas's interpreter, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels import logprobs
from rljax_kernels.logprobs import Asked, Options, pallas_tpu, reference

TOKENS, WIDTH = 200, 128


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, and backwards several slices of which the last is shorter."""
    monkeypatch.setattr(pallas_tpu, "_MOST", 128)
    monkeypatch.setattr(pallas_tpu, "_SLICE", 128 * TOKENS)


@pytest.mark.parametrize(
    ("tied", "size", "num_tokens", "picked", "first"),
    [(False, 300, None, 1, 0), (False, 384, 350, 3, 0), (True, 300, 510, 2, 256)],
)
def test_values_and_gradients_equal_the_references(tied, size, num_tokens, picked, first):
    keys = jax.random.split(jax.random.key(0), 6)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH))
    matrix = jax.random.normal(keys[1], (size, WIDTH) if tied else (WIDTH, size)) * 0.2
    stop = first + size if num_tokens is None else num_tokens
    ids = jax.random.randint(keys[2], (TOKENS, picked), first, stop).at[3, 0].set(-1)
    shapes = ((TOKENS, picked), (TOKENS,), (TOKENS,))
    g = logprobs.Statistics(
        *(jax.random.normal(k, s) for k, s in zip(keys[3:], shapes, strict=True))
    )
    options = Options(tied, num_tokens, TOKENS)

    def both(module):
        @jax.jit
        def run(hidden, matrix):
            def found(hidden, matrix):
                return module.run(hidden, matrix, ids, jnp.float32(0.7), jnp.int32(first), options)

            found, pull = jax.vjp(found, hidden, matrix)
            return found, pull(g)

        return run(hidden, matrix)

    found, expected = both(pallas_tpu), both(reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 5e-5), found, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16 and float32, not in float16"),
        ({"picked": 65}, "up to 8 ids a token, not 65"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_reason(change, reason):
    asked = {"dtype": "bfloat16", "tokens": 8, "hidden_size": 128, "vocab_size": 1000}
    assert logprobs.OPERATION.choose("auto", Asked(**asked), "tpu").name == "pallas"
    with pytest.raises(ValueError, match=reason):
        logprobs.OPERATION.choose("pallas", Asked(**{**asked, **change}), "tpu")
