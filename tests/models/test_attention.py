"""Attention: what a query sees, and what must not leak into it."""

import dataclasses
import logging
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rljax_kernels.attention import OPERATION, Asked

from rljax import errors, mesh, models
from rljax.models import attention
from rljax.settings import MeshSettings


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_attention_keeps_what_is_not_finite_where_it_is(backend):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 6, h, 4)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    attend = attention.full_attention(jnp.arange(6)[None], segments, backend=backend)

    @jax.jit
    def step(q, k, v):
        def f(q, k, v):
            out = attend(q, k, v, jnp.int32(0), None, scale=0.5)[0]
            # A cotangent that is not finite, as of the loss of a broken sequence.
            return jnp.sum(out[:, :2] ** 2) + jnp.sum(out[:, 2:]), out

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(q, k, v)

    (_, want), want_gradients = step(q, k, v)
    for i in range(3):
        parts = [q, k, v]
        parts[i] = parts[i].at[0, 3, 0].set(jnp.nan)
        (_, got), gradients = step(*parts)
        assert np.array_equal(got[:, [0, 1, 2, 5]], want[:, [0, 1, 2, 5]])
        assert np.isnan(got[0, 3]).any()
        assert np.isnan(got[0, 4]).any() == (i > 0)  # a later query of the same sequence
        for g, w in zip(gradients, want_gradients, strict=True):
            assert np.array_equal(g[:, :2], w[:, :2])


def test_attention_without_rotation_does_not_know_distances(random_params):
    attend = models.Attention(2, 2, 4, rope_theta=None)
    block = models.Block(attend, models.Dense(8))
    config = models.ModelConfig(7, 8, (models.Stack((block,), 1),))
    params, tokens = random_params(config), jnp.asarray([[1, 2, 3, 4]])
    logits = jax.jit(lambda positions: models.logits(params, config, tokens, positions))
    near, far = logits(jnp.asarray([[0, 1, 2, 3]])), logits(jnp.asarray([[0, 10, 20, 90]]))
    np.testing.assert_array_equal(near, far)


def rows(tokens=32):
    """Two rows: a prompt with responses, and packed sequences; padding at their ends."""
    segments, prefix = np.zeros((2, 2, tokens), np.int32)
    segments[0] = np.repeat([1, 2, 3, 0], [6, 12, 10, 4])
    prefix[0] = np.where(segments[0] > 1, 1, 0)
    segments[1] = np.repeat([1, 2, 3, 0], [15, 3, 13, 1])
    positions = np.broadcast_to(np.arange(tokens), (2, tokens))
    return tuple(map(jnp.asarray, (positions, segments, prefix)))


def arrays(kv_heads=2, tokens=32):
    rng = np.random.default_rng(0)
    shapes = [(2, tokens, h, d) for h, d in ((4, 8), (kv_heads, 8), (kv_heads, 6), (4, 6))]
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def attend_with_gradients(given, sinks, window=None, backend="auto"):
    places = rows()
    *inputs, g = given
    real = (places[1] > 0)[..., None, None]

    @jax.jit
    def step(q, k, v, sinks):
        def f(q, k, v, sinks):
            attend = attention.full_attention(*places, backend=backend)
            out, _ = attend(q, k, v, 0, None, scale=0.3, window=window, sinks=sinks)
            return jnp.where(real, out, 0)

        out, pull = jax.vjp(f, q, k, v, sinks)
        return out, *pull(g)

    return step(*inputs, sinks)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "sizes,kv_heads", [({"context": 4}, 2), ({"fsdp": 2, "context": 2, "tensor": 2}, 1)]
)
def test_rows_split_over_devices_equal_one_device(sizes, kv_heads, window, backend):
    given, sinks = arrays(kv_heads), jnp.linspace(-1, 1, 4)
    want = attend_with_gradients(given, sinks, window, "reference")
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    with jax.set_mesh(mesh.make(devices=devices, **sizes)):
        found = attend_with_gradients(given, sinks, window, backend)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("place,spoilt", [((0, 4), [*range(4, 28)]), ((0, 9), [*range(9, 18)])])
def test_a_prompt_that_is_not_finite_spoils_its_responses_and_they_only_themselves(
    place, spoilt, split
):
    given = arrays()
    want, *_ = attend_with_gradients(given, None)
    given[1] = given[1].at[*place, 0, 0].set(jnp.inf)
    sizes = {"context": 4} if split else {}
    with jax.set_mesh(mesh.make(devices=jax.devices()[: 4 if split else 1], **sizes)):
        found, *gradients = attend_with_gradients(given, None)
    broken = np.isnan(found).any((2, 3))
    assert np.flatnonzero(broken[0]).tolist() == spoilt and not broken[1].any()
    np.testing.assert_allclose(found[~broken], want[~broken], atol=2e-6)
    assert all(np.isfinite(g).all() for g in gradients[:3])


def test_no_device_ever_holds_all_keys():
    given = arrays()
    with jax.set_mesh(mesh.make(devices=jax.devices()[:4], context=4)):
        text = jax.jit(attend_with_gradients).lower(given, None).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text


def test_a_backend_that_cannot_be_used_is_refused_in_one_line():
    with pytest.raises(errors.InputError, match="attention_backend='flash' is unknown; use one of"):
        models.ModelConfig(7, 8, (), attention_backend="flash")
    for_tpu = "attention_backend='.*': attention by '.*': it is for tpu, not for cpu"
    tpu = [i for i in OPERATION.implementations if i.platforms == ("tpu",)]
    for implementation in tpu:
        with pytest.raises(errors.InputError, match=for_tpu):
            attend_with_gradients(arrays(), None, backend=implementation.name)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_temporaries_of_a_model_s_gradient_are_linear_in_the_tokens(tokens):
    config = dataclasses.replace(models.PRESETS["speed-s"](), remat=True)

    def loss(params, tokens):
        return models.token_logprobs(params, config, tokens)[0].sum()

    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    step = jax.jit(jax.grad(loss)).lower(models.abstract(config), row).compile()
    temporaries = step.memory_analysis().temp_size_in_bytes
    assert temporaries < 0.5e9 + 0.1e9 * tokens / 1024


def test_the_flag_offers_what_there_is_and_the_choice_is_logged(caplog):
    offered = typing.get_args(typing.get_type_hints(MeshSettings)["attention_backend"])
    assert set(offered) == {"auto", *(i.name for i in OPERATION.implementations)}
    attention._log_choice.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            attention.choose_backend("auto", Asked("float32", 1, 4096, 4096, 8, 4, 64, 64))
    assert [r.message for r in caplog.records] == [
        "attention is computed by backend 'blocked' (attention_backend='auto')"
    ]
