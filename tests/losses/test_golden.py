"""Values, gradients and advantages agree with verl 0.9.1 and TRL 1.16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.batch import Batch

OBJECTIVES = {
    "dapo": L.dapo(),
    "dapo_dual1_5": L.dapo(dual_clip=1.5),
    "grpo_nokl": L.grpo(beta=0.0),
    "grpo_kl": L.grpo(),
    "grpo_kl_unbiased": L.grpo(kl_unbiased=True),
    "dr_grpo": dataclasses.replace(L.dr_grpo(16), advantage=L.group_normalize()),
    "gspo": L.gspo(0.02, 0.03),
    "sapo": L.sapo(),
    "gmpo": L.gmpo(0.4, 0.4),
    "cispo_cap2": L.cispo(2.0),
    "dppo_tv": L.dppo(),
    "vespo": L.vespo(),
    "deepseek_v32": L.deepseek_v32(delta=0.1, beta=0.04),
    "kl_cov": L.Objective(
        L.group_normalize(),
        L.chain(L.token_ratio(), L.policy_gradient()),
        L.token_mean(),
        regularisers=L.kl_cov(coef=1.0, fraction=0.1),
    ),
}
ADVANTAGES = {
    "group_normalize": L.group_normalize(),
    "group_center": L.group_center(),
    "leave_one_out": L.leave_one_out(),
    "gae": L.chain(L.gae(0.99, 0.95), L.batch_whiten()),
    "reinforce_plus_plus": L.reinforce_plus_plus(gamma=0.99).advantage,
    "reinforce_plus_plus_baseline": L.reinforce_plus_plus_baseline().advantage,
}


def batch_of(case):
    field = {k: jnp.asarray(case[k], jnp.float32) for k in ("old", "ref", "mu", "values")}
    mask = jnp.asarray(case["mask"]).astype(bool)
    return Batch(
        tokens=jnp.zeros(mask.shape, jnp.int32),
        mask=mask,
        group=jnp.asarray(case["group"]),
        rewards=jnp.asarray(case["rewards"], jnp.float32),
        old_logp=field["old"],
        ref_logp=field["ref"],
        rollout_logp=field["mu"],
        values=field["values"],
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient(golden, name, index):
    case, objective = golden[index], OBJECTIVES[name]
    new = jnp.asarray(case["new"], jnp.float32)
    rows = objective.with_batch_stats(new, objective.prepare(batch_of(case))[0])
    (value, _), gradient = jax.value_and_grad(objective.loss, has_aux=True)(new, rows)
    expected = case["losses"][name]
    np.testing.assert_allclose(value, expected["value"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(gradient, expected["grad"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(golden, name, index):
    case = golden[index]
    objective = L.Objective(ADVANTAGES[name], L.policy_gradient(), L.token_mean())
    rows, _ = objective.prepare(batch_of(case))
    mask = np.asarray(case["mask"], bool)
    expected = np.where(mask, case["advantages"][name], 0.0)
    np.testing.assert_allclose(rows.advantages, expected, rtol=1e-4, atol=1e-6)
    if name == "gae":
        np.testing.assert_allclose(rows.returns, case["returns"], rtol=1e-4, atol=1e-6)
