"""How an objective is put together, cut, and refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import named

KEY = jax.random.key(3)
LENGTHS = [5, 2, 6, 1, 3, 4]


@pytest.fixture(scope="module")
def batch(make_batch):
    shape = (6, 6)
    keys = jax.random.split(KEY, 4)
    return make_batch(
        [1, 0, 0, 1, 1, 0],
        LENGTHS,
        [2, 2, 2, 5, 5, 5],
        old_logp=-jax.random.uniform(keys[0], shape),
        ref_logp=-jax.random.uniform(keys[1], shape),
        rollout_logp=-jax.random.uniform(keys[2], shape),
        truncated=[False, False, True, False, False, False],
    )


@pytest.fixture(scope="module")
def logp():
    return -jax.random.uniform(jax.random.fold_in(KEY, 9), (6, 6))


def value_and_grad(objective, logp, rows):
    (loss, stats), gradient = jax.value_and_grad(objective.loss, has_aux=True)(logp, rows)
    return loss, gradient, stats


def test_first_on_policy_step(batch):
    """Ratio 1, nothing clipped, loss 0 under sequence_mean, and a gradient all the same."""
    objective = L.grpo(beta=0.0)
    rows, _ = objective.prepare(batch)
    loss, gradient, stats = value_and_grad(objective, batch.old_logp, rows)
    values = L.finish(stats)
    assert abs(loss) < 1e-6 and np.abs(gradient).max() > 0.01
    assert values["policy/ratio_mean"] == values["policy/ratio_max"] == 1
    assert values["policy/clip_frac_low"] == values["policy/clip_frac_high"] == 0
    token_mean = L.dapo(mask_truncated=False)
    assert abs(token_mean.loss(batch.old_logp, token_mean.prepare(batch)[0])[0]) > 1e-3


def test_on_policy_loss_of_unequal_lengths(make_batch):
    """Advantages ±.866 on 10 and 100 tokens: not 0 under token mean, 0 under sequence mean."""
    old = -np.ones((4, 100), np.float32)
    batch = make_batch([1, 1, -1, -1], [10, 10, 100, 100], old_logp=old)
    by_sequence, by_token = (
        L.Objective(L.group_normalize(), L.chain(L.token_ratio(), L.ppo_clip()), weights)
        for weights in (L.sequence_mean(), L.token_mean())
    )
    loss = by_sequence.loss(batch.old_logp, by_sequence.prepare(batch)[0])[0]
    assert abs(loss) < 1e-6
    loss = by_token.loss(batch.old_logp, by_token.prepare(batch)[0])[0]
    assert loss == pytest.approx(0.866025 * (100 - 10) / 110, rel=1e-4)


def test_without_old_logp_the_live_policy_is_the_anchor(batch, logp):
    for objective in (L.grpo(beta=0.0), L.gspo()):
        with_old = objective.prepare(batch.replace(old_logp=logp))[0]
        without = objective.prepare(batch.replace(old_logp=None))[0]
        loss, gradient, _ = value_and_grad(objective, logp, with_old)
        alone, alone_gradient, stats = value_and_grad(objective, logp, without)
        np.testing.assert_allclose(alone, loss, atol=1e-7)
        np.testing.assert_allclose(alone_gradient, gradient, atol=1e-7)
        assert L.finish(stats)["policy/ratio_max"] == 1


def test_all_masked_gives_zero_loss_and_gradient(batch, logp):
    for objective in (L.grpo(), L.dapo(), L.gspo()):
        rows, _ = objective.prepare(batch.replace(mask=jnp.zeros_like(batch.mask)))
        loss, gradient, stats = value_and_grad(objective, logp, rows)
        assert loss == 0 and (gradient == 0).all()
        assert not np.isnan(list(L.finish(stats).values())).any()
        assert rows.token_weights.sum() == 0 and not rows.trains


def test_nan_outside_the_mask_never_leaks(batch, logp):
    objective = L.grpo(kl_unbiased=True)
    clean = value_and_grad(objective, logp, objective.prepare(batch)[0])
    spoilt = {
        name: jnp.where(batch.mask, getattr(batch, name), jnp.nan)
        for name in ("old_logp", "ref_logp", "rollout_logp")
    }
    rows, _ = objective.prepare(batch.replace(**spoilt))
    found = value_and_grad(objective, jnp.where(batch.mask, logp, jnp.nan), rows)
    np.testing.assert_array_equal(found[0], clean[0])
    np.testing.assert_array_equal(found[1], clean[1])
    late = rows.replace(**spoilt)
    np.testing.assert_array_equal(value_and_grad(objective, logp, late)[1], clean[1])


def test_advantages_and_old_logp_carry_no_gradient(batch, logp):
    objective = L.grpo(kl_unbiased=True)
    rows, _ = objective.prepare(batch)

    def loss(advantages, old):
        return objective.loss(logp, rows.replace(advantages=advantages, old_logp=old))[0]

    for gradient in jax.grad(loss, (0, 1))(rows.advantages, rows.old_logp):
        assert (gradient == 0).all()


def test_needs_of_each_half():
    def halves(objective):
        assert objective.needs == objective.prepare_needs | objective.loss_needs
        return objective.prepare_needs, objective.loss_needs

    assert halves(L.grpo()) == (set(), {"old", "ref"})
    assert halves(L.grpo(beta=0.0)) == halves(L.gspo()) == (set(), {"old"})
    assert halves(L.supervised()) == (set(), set())
    assert halves(L.reinforce_plus_plus(beta=0.1)) == ({"old", "ref"}, {"old"})
    assert halves(L.decoupled_ppo()) == ({"old", "rollout"}, {"old"})
    assert halves(L.scalerl()) == (set(), {"rollout"})
    assert halves(L.ppo()) == ({"values"}, {"old", "values"})
    assert halves(L.distillation()) == (set(), {"old", "teacher"})
    assert halves(L.gdpo()) == ({"components"}, {"old"})
    added = L.gspo().adding(L.top_entropy(0.2), L.clip_cov(), L.entropy_bonus(0.1))
    assert halves(added) == ({"old_entropy"}, {"old", "batch_stats", "entropy"})


@pytest.mark.parametrize("name", [make.__name__ for make in named.ALL])
def test_needs_are_what_is_read(batch, logp, name):
    """Each named need is missed, and with those of both halves nothing else is."""
    fields = {"old": "old_logp", "rollout": "rollout_logp", "ref": "ref_logp"}
    fields |= {"teacher": "teacher_logp", "values": "values", "components": "score_components"}
    make = getattr(L, name)
    given = {"beta": 0.1} if "beta" in inspect.signature(make).parameters else {}
    objective = make(length=6, **given) if name == "dr_grpo" else make(**given)
    whole = batch.replace(
        teacher_logp=batch.ref_logp, values=batch.ref_logp, score_components=jnp.eye(6)
    )
    outputs = L.PolicyOutputs(logp, values=logp)
    least = whole.replace(**{f: None for n, f in fields.items() if n not in objective.needs})
    rows, _ = objective.prepare(least)
    objective.loss(outputs, rows)
    for need in objective.prepare_needs:
        with pytest.raises(ValueError, match=f"needs {fields[need]}, got None"):
            objective.prepare(least.replace(**{fields[need]: None}))
    for need in objective.loss_needs - {"old"}:
        with pytest.raises(ValueError, match=f"needs {fields[need]}, got None"):
            objective.loss(outputs, rows.replace(**{fields[need]: None}))


def test_missing_fields_are_named(batch, logp):
    objective = L.grpo()
    rows, _ = objective.prepare(batch.replace(ref_logp=None))
    with pytest.raises(ValueError, match="needs ref_logp, got None"):
        objective.loss(logp, rows)
    with pytest.raises(ValueError, match="logp must have the rows' shape"):
        objective.loss(logp[:2], rows)
    corrected = L.Objective(
        L.group_center(), L.token_ratio(), L.token_mean(), corrections=(L.truncated_is(),)
    )
    with pytest.raises(ValueError, match="needs rollout_logp, got None"):
        corrected.prepare(batch.replace(rollout_logp=None))


def test_double_corrections_are_refused():
    with pytest.raises(ValueError, match="against the rollout policy already"):
        L.Objective(
            L.group_center(),
            L.token_ratio(anchor="rollout"),
            L.token_mean(),
            corrections=(L.truncated_is(),),
        )
    for correction in (L.truncated_is(), L.icepop()):
        with pytest.raises(ValueError, match="use sequence_token_ratio"):
            L.Objective(
                L.group_center(), L.sequence_ratio(), L.sequence_mean(), corrections=correction
            )
    L.Objective(
        L.group_center(),
        L.sequence_ratio(),
        L.sequence_mean(),
        corrections=L.truncated_is(level="sequence"),
    )


@pytest.mark.parametrize(
    ("slot", "part"),
    [
        ("masks", L.truncated_is()),
        ("corrections", L.kl(0.1)),
        ("shaping", L.mask_truncated()),
        ("regularisers", L.value_loss()),
        ("critic", L.kl(0.1)),
        ("weights", L.group_center()),
        ("advantage", L.chain(L.group_center(), L.token_ratio())),
        ("policy", L.token_mean()),
    ],
)
def test_a_part_in_the_wrong_place_is_refused(slot, part):
    right = {"advantage": L.group_center(), "policy": L.token_ratio(), "weights": L.token_mean()}
    with pytest.raises(ValueError, match=f"^{slot} takes what derives from"):
        L.Objective(**{**right, slot: part})


def test_one_part_a_tuple_or_a_list_is_the_same():
    made = [
        L.Objective(L.group_center(), L.token_ratio(), L.token_mean(), masks=masks)
        for masks in (L.mask_truncated(), (L.mask_truncated(),), [L.mask_truncated()])
    ]
    assert made[0] == made[1] == made[2]


def test_an_objective_is_a_static_argument(batch, logp):
    @jax.jit
    def plain(logp, rows):
        return L.gspo().loss(logp, rows)[0]

    loss = jax.jit(lambda objective, logp, rows: objective.loss(logp, rows)[0], static_argnums=0)
    rows, _ = L.gspo().prepare(batch)
    assert hash(L.gspo()) == hash(L.gspo()) and L.gspo() == L.gspo()
    assert loss(L.gspo(), logp, rows) == plain(logp, rows)


def test_vmap_over_policies(batch, logp):
    objective = L.gspo(0.1, 0.1)
    rows, _ = objective.prepare(batch)
    many = jnp.stack([logp, logp * 0.9])
    losses = jax.vmap(lambda x: objective.loss(x, rows)[0])(many)
    np.testing.assert_allclose(losses[1], objective.loss(many[1], rows)[0], rtol=1e-5)
