"""One declaration: shapes, initial values, counts and refusals all agree with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rljax import mesh as meshes
from rljax import models
from rljax.models import (
    Attention,
    Block,
    Dense,
    Experts,
    LatentAttention,
    ModelConfig,
    Router,
    Stack,
)
from rljax.models.families.common import stacks
from rljax.monitoring import compilations

CONFIG = models.decoder(
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=16,
    num_experts=4,
    bias=True,
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def params():
    return models.init(jax.random.key(0), CONFIG)


def test_init_has_the_declared_shapes_scales_and_constants(params):
    models.check(params, CONFIG)
    declared = models.declare(CONFIG)
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), params) == jax.tree.map(
        lambda p: (p.shape, "float32"), declared
    )
    firsts = []
    for p, x in zip(jax.tree.leaves(declared), jax.tree.leaves(params), strict=True):
        if p.scale is None:
            assert (x == p.value).all()
        else:
            assert np.std(x) == pytest.approx(p.scale, rel=0.2)
            firsts.append(float(x.ravel()[0]) / p.scale)
    assert len(set(firsts)) == len(firsts)  # no two are drawn alike
    assert models.count(CONFIG) == sum(x.size for x in jax.tree.leaves(params))


def test_init_does_not_depend_on_the_mesh(params):
    mesh = meshes.make(fsdp=4, expert=2)
    placed = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    shardings = models.shardings(CONFIG, mesh)
    for a, b, s in zip(*map(jax.tree.leaves, (params, placed, shardings)), strict=True):
        assert b.sharding.is_equivalent_to(s, b.ndim)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_abstract_and_names(params):
    shapes = models.abstract(CONFIG, jnp.bfloat16)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"bfloat16"}
    mesh = meshes.make(fsdp=8)
    assert models.abstract(CONFIG, mesh=mesh)["embed"].sharding.spec == P(None, "fsdp")
    assert models.names(CONFIG)["stacks"][0][0]["attention"]["q"] == "stacks/0/0/attention/q"


def test_compute_dtype_spares_norms_and_routers(params):
    half = models.cast_for_compute(params, dataclasses.replace(CONFIG, dtype="bfloat16"))
    layer = half["stacks"][0][0]
    assert layer["attention"]["q"].dtype == jnp.bfloat16
    assert layer["feed_forward"]["router"].dtype == layer["attention_norm"].dtype == jnp.float32


def test_check_names_what_does_not_fit(params):
    def spoiled(change):
        p = jax.tree.map(lambda x: x, params)
        change(p)
        return p

    for change, message in [
        (lambda p: p.pop("norm"), r"norm.*has \(16,\), got absent"),
        (lambda p: p.update(extra=p["norm"]), r"extra.*has absent, got \(16,\)"),
        (lambda p: p.update(norm=p["norm"][:8]), r"norm.*has \(16,\), got \(8,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.check(spoiled(change), CONFIG)


def test_active_parameters_are_those_of_the_chosen_experts():
    one = models.decoder(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
        intermediate_size=16, num_experts=2, bias=True, tie_embeddings=False,
    )  # fmt: skip
    routers = 2 * 16 * (4 - 2)
    assert models.count_active(CONFIG) == models.count(one) + routers


def test_shared_experts_and_biases_count_as_active_where_they_are():
    attention = Attention(2, 2, 4, output_bias=True, sinks=True, qk_norm="full")
    plain = Block(Attention(2, 2, 4), Experts(4, 2, 8))
    rich = Block(
        attention,
        Experts(4, 2, 8, Router(bias=True), bias=True, shared_size=6, shared_gated=True),
    )
    sizes = [
        (models.count(c), models.count_active(c))
        for c in (ModelConfig(8, 16, (Stack((block,), 3),)) for block in (plain, rich))
    ]
    every = 16 + 2 + 2 * 8 + 4 + 3 * 16 * 6 + 16  # of attention, the router and the shared expert
    each = 2 * 8 + 16  # biases of one expert
    assert sizes[1][0] - sizes[0][0] == 3 * (every + 4 * each)
    assert sizes[1][1] - sizes[0][1] == 3 * (every + 2 * each)


def test_unequal_layers_are_grouped_into_few_stacks():
    attention = Attention(2, 2, 4)
    a, b = Block(attention, Dense(8)), Block(attention, Experts(4, 2, 8))
    assert stacks([a, a, a]) == (Stack((a,), 3),)
    assert stacks([a, b, a, b]) == (Stack((a, b), 2),)
    assert stacks([a, b, b, b]) == (Stack((a,), 1), Stack((b,), 3))
    assert stacks([a]) == (Stack((a,), 1),)
    for layers in ([a, b, a, b], [a, b, b], [b, a, a]):
        config = ModelConfig(8, 8, stacks(layers))
        assert config.layers == tuple(layers)
        assert config.mixture_layers == tuple(i for i, x in enumerate(layers) if x == b)
        assert (config.top_k, config.num_experts) == (2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(4, 3, 8), "num_heads=4 is not a multiple of num_kv_heads=3"),
        (lambda: Attention(4, 2, 7), "head_dim=7 is odd"),
        (lambda: Attention(4, 2, 8, window=0), "window=0 must be at least 1"),
        (lambda: Experts(4, 2, 8, shared_gated=True), "shared_gated=True needs a shared expert"),
        (lambda: LatentAttention(2, None, 8, 4, 3, 4), "rope_dim=3 is odd"),
        (lambda: LatentAttention(2, 8, 8, 4, 4, 4, scale_weight=1.0), "a stretching by YaRN"),
        (
            lambda: Experts(8, 2, 8, Router(groups=3)),
            "groups=3 must cut num_experts=8 into equal groups",
        ),
        (lambda: Experts(8, 2, 8, Router(groups=8)), "into equal groups of two or more"),
        (
            lambda: Experts(8, 5, 8, Router(groups=2)),
            "top_groups=1 of 2 groups of 4 must hold top_k=5",
        ),
        (lambda: Experts(8, 2, 8, Router(groups=2, top_groups=3)), "be no more than there are"),
        (lambda: Experts(4, 5, 8), "top_k=5 must lie between 1 and num_experts=4"),
        (
            lambda: ModelConfig(8, 8, stacks([
                Block(Attention(2, 2, 4), Experts(4, 1, 8)),
                Block(Attention(2, 2, 4), Experts(4, 2, 8)),
            ])).top_k,
            "mixture layers differ in top_k",
        ),
        (
            lambda: ModelConfig(8, 8, (), dtype="bfloat16", expert_backend="native"),
            "expert_backend='native' computes in float32, got dtype='bfloat16'",
        ),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_models_are_initialised_by_one_program():
    config = models.decoder(
        vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    first = models.init(jax.random.key(0), config)
    models.init_critic(first, config)
    before = compilations.count()
    again = models.init(jax.random.key(1), config)
    models.init_critic(again, config)
    assert compilations.count() == before


def test_decoder_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        models.decoder(
            vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, heads=3
        )
