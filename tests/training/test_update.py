"""The optimizer step: exact under micro-batching and on a mesh; bad gradients are skipped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax import losses as L
from rljax import mesh as meshes
from rljax import models
from rljax.batch import Batch
from rljax.config import OptimizerSettings
from rljax.training import state as states
from rljax.training.microbatches import count_micro_batches
from rljax.training.optimizer import learning_rate, make_optimizer
from rljax.training.scoring import ScoreOptions, make_score
from rljax.training.update import UpdateOptions, make_update

CONFIG = models.decoder(
    vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, num_experts=4
)
SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup_steps=1)
B, T, G = 16, 10, 4


def make_batch():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 7, B)
    mask = (np.arange(T) >= 3) & (np.arange(T) < 3 + lengths[:, None])
    segments = (np.arange(T) < 3 + lengths[:, None]).astype(np.int32)
    return Batch(
        tokens=rng.integers(2, 16, (B, T)).astype(np.int32),
        mask=mask,
        segments=segments,
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        group=np.repeat(np.arange(B // G, dtype=np.int32), G),
        rewards=rng.random(B).astype(np.float32),
        rollout_logp=np.where(mask, rng.normal(-2.5, 0.3, (B, T)), 0).astype(np.float32),
        old_logp=np.where(mask, rng.normal(-2.5, 0.3, (B, T)), 0).astype(np.float32),
        routing=np.full((B, T, 1, 2), -1, np.int32),
    )


def step(objective, mesh, parts=1, batch=None, lora=None, replay=True):
    optimizer = make_optimizer(SETTINGS, 100)
    params, base = models.init(jax.random.key(0), CONFIG, mesh=mesh), None
    if lora is not None:
        params, base = models.init_adapters(jax.random.key(1), CONFIG, lora, mesh), params
    state = states.create(params, optimizer, objective, mesh)
    state = dataclasses.replace(state, base=base)
    options = UpdateOptions(
        temperature=0.8, max_scored_tokens=6, parts=parts, replay=replay, lora=lora
    )
    update = make_update(CONFIG, objective, optimizer, options)
    with jax.set_mesh(mesh):
        rows, _ = objective.prepare(meshes.shard_rows(batch or make_batch(), mesh))
        state, stats, sums = update(state, rows)
    return state, L.finish(stats), sums


def one_device():
    return meshes.make(devices=jax.devices()[:1])


OBJECTIVES = {
    "gspo": L.gspo(clip_low=0.1, clip_high=0.2),
    "dapo": L.dapo(overlong_max=6, overlong_cache=3),
    # Terms that look at the whole optimizer batch first, and one that keeps state.
    "cov": L.Objective(
        L.group_normalize(),
        L.chain(L.token_ratio(), L.policy_gradient()),
        L.token_mean(),
        regularisers=(
            L.kl_cov(fraction=0.2),
            L.clip_cov(fraction=0.2, low=0.0),
            L.adaptive_entropy(target=2.9, initial=0.02),
        ),
    ),
}
# The load is known from the routing that is replayed, or found by a pass over all rows.
for name in ("balanced", "balanced anew"):
    balance = L.router_balance(0.5)
    OBJECTIVES[name] = dataclasses.replace(L.grpo(beta=0.0), regularisers=(balance,))


LORA = models.Lora(rank=2, alpha=4.0)


@pytest.fixture(scope="module", params=[*OBJECTIVES, "adapters"])
def whole(request):
    objective = OBJECTIVES.get(request.param, L.grpo(beta=0.0))
    options = {"lora": LORA} if request.param == "adapters" else {}
    if request.param == "balanced":
        batch = make_batch()
        routing = np.random.default_rng(1).permuted(np.tile(np.arange(4), (B, T, 1, 1)), axis=-1)
        options["batch"] = batch.replace(routing=routing[..., :2].astype(np.int32))
    if request.param == "balanced anew":
        options["replay"] = False
    return (objective, options), step(objective, one_device(), **options)


@pytest.mark.parametrize("devices,parts", [(1, 4), (8, 1), (4, 2)])
def test_micro_batches_and_devices_change_nothing(whole, devices, parts):
    (objective, options), (expected, numbers, sums) = whole
    mesh = one_device()
    if devices > 1:
        mesh = meshes.make(data=2, fsdp=devices // 2, devices=jax.devices()[:devices])
    state, found, router = step(objective, mesh, parts, **options)
    moments, others = state.opt_state[1][0].mu, expected.opt_state[1][0].mu
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), moments, others
    )

    def close(a, b, gradient):
        # Adam's first step divides a gradient by its own size: rounding decides where it is tiny.
        clear = np.abs(gradient) > 1e-5
        np.testing.assert_allclose(np.asarray(a)[clear], np.asarray(b)[clear], atol=1e-5)

    jax.tree.map(close, state.params, expected.params, others)
    assert found.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(router.load, sums.load)
    for name, value in expected.objective.items():
        np.testing.assert_allclose(state.objective[name], value, rtol=1e-6)


def test_adapters_train_alone():
    mesh = one_device()
    before = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    state, _, _ = step(L.grpo(beta=0.0), mesh, lora=LORA)
    jax.tree.map(np.testing.assert_array_equal, state.base, before)
    # From b = 0 the first step moves b alone, by about the learning rate.
    start = models.init_adapters(jax.random.key(1), CONFIG, LORA)
    for name, pair in state.params.items():
        np.testing.assert_array_equal(pair["a"], start[name]["a"])
        assert 0 < np.abs(pair["b"]).max() <= 1.01 * SETTINGS.learning_rate
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert moments < 2.1 * sum(x.size for x in jax.tree.leaves(state.params))


def test_parameters_and_moments_are_split_over_fsdp():
    mesh = meshes.make(fsdp=8)
    params = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    state = states.create(params, make_optimizer(SETTINGS, 100), L.grpo(), mesh)
    moments = state.opt_state[1][0].mu
    for tree in (state.params, moments):
        for leaf in (tree["embed"], tree["stacks"][0][0]["feed_forward"]["gate"]):
            assert leaf.addressable_shards[0].data.size == leaf.size // 8


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    batch = make_batch()
    poisoned = batch.replace(rewards=batch.rewards, old_logp=batch.old_logp * np.nan)
    mesh = one_device()
    before = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    state, _, _ = step(L.grpo(beta=0.0), mesh, batch=poisoned)
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (1, 1, 1)


def test_a_batch_without_a_token_to_train_is_skipped():
    batch = make_batch()
    mesh = one_device()
    before = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    state, numbers, _ = step(L.grpo(beta=0.0), mesh, batch=batch.replace(mask=batch.mask & False))
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert int(state.skipped) == 1
    assert np.isfinite(numbers["policy/grad_norm"])


def test_the_score_pass_equals_the_update_and_does_not_depend_on_its_cut():
    batch, mesh = make_batch(), one_device()
    params = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    found = [make_score(CONFIG, ScoreOptions(0.8, 6, parts))(params, batch) for parts in (1, 4)]
    logp, entropy = models.token_logprobs(
        params, CONFIG, batch.tokens, None, batch.segments, temperature=0.8
    )
    for scores in found:
        np.testing.assert_allclose(scores.logp, jnp.where(batch.mask, logp, 0), atol=1e-5)
        np.testing.assert_allclose(scores.entropy, jnp.where(batch.mask, entropy, 0), atol=1e-5)
    np.testing.assert_array_equal(found[0].router.load, found[1].router.load)


@pytest.mark.parametrize("kind,last", [("constant", 1e-2), ("linear", 1e-3), ("cosine", 1e-3)])
def test_the_rate_rises_without_an_idle_step_and_falls_as_asked(kind, last):
    settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=5, lr_schedule=kind)
    rate = learning_rate(settings, 50)
    np.testing.assert_allclose([rate(i) for i in range(5)], 1e-2 * np.arange(1, 6) / 5, rtol=1e-5)
    np.testing.assert_allclose(rate(50), last, rtol=1e-5)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 responses of an update do not divide"):
        count_micro_batches(10, 4, 0)


def test_micro_batches_hold_at_most_what_is_asked():
    assert count_micro_batches(16, 2, 2) == 4
    assert count_micro_batches(16, 2, 3) == 4  # 3 does not divide the 8 of a device
    assert count_micro_batches(16, 2, 0) == count_micro_batches(16, 2, 99) == 1


def test_correction_biases_follow_the_load():
    mixture = models.Experts(4, 2, 24, models.Router(scoring="sigmoid", correction_bias=True))
    attention = models.Attention(num_heads=2, num_kv_heads=2, head_dim=8)
    blocks = (models.Block(attention, models.Dense(24)), models.Block(attention, mixture))
    config = models.ModelConfig(16, 16, (models.Stack(blocks, 2),), family="deepseek_v3")
    mesh, objective = one_device(), L.grpo(beta=0.0)
    settings = dataclasses.replace(SETTINGS, weight_decay=0.1)
    optimizer = make_optimizer(settings, 100)
    batch = make_batch().replace(routing=None)

    def run(rate):
        params = models.init(jax.random.key(0), config, mesh=mesh)
        params["stacks"][0][1]["feed_forward"]["correction"] += 0.5
        state = states.create(params, optimizer, objective, mesh)
        options = UpdateOptions(1.0, 6, bias_rate=rate)
        update = make_update(config, objective, optimizer, options)
        with jax.set_mesh(mesh):
            state, _, router = update(state, objective.prepare(meshes.shard_rows(batch, mesh))[0])
        layers = state.params["stacks"][0]
        return layers[1]["feed_forward"].pop("correction"), state.params, np.asarray(router.load)

    still, others, load = run(0.0)
    np.testing.assert_array_equal(still, np.full((2, 4), 0.5))  # no gradient, and no decay
    moved, same, _ = run(0.01)
    np.testing.assert_allclose(moved, 0.5 + 0.01 * np.sign(load.mean(1, keepdims=True) - load))
    assert (moved != still).any()
    jax.tree.map(np.testing.assert_array_equal, others, same)


def test_rounding_moves_nothing_while_there_is_nothing_to_learn():
    """All rewards equal, the policy still the reference: the exact gradient of GRPO is 0."""
    mesh, objective = one_device(), L.grpo(beta=0.04)
    before = models.init(jax.random.key(0), CONFIG, mesh=mesh)
    batch = make_batch()
    score = make_score(CONFIG, ScoreOptions(0.8, 6))
    alike = batch.replace(
        rewards=np.ones(B, np.float32), ref_logp=np.asarray(score(before, batch).logp) + 1e-7
    )
    state, numbers, _ = step(objective, mesh, batch=alike)
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    assert numbers["policy/held"] == 1
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (0, 0, 0)
    # One advantage is enough to go on.
    state, numbers, _ = step(objective, mesh, batch=alike.replace(rewards=batch.rewards))
    assert (int(state.applied), numbers["policy/held"]) == (1, 0)
    # So is a term that has a gradient without any.
    bonus = dataclasses.replace(objective, regularisers=(L.kl(0.04), L.entropy_bonus(0.1)))
    state, numbers, _ = step(bonus, mesh, batch=alike)
    assert (int(state.applied), numbers["policy/held"]) == (1, 0)


def temporaries(parts):
    """Bytes of a step with micro-batches of two rows, and of a gradient."""
    layers = models.decoder(
        vocab_size=16, hidden_size=64, num_layers=8, num_heads=2, intermediate_size=512,
        remat="layer",
    )  # fmt: skip
    mesh, objective, optimizer = one_device(), L.grpo(beta=0.0), optax.sgd(1e-3)
    rows = jax.eval_shape(objective.prepare, make_batch().replace(routing=None))[0]
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * parts, *x.shape[1:]), x.dtype), rows)
    state = states.abstract(layers, optimizer, objective, mesh)
    update = make_update(layers, objective, optimizer, UpdateOptions(1.0, 6, parts=parts))
    with jax.set_mesh(mesh):
        memory = jax.jit(update, donate_argnums=0).lower(state, rows).compile().memory_analysis()
    return memory.temp_size_in_bytes, 4 * models.count(layers)


def test_gradients_of_micro_batches_are_added_in_place():
    """More micro-batches take no second gradient, only the rows that they are cut from."""
    (whole, gradient), (cut, _) = temporaries(1), temporaries(4)
    assert gradient > 3e6
    assert cut < whole + 0.25 * gradient
    assert cut < 1.6 * gradient  # and activations, and what the optimizer makes of it
