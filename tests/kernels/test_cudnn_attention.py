"""Attention by cuDNN: what it is asked to compute is what the reference computes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from rljax_kernels.attention import OPERATION, Asked, cudnn, reference, whole_rows

ASKED = Asked("bfloat16", 2, 64, 64, 4, 2, 64, 64, packed=False)


@pytest.mark.parametrize("window", [None, 5])
def test_what_jax_is_asked_for_is_what_the_reference_computes(window):
    rng = np.random.default_rng(0)
    lengths = jnp.array([[24], [17]])
    index = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (2, 24))
    tokens = whole_rows(index, (index < lengths).astype(jnp.int32))
    q, k, v, g = (jnp.asarray(rng.normal(size=(2, 24, h, 8)), jnp.float32) for h in (4, 2, 2, 4))
    g = jnp.where(tokens.segments[..., None, None] > 0, g, 0)

    def compute(run, **options):
        def loss(*arrays):
            out = run(*arrays, tokens, tokens, scale=0.3, window=window, **options)
            return jnp.sum(out * g), jnp.where(g == 0, 0, out)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    got = compute(cudnn.run, implementation="xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(compute(reference.run)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_it_lowers_to_cudnns_calls(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct((2, 64, h, 64), jnp.bfloat16) for h in (4, 2))
    place = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def loss(q, k, v, positions, segments):
        tokens = whole_rows(positions, segments)
        return jnp.sum(cudnn.run(q, k, v, tokens, tokens, scale=0.3, window=5).astype(jnp.float32))

    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    exported = jax.export.export(
        jax.jit(jax.grad(loss, (0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in names],
    )(q, k, k, place, place)
    text = str(exported.mlir_module())
    assert re.findall(r"custom_call @(\S+?)\(", text) == list(names)
    assert len(re.findall(r"mask_type\\22: \\22PADDING_CAUSAL\\22", text)) == 2
    assert len(re.findall(r"sliding_window_length\\22: 5,", text)) == 2
    assert "64x64xf32" not in text, "there are no scores or masks"


def test_it_comes_first_where_rows_hold_one_sequence_each():
    assert OPERATION.choose("auto", ASKED, "gpu").name == "cudnn"


@pytest.mark.parametrize(
    "change",
    [
        {"packed": True},
        {"prefix": True},
        {"sinks": True},
        {"dtype": "float32"},
        {"keys": 128},
        {"value_dim": 32},
        {"head_dim": 320, "value_dim": 320},
        {"head_dim": 60, "value_dim": 60},
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_refused(change):
    other = dataclasses.replace(ASKED, **change)
    with pytest.raises(ValueError, match="attention by 'cudnn': "):
        OPERATION.choose("cudnn", other, "gpu")
    assert OPERATION.choose("auto", other, "gpu").name != "cudnn"
