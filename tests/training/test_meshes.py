"""Every mesh axis, alone and together: a sharded run equals the run on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models
from rljax.batch import Batch
from rljax.config import OptimizerSettings
from rljax.sampling import Engine, SamplingParams
from rljax.training import state as states
from rljax.training.optimizer import make_optimizer
from rljax.training.update import UpdateOptions, make_update

# Float32 sums in another order: what one device gives, within these shares of the largest value.
GRADIENTS, LOGP = 2e-5, 1e-5

V, B, T, G, E, K = 24, 8, 12, 4, 8, 2
ATTENTION = models.Attention(num_heads=4, num_kv_heads=2, head_dim=4, qk_norm="head")
MIXTURE = models.Experts(
    num_experts=E,
    top_k=K,
    intermediate_size=8,
    router=models.Router(bias=True),
    bias=True,
    shared_size=4,
)
# A dense layer, then a mixture; recomputed backwards.
CONFIG = models.ModelConfig(
    V,
    16,
    tuple(models.Stack((models.Block(ATTENTION, f),), 1) for f in (models.Dense(24), MIXTURE)),
    remat="layer",
)
# For stages: two share two of the layers, and one is left over.
DENSE, MIXTURES = CONFIG.stacks
DEEP = dataclasses.replace(CONFIG, stacks=(dataclasses.replace(MIXTURES, repeats=3),))
# Each axis alone, and together; with other ways of the same step by the way, such as moments that
# wait in the host's memory.
MESHES = {
    "data=2": {},
    "fsdp=4": {},
    "expert=4": {},
    "tensor=2": {},
    "context=2": {},
    "fsdp=2,expert=2": {"expert_dispatch": "all_to_all"},
    "fsdp=2,tensor=2": {"parts": 2, "on_host": True},
    "expert=2,tensor=2": {},
    "fsdp=2,context=2": {},
    "data=2,fsdp=2,expert=2": {},
    "stage=2,fsdp=2": {},
    "stage=2,expert=2": {"parts": 2},
    "stage=2,fsdp=2,tensor=2": {"pipeline_rows": 2},
}


# Over more axes while sampling than while training.
WIDE = {
    "fsdp=2,expert=2": {"experts": ("fsdp", "expert"), "expert_dispatch": "all_to_all"},
    "fsdp=2,context=2": {"experts": ("fsdp", "context")},
    "data=2,fsdp=2,expert=2": {"experts": ("expert", "data", "fsdp")},
}


def make_mesh(flag):
    sizes = {name: int(size) for name, size in (part.split("=") for part in flag.split(","))}
    return meshes.make(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


def make_batch(layers):
    """Skewed routing: most tokens go to experts 0 and 1, and nobody to expert 6."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, B)
    mask = (np.arange(T) >= 4) & (np.arange(T) < 4 + lengths[:, None])
    skewed = rng.random((B, T, layers, 1)) < 0.8
    others = rng.permuted(np.tile([0, 2, 3, 4, 5, 7], (B, T, layers, 1)), axis=-1)[..., :K]
    return Batch(
        tokens=rng.integers(2, V, (B, T)).astype(np.int32),
        mask=mask,
        segments=(np.arange(T) < 4 + lengths[:, None]).astype(np.int32),
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        group=np.repeat(np.arange(B // G, dtype=np.int32), G),
        rewards=rng.random(B).astype(np.float32),
        rollout_logp=np.where(mask, rng.normal(-2.5, 0.3, (B, T)), 0).astype(np.float32),
        old_logp=np.where(mask, rng.normal(-2.5, 0.3, (B, T)), 0).astype(np.float32),
        routing=np.where(skewed, np.arange(K), others).astype(np.int32),
    )


@functools.cache
def make_weights(config):
    rng = np.random.default_rng(0)

    def leaf(p):
        noise = rng.standard_normal(p.shape).astype(np.float32)
        return p.value + 0.2 * noise if p.scale is None else p.scale * noise

    return jax.tree.map(leaf, models.declare(config))


OBJECTIVE = dataclasses.replace(
    L.gspo(clip_low=0.1, clip_high=0.2), regularisers=(L.entropy_bonus(0.1),)
)


@functools.cache
def make_rows(layers):
    return jax.device_get(jax.jit(OBJECTIVE.prepare)(make_batch(layers))[0])


def train(config, mesh, parts=1, on_host=False, **ways):
    """The state, metrics and router sums after one AdamW step."""
    rows = make_rows(len(config.mixture_layers))
    params = jax.device_put(make_weights(config), models.shardings(config, mesh))
    config = dataclasses.replace(config, **ways)
    settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=1, max_grad_norm=1e9)
    optimizer = make_optimizer(settings, 100)
    state = states.create(params, optimizer, OBJECTIVE, mesh, on_host=on_host)
    options = UpdateOptions(0.8, 8, parts=parts, replay=True, on_host=on_host)
    update = make_update(config, OBJECTIVE, optimizer, options)

    def memories(state):
        return {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}

    kind = {"pinned_host" if on_host else "device"}
    assert memories(state) == kind
    with jax.set_mesh(mesh):
        state, stats, sums = update(state, meshes.shard_rows(rows, mesh))
    assert memories(state) == kind
    return state, L.finish(stats), sums


def sample(mesh, expert_dispatch=None, **rules):
    """Responses of four prompts, two each."""
    config = dataclasses.replace(CONFIG, expert_dispatch=expert_dispatch)
    rules = {**meshes.ROLLOUT_RULES, **rules}
    engine = Engine(config, mesh, slots=8, page_size=4, max_length=16, chunk=4, rules=rules)
    params = jax.device_put(make_weights(config), models.shardings(config, mesh))
    engine.load(params, version=0)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, V, n).astype(np.int32) for n in (3, 5, 4, 7)]
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(2, 3))
    groups = list(engine.generate(prompts, 2, sampling, seed=3))
    return sorted((r for g in groups for r in g), key=lambda r: (r.prompt_index, r.sample_index))


@functools.cache
def train_alone(config):
    return train(config, meshes.make(devices=jax.devices()[:1]))


@functools.cache
def sample_alone():
    return sample(meshes.make(devices=jax.devices()[:1]))


@pytest.mark.parametrize("flag", MESHES)
def test_training_equals_one_device(flag):
    config = DEEP if "stage" in flag else CONFIG
    state, numbers, sums = train_alone(config)
    got, found, router = train(config, make_mesh(flag), **MESHES[flag])
    assert numbers.keys() == found.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(router.load, sums.load)
    # The first moment is a tenth of the gradient.
    gradients, expected = (jax.device_get(s.opt_state[1][0].mu) for s in (got, state))
    for (path, a), b, p, q in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        *(jax.tree.leaves(t) for t in (expected, got.params, state.params)),
        strict=True,
    ):
        a, b = np.asarray(a), np.asarray(b)
        name = models.path_name(path)
        assert np.abs(a - b).max() <= GRADIENTS * max(np.abs(b).max(), 1e-4), name
        # Adam's first step divides a gradient by its own size: rounding decides where it is tiny.
        clear = np.abs(b) > 1e-3 * np.abs(b).max()
        np.testing.assert_allclose(np.asarray(p)[clear], np.asarray(q)[clear], atol=2e-4)
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        assert not np.any(gradients["stacks"][-1][0]["feed_forward"][name][:, 6])


@pytest.mark.parametrize("flag", [*MESHES, "stage=2"])
def test_sampling_equals_one_device(flag):
    expected, found = sample_alone(), sample(make_mesh(flag), **WIDE.get(flag, {}))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.logp, want.logp, atol=LOGP)


def test_circular_repeats_equal_one_device():
    """A dense layer, which no stage has a share of, then mixtures: two pieces a stage, one over."""
    config = dataclasses.replace(
        CONFIG,
        stacks=(DENSE, dataclasses.replace(MIXTURES, repeats=5)),
        pipeline_repeats=2,
        remat="none",
    )
    batch, given = make_batch(5), np.random.default_rng(2).random((2, B, T)).astype(np.float32)
    # Its last rows choose for themselves.
    routing = np.where(np.arange(B)[:, None, None, None] < 6, batch.routing, -1)
    load = models.routed_load(batch.routing, E)

    def loss(params, rows):
        tokens, positions, segments, routing, given = rows
        logp, entropy, router = models.score_tokens(
            params, config, models.Inputs(tokens, positions, segments, routing=routing), load=load
        )
        value = given[:, 0] * logp + given[:, 1] * router.auxiliary
        return jnp.sum(value), (entropy, router)

    def run(mesh):
        rows = (batch.tokens, batch.positions, batch.segments, routing, given.swapaxes(0, 1))
        params = jax.device_put(make_weights(config), models.shardings(config, mesh))
        with jax.set_mesh(mesh):
            found = jax.jit(jax.value_and_grad(loss, has_aux=True))(
                params, meshes.shard_rows(rows, mesh)
            )
        return jax.device_get(found)

    expected, got = run(meshes.make(devices=jax.devices()[:1])), run(make_mesh("stage=2"))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.abs(a - b).max() <= GRADIENTS * max(np.abs(b).max(), 1e-4), name
