"""What holds for every named objective: no result depends on how the batch was laid out or cut.

Values are drawn, shapes are fixed, so that everything compiles once: batches are [8, 9] or, with
more padding, [8, 12].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rljax import losses as L
from rljax.batch import Batch

SIZE, WIDTH, WIDE = 8, 9, 12
PER_TOKEN = ("token_rewards", "rollout_logp", "old_logp", "old_entropy", "ref_logp")
PER_TOKEN += ("teacher_logp", "values")
OBJECTIVES = {
    "ppo": L.ppo(beta=0.1),
    "grpo": L.grpo(),
    "dr_grpo": L.dr_grpo(9),
    "dapo": L.dapo(6, 3),
    "gspo": L.gspo(0.05, 0.05),
    "gspo_token": L.gspo_token(0.05, 0.05, kl_unbiased=True, beta=0.1),
    "cispo": L.cispo(),
    "gmpo": L.gmpo(),
    "sapo": L.sapo(),
    "rloo": L.rloo(),
    "reinforce_plus_plus": L.reinforce_plus_plus(beta=0.1),
    "reinforce_plus_plus_baseline": L.reinforce_plus_plus_baseline(beta=0.1),
    "minirl": L.minirl(),
    "scalerl": L.scalerl(),
    "dppo": L.dppo(),
    "decoupled_ppo": L.decoupled_ppo(),
    "deepseek_v32": L.deepseek_v32(beta=0.1, delta=0.05),
    "maxrl": L.maxrl(),
    "gdpo": L.gdpo((1.0, 0.5)),
    "vespo": L.vespo(),
    "distillation": L.distillation(),
    "supervised": L.supervised(),
}


def draws(**others):
    """A seed for the values, and by hand what makes the difficult cases."""
    return given(
        seed=st.integers(0, 2**32 - 1),
        lengths=st.lists(st.integers(0, 7), min_size=SIZE, max_size=SIZE),
        rewards=st.lists(st.sampled_from([0.0, 1.0, 0.5, np.nan]), min_size=SIZE, max_size=SIZE),
        group=st.permutations([-5, -5, -5, 7, 7, 7, 7, 7]),
        **others,
    )


def build(seed, lengths, rewards, group):
    """A batch with prompts, gaps inside responses, empty and failed responses, and live outputs."""
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    columns, prompt = np.arange(WIDTH), 2
    mask = (columns >= prompt) & (columns < prompt + lengths[:, None])
    mask &= ~((columns == 4) & (rng.random((SIZE, 1)) < 0.3))  # a tool's token
    old = -rng.gamma(1.0, 1.0, (SIZE, WIDTH))

    def near():
        return (old + rng.normal(0, 0.3, old.shape)).astype(np.float32)

    batch = Batch(
        tokens=rng.integers(0, 50, (SIZE, WIDTH)),
        mask=mask,
        group=np.array(group),
        rewards=np.array(rewards, np.float32),
        scores=rng.integers(0, 2, SIZE).astype(np.float32),
        score_components=rng.random((SIZE, 2)).astype(np.float32),
        truncated=rng.random(SIZE) < 0.2,
        completion_length=lengths,
        token_rewards=rng.normal(0, 0.1, old.shape).astype(np.float32),
        old_logp=old.astype(np.float32),
        rollout_logp=near(),
        ref_logp=near(),
        teacher_logp=near(),
        old_entropy=rng.random(old.shape).astype(np.float32),
        values=rng.normal(0.5, 0.3, old.shape).astype(np.float32),
    )
    outputs = L.PolicyOutputs(
        near(),
        entropy=rng.random(old.shape).astype(np.float32),
        values=rng.normal(0.5, 0.3, old.shape).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, (batch, outputs))


def some(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def evaluate(name, outputs, rows):
    """Loss, gradient with respect to all outputs, and metrics."""
    value = jax.value_and_grad(OBJECTIVES[name].loss, has_aux=True)
    (loss, stats), gradient = value(outputs, rows)
    return loss, gradient, stats


def same(found, expected, index=None):
    """The same loss, metrics and gradient, up to rounding."""
    scale = max(1.0, float(jnp.abs(expected[1].logp).max()))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5 * scale)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(
            a, b if index is None else b[index], rtol=1e-4, atol=1e-6 * scale
        )
    same_stats(found[2], expected[2])


def same_stats(found, expected):
    assert L.finish(found) == pytest.approx(L.finish(expected), rel=1e-4, abs=1e-5)


def padded(batch, outputs, junk):
    """More padding, and junk everywhere outside the mask."""
    grow = lambda x: jnp.pad(x, ((0, 0), (0, WIDE - WIDTH)))  # noqa: E731
    mask = grow(batch.mask)
    spoil = lambda x: jnp.where(mask, grow(x), junk)  # noqa: E731
    wide = batch.replace(
        tokens=jnp.where(mask, grow(batch.tokens), 49),
        mask=mask,
        **{name: spoil(getattr(batch, name)) for name in PER_TOKEN},
    )
    return wide, jax.tree.map(spoil, outputs)


@every_objective
@some(3)
@draws(junk=st.sampled_from([np.nan, np.inf, -1e30, 3.0]))
def test_padding_permutation_packing_and_micro_batches(name, junk, **drawn):
    batch, outputs = build(**drawn)
    objective = OBJECTIVES[name]
    rows, stats = objective.prepare(batch)
    expected = evaluate(name, outputs, rows)
    assert np.isfinite(expected[0])

    wide_batch, wide_outputs = padded(batch, outputs, junk)
    wide_rows, wide_stats = objective.prepare(wide_batch)
    same_stats(wide_stats, stats)
    wide = evaluate(name, wide_outputs, wide_rows)
    same((wide[0], jax.tree.map(lambda g: g[:, :WIDTH], wide[1]), wide[2]), expected)

    order = jnp.array([3, 7, 0, 5, 1, 6, 2, 4])
    turned_batch, turned_outputs = jax.tree.map(lambda x: x[order], (batch, outputs))
    turned_rows, turned_stats = objective.prepare(turned_batch)
    same_stats(turned_stats, stats)
    same(evaluate(name, turned_outputs, turned_rows), expected, order)

    place = jnp.arange(SIZE * WIDTH).reshape(SIZE, WIDTH, 1, 1)
    packed = rows.replace(routing=place).pack(WIDE + 2, num_rows=SIZE, max_segments=8)
    source = packed.routing[..., 0, 0]
    laid_out = jax.tree.map(lambda x: x.reshape(-1)[jnp.maximum(source, 0)], outputs)
    inside = np.asarray(source) >= 0
    found = evaluate(name, laid_out, packed)
    back = jax.tree.map(
        lambda g: np.bincount(
            np.asarray(source)[inside], np.asarray(g)[inside], SIZE * WIDTH
        ).reshape(SIZE, WIDTH),
        found[1],
    )
    same((found[0], back, found[2]), expected)
    again = objective.weigh(packed)
    np.testing.assert_allclose(again.weights, packed.weights, rtol=1e-5)

    cuts = [jnp.arange(3), jnp.arange(3, 8)]
    pieces = [
        evaluate(name, jax.tree.map(lambda x: x[cut], outputs), rows.take(cut))  # noqa: B023
        for cut in cuts
    ]
    together = (
        sum(piece[0] for piece in pieces),
        jax.tree.map(lambda *g: jnp.concatenate(g), *(piece[1] for piece in pieces)),
        L.merge(*(piece[2] for piece in pieces)),
    )
    same(together, expected)


@functools.cache
def compiled(name):
    return jax.jit(lambda outputs, rows: evaluate(name, outputs, rows))


@every_objective
@some(2)
@draws()
def test_devices(name, **drawn):
    batch, outputs = build(**drawn)
    rows, _ = OBJECTIVES[name].prepare(batch)
    expected = evaluate(name, outputs, rows)
    for count in (2, 4, 8):  # the expected values are one device's
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        same(compiled(name)(*jax.device_put((outputs, rows), split)), expected)


@every_objective
@some(4)
@draws(signs=st.integers(0, 2**32 - 1))
def test_large_log_ratios_and_nan_outside_the_mask_stay_finite(name, signs, **drawn):
    batch, outputs = build(**drawn)
    rng = np.random.default_rng(signs)

    def far():  # any two of these differ by -120, 0 or 120
        return jnp.asarray(rng.choice([-121.0, -1.0], batch.mask.shape), jnp.float32)

    batch = batch.replace(old_logp=far(), rollout_logp=far(), ref_logp=far(), teacher_logp=far())
    batch, outputs = padded(batch, outputs.replace(logp=far()), np.nan)
    rows, _ = OBJECTIVES[name].prepare(batch)
    for leaf in (rows.advantages, rows.weights, rows.correction):
        assert np.isfinite(leaf).all()
    loss, gradient, stats = evaluate(name, outputs, rows)
    assert np.isfinite(loss)
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()
        assert (np.asarray(leaf)[~np.asarray(rows.mask)] == 0).all()
    assert np.isfinite(list(L.finish(stats).values())).all()


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "vespo", "deepseek_v32", "ppo"])
@some(2)
@draws()
def test_sequences_cut_over_devices(name, **drawn):
    """Context-parallel rows: each of 3 devices holds a third of every sequence."""
    batch, outputs = build(**drawn)
    rows, _ = OBJECTIVES[name].prepare(batch)
    expected = evaluate(name, outputs, rows)
    found = _context_parallel(name)(outputs, rows.replace(context_axis="context"))
    same(found, expected)


@functools.cache
def _context_parallel(name):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("context",))
    cut, whole = jax.sharding.PartitionSpec(None, "context"), jax.sharding.PartitionSpec()

    def local(outputs, rows):
        loss, gradient, stats = evaluate(name, outputs, rows)
        return jax.lax.psum(loss, "context"), gradient, L.all_reduce(stats, "context")

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(cut, cut), out_specs=(whole, cut, whole))
    )
