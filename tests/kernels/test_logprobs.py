"""Every implementation of log-probabilities against the reference, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rljax_kernels import logprobs
from rljax_kernels.logprobs import Statistics, triton

from tests.kernels.implementations import able, others

N, D, V = 37, 32, 75

# Tied or not, ids of each token, ids that have a token, the first id of the slice.
CASES = {
    "plain": (False, 1, None, 0),
    "tied": (True, 1, None, 0),
    "padded vocabulary": (False, 1, 70, 0),
    "tied, a slice without all tokens": (True, 1, 90, 60),
    "a slice without any token": (False, 1, 30, 60),
    "support": (False, 3, None, 0),
    "support, tied, a slice": (True, 3, 100, 50),
}


def arrays(dtype, tied, picks, first):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(N, D)), dtype)
    matrix = jnp.asarray(rng.normal(size=(V, D) if tied else (D, V)) / 3, jnp.float32)
    ids = rng.integers(0, V + 20, (N, picks))
    ids[3, -1] = -1
    cotangent = Statistics(
        *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((N, picks), (N,), (N,)))
    )
    return hidden, matrix, jnp.asarray(ids, jnp.int32), cotangent


def value_and_gradients(backend, case, dtype, chunk=16):
    tied, picks, num_tokens, first = CASES[case]
    hidden, matrix, ids, cotangent = arrays(dtype, tied, picks, first)

    @jax.jit
    def run(hidden, matrix, cotangent):
        def f(hidden, matrix):
            return logprobs.statistics_of(
                hidden,
                matrix,
                ids,
                temperature=0.7,
                first=first,
                tied=tied,
                num_tokens=num_tokens,
                chunk=chunk,
                backend=backend,
            )

        found, pull = jax.vjp(f, hidden, matrix)
        # Of a slice without any token merging gives these no weight.
        weight = 0.0 if num_tokens is not None and num_tokens <= first else 1.0
        g = cotangent.replace(lse=cotangent.lse * weight, mean=cotangent.mean * weight)
        return found, *pull(g)

    return jax.tree.map(np.asarray, run(hidden, matrix, cotangent))


def assert_close(got, want, dtype):
    values, gradients = (1e-5, 2e-5) if dtype == jnp.float32 else (2e-3, 2e-2)
    for name in ("picked", "lse", "mean"):
        x, y = getattr(got[0], name), getattr(want[0], name)
        np.testing.assert_allclose(x, y, rtol=values, atol=values, err_msg=name)
    for name, x, y in zip(("hidden", "matrix"), got[1:], want[1:], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = x.astype(np.float32), y.astype(np.float32)
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, atol=gradients * scale, err_msg=f"gradient of {name}")


def asked(case, dtype):
    tied, picks, num_tokens, _ = CASES[case]
    return logprobs.Asked(jnp.dtype(dtype).name, N, D, V, picks, tied, num_tokens)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles, parts of the vocabulary, and slices of its gradients, the last one smaller."""
    monkeypatch.setattr(triton, "_cut", lambda dtype: triton.Blocks(16, 16, 16, 4, 1))
    monkeypatch.setattr(triton, "PROGRAMS", 6)
    monkeypatch.setattr(triton, "SLICE_BYTES", 0)
    monkeypatch.setattr(triton, "LEAST_SLICE", 32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", others(logprobs.OPERATION))
def test_equals_the_reference_in_values_and_gradients(small_blocks, backend, dtype, case):
    with able(logprobs.OPERATION, backend, asked(case, dtype)):
        got = value_and_gradients(backend, case, dtype)
    assert_close(got, value_and_gradients("reference", case, dtype), dtype)


def test_logp_and_entropy_are_those_of_the_softmax():
    hidden, matrix, ids, _ = arrays(jnp.float32, False, 1, 0)
    targets = ids[:, 0] % V
    got = logprobs.logprobs(hidden, matrix, targets, temperature=2.0, chunk=8)
    each = jax.nn.log_softmax(jnp.matmul(hidden, matrix) / 2.0, axis=-1)
    np.testing.assert_allclose(got[0], each[jnp.arange(N), targets], atol=1e-5)
    np.testing.assert_allclose(got[1], -(jnp.exp(each) * each).sum(1), atol=1e-5)


def of_slices(slices, hidden, matrix, targets, cotangent):
    """logp, entropy and gradients, the vocabulary split over devices."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((slices,), ("tensor",), auto, devices=jax.devices()[:slices])

    def local(hidden, matrix):
        hidden = jax.lax.pcast(hidden, "tensor", to="varying")
        first = jax.lax.axis_index("tensor") * matrix.shape[1]
        found = logprobs.statistics_of(
            hidden, matrix, targets, first=first, num_tokens=40, chunk=16
        )
        found = logprobs.merged(found, "tensor")
        return found.picked[:, 0] - found.lse, found.lse - found.mean

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=(P(), P())
    )

    @jax.jit
    def run(hidden, matrix):
        found, pull = jax.vjp(mapped, hidden, matrix)
        return found, pull((cotangent.lse, cotangent.mean))

    return run(hidden, matrix)


def test_slices_of_a_vocabulary_come_to_the_whole():
    """One of the four has no token at all."""
    hidden, _, ids, cotangent = arrays(jnp.float32, False, 1, 0)
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=(D, 64)) / 3, jnp.float32)
    targets = ids % 40

    def whole(hidden, matrix):
        return logprobs.logprobs(hidden, matrix, targets[:, 0], num_tokens=40, backend="reference")

    want, pull = jax.vjp(whole, hidden, matrix)
    got = of_slices(4, hidden, matrix, targets, cotangent)
    want = want, pull((cotangent.lse, cotangent.mean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, want)


def test_refusals():
    with pytest.raises(ValueError, match=r"a matrix \[D, V\] with D=4, got \(6, 4\); check tied"):
        logprobs.logprobs(jnp.ones((3, 4)), jnp.ones((6, 4)), jnp.zeros(3, jnp.int32))
