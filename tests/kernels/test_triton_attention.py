"""Attention's Triton kernels equal the reference in Triton's interpreter, and compile for GPUs."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rljax_kernels import triton_tools
from rljax_kernels.attention import (
    OPERATION,
    Asked,
    Tokens,
    blocked,
    reference,
    ring,
    triton,
    triton_blocks,
)

pytestmark = pytest.mark.targets
for package in ("triton", "torch"):
    pytest.importorskip(package, reason="Triton kernels run in its interpreter, which needs torch")
if triton_tools.missing():
    pytest.skip(triton_tools.missing(), allow_module_level=True)

from tests.kernels import interpreter  # noqa: E402

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of two rows of packed sequences of uneven lengths, with padding at the end."""

    dtype: str = "float32"
    heads: tuple[int, int] = (2, 1)
    widths: tuple[int, int] = (16, 16)
    window: int | None = None
    sinks: bool = False
    prefix: bool = False
    blocks: tuple[int, int] = (16, 16)
    length: int = 40
    numbers: tuple[int, ...] = (1, 2, 3)  # of the segments, in their order

    def tokens(self):
        first, rest = self.length // 3, self.length - self.length // 3 - 3
        lengths = ((first, rest // 2, rest - rest // 2), (self.length // 2, self.length // 4))
        segments = np.zeros((2, self.length), np.int32)
        positions, prefix = np.zeros_like(segments), np.zeros_like(segments)
        for row, of_row in enumerate(lengths):
            for n, (end, length) in enumerate(zip(np.cumsum(of_row), of_row, strict=True)):
                at = slice(end - length, end)
                segments[row, at], positions[row, at] = self.numbers[n], np.arange(length)
                if self.prefix and n > 0:
                    prefix[row, at] = self.numbers[0]
                    positions[row, at] += of_row[0]
        index = np.broadcast_to(np.arange(self.length, dtype=np.int32), segments.shape)
        arrays = (index, positions, segments, prefix if self.prefix else None)
        return Tokens(*(None if a is None else jnp.asarray(a) for a in arrays))

    def arrays(self):
        """Queries, keys, values and the sinks, if there are any; and the output's gradient."""
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape), self.dtype)

        (heads, kv_heads), (d, dv) = self.heads, self.widths
        q = draw(2, self.length, heads, d)
        k, v = (draw(2, self.length, kv_heads, width) for width in (d, dv))
        sinks = [draw(heads).astype(jnp.float32)] if self.sinks else []
        g = draw(2, self.length, heads, dv).astype(jnp.float32)
        return [q, k, v, *sinks], jnp.where(self.tokens().segments[..., None, None] > 0, g, 0)


def cut_into(sizes, monkeypatch):
    blocks = triton_blocks.Blocks(*sizes, warps=4, stages=1)
    monkeypatch.setattr(triton_blocks, "block_sizes", lambda *_: blocks)


def values_and_gradients(run, case, dtype=None):
    """Output and the gradients of all arrays, by one implementation."""
    arrays, g = case.arrays()
    tokens = case.tokens()

    def loss(q, k, v, sinks=None):
        options = {"scale": q.shape[-1] ** -0.5, "window": case.window, "sinks": sinks}
        out = run(q, k, v, tokens, tokens, **options)
        return jnp.sum(out.astype(jnp.float32) * g), out

    if dtype is not None:
        arrays = [a.astype(dtype) for a in arrays]
    every = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*arrays)
    real = tokens.segments[..., None, None] > 0
    return jnp.where(real, out, 0), out, *grads


CASES = {
    "all": Case(window=9, sinks=True, prefix=True),
    "float16": Case("float16", window=5),
    "parts of groups": Case(heads=(6, 1), length=20, sinks=True),
    "one block": Case(blocks=(64, 64), prefix=True),
    "wide blocks of queries": Case(blocks=(32, 16), length=70, window=20, numbers=(2, 9, 1)),
    "wide blocks of keys": Case(blocks=(16, 32), length=70, prefix=True, numbers=(7, 3, 5)),
    "values of another width": Case(widths=(48, 24)),
    "narrow heads": Case(widths=(8, 8), sinks=True),
    "latent": Case("bfloat16", heads=(2, 2), widths=(24, 16), prefix=True),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_references(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(
        triton_blocks, "block_sizes", lambda *_: triton_blocks.Blocks(*case.blocks, 4, 1)
    )
    with interpreter.interpreting():
        got, whole, *grads = values_and_gradients(triton.run, case)
    want, _, *want_grads = values_and_gradients(reference.run, case, jnp.float32)
    padding = case.tokens().segments == 0
    assert not np.any(np.asarray(whole, np.float32)[padding]), "padding gets zeros"
    assert whole.dtype == jnp.dtype(case.dtype)
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        bound = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}[case.dtype]
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=bound, atol=bound * np.abs(b).max()
        )


def test_blocks_that_no_query_sees_are_left_out(monkeypatch):
    cut_into((16, 16), monkeypatch)
    segments = jnp.repeat(jnp.array([[1, 2, 2, 3]], jnp.int32), 16, axis=1)
    index = jnp.arange(64, dtype=jnp.int32)[None]
    tokens = Tokens(index, index, segments, jnp.where(segments == 3, 1, 0))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, 1, 16)), jnp.float32) for _ in range(3))
    broken = (segments == 2)[..., None, None]
    k, v = (jnp.where(broken, jnp.nan, x) for x in (k, v))

    def loss(q, k, v):
        out = triton.run(q, k, v, tokens, tokens, scale=0.25)
        return jnp.sum(jnp.where(broken, 0, out) ** 2), out

    with interpreter.interpreting():
        (_, out), (dq, *_) = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    for x in (out, dq):
        assert np.isfinite(np.asarray(x)[~np.asarray(broken)[..., 0, 0]]).all()
        assert np.isnan(np.asarray(x)[np.asarray(broken)[..., 0, 0]]).all()


def test_rows_split_over_devices_are_those_of_one(monkeypatch):
    cut_into((16, 16), monkeypatch)
    case = Case(sinks=True, length=32)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = ring.Parts(triton.forward, triton.backward)

    def split(q, k, v, queries, keys, *, scale, window, sinks):
        def local(q, k, v, tokens, sinks):
            sinks = jax.lax.pcast(sinks, ("context",), to="varying")
            options = {"scale": scale, "window": window, "sinks": sinks}
            return ring.run(q, k, v, tokens, tokens, axis="context", parts=parts, **options)

        rows = P(None, "context")
        run = jax.shard_map(local, mesh=mesh, in_specs=(*(rows,) * 4, P()), out_specs=rows)
        return run(q, k, v, queries, sinks)

    with jax.set_mesh(mesh), interpreter.interpreting():
        got = values_and_gradients(split, case)
    want = values_and_gradients(reference.run, case)
    for a, b in zip(got[:1] + got[2:], want[:1] + want[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_recomputation_that_keeps_the_output_calls_no_forward_kernel():
    case = Case(length=16)
    arrays, _ = case.arrays()
    tokens = case.tokens()

    def loss(*arrays):
        return jnp.sum(triton.run(*arrays, tokens, tokens, scale=0.25))

    def kernels(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(*arrays))
        return text.count("name=forward\n"), text.count("name=queries_gradient\n")

    assert kernels(blocked.OUT, blocked.LSE) == (1, 1)
    assert kernels(blocked.OUT) == (2, 1)


def test_what_the_kernels_do_not_compute_is_refused():
    asked = Asked("bfloat16", 1, 64, 64, 4, 2, 64, 64, window=8, sinks=True, prefix=True)
    assert OPERATION.choose("auto", asked, "gpu").name == "triton"
    for change, why in (({"dtype": "float64"}, "float64"), ({"head_dim": 576}, "576")):
        other = dataclasses.replace(asked, **change)
        with pytest.raises(ValueError, match=why):
            OPERATION.choose("triton", other, "gpu")
        assert OPERATION.choose("auto", other, "gpu").name != "triton"
    with pytest.raises(ValueError, match="for gpu, not for cpu"):
        OPERATION.choose("triton", asked, "cpu")


def example(name, dtype="bfloat16"):
    return next(e for e in triton.examples() if e.name == name and e.arguments[0].dtype == dtype)


@pytest.mark.parametrize(
    "name",
    ["attention 64", "attention 128", "attention 128, prefix", "attention 192/128"],
)
def test_kernels_compile_for_hopper_with_next_to_no_spills(name):
    compiled = triton_tools.report([example(name)])
    assert [c.name.split(": ")[1] for c in compiled] == [
        "forward",
        "queries_gradient",
        "keys_gradient",
    ]
    for c in compiled:
        assert c.spills <= 8, triton_tools.table(compiled)
        assert 0 < c.registers <= 255
        assert 0 < c.shared_memory <= SHARED_MEMORY


def test_kernels_compile_for_gpus_with_little_shared_memory():
    compiled = triton_tools.report([example("attention 192/128")], capability=89)
    assert max(c.shared_memory for c in compiled) <= 99 * 1024
    assert max(c.spills for c in compiled) <= 64


def test_gradients_are_exported_for_cuda_without_a_gpu():
    found = example("attention 64")
    exported = triton_tools.export(found.function, *found.arguments)
    assert exported.platforms == ("cuda",)
    calls = str(exported.mlir_module()).count("custom_call @triton_kernel_call")
    assert calls == 3
    assert [a.shape for a in exported.out_avals] == [(), *(a.shape for a in found.arguments[:3])]


def test_arguments_of_kernels_come_in_the_order_of_launches():
    case = Case(length=16)
    arrays, _ = case.arrays()
    tokens = case.tokens()
    run = functools.partial(triton.run, queries=tokens, keys=tokens, scale=0.25)
    gradient = jax.grad(lambda *arrays: jnp.sum(run(*arrays)), (0, 1, 2))
    found = triton_tools.launches(gradient, *arrays)
    assert len(found) == 3
    for launch, given in found:
        names = list(inspect.signature(launch.kernel.function().fn).parameters)
        taken = len(given) + len(launch.outputs)
        assert set(names[taken:]) == set(launch.constants)
