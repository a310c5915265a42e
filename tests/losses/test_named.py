"""Each named objective against its formula, written out in NumPy with loops."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.batch import Batch
from rljax.losses import named

B, T = 6, 5
LENGTHS = [5, 2, 3, 4, 1, 5]
GROUPS = [[0, 1, 2], [3, 4, 5]]
REWARDS = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
RNG = np.random.default_rng(11)
OLD = -RNG.gamma(1.0, 1.0, (B, T))
NEW, MU, REF, TEACHER = (OLD + RNG.normal(0, 0.35, (B, T)) for _ in range(4))
VALUES = RNG.normal(0.5, 0.3, (B, T))
COMPONENTS = RNG.random((B, 2))
MASK = np.arange(T) < np.array(LENGTHS)[:, None]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def batch():
    arrays = {
        "rewards": REWARDS,
        "old_logp": OLD,
        "rollout_logp": MU,
        "ref_logp": REF,
        "teacher_logp": TEACHER,
        "values": VALUES,
        "score_components": COMPONENTS,
    }
    return Batch(
        tokens=jnp.zeros((B, T), jnp.int32),
        mask=jnp.asarray(MASK),
        group=jnp.array([4, 4, 4, 1, 1, 1]),
        **{name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()},
    )


def by_group(function):
    a = np.zeros(B)
    for members in GROUPS:
        a[members] = function(REWARDS[members])
    return a


def normalized(rewards):
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def centered(rewards):
    return rewards - rewards.mean()


def whitened(a):
    """Over the masked tokens of a [B, T] array."""
    return (a - a[MASK].mean()) / np.sqrt(a[MASK].var(ddof=1) + 1e-8)


def spread(a):
    return np.repeat(a[:, None], T, 1)


def clip(ratio, a, low=0.2, high=0.2):
    return np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)


def rows_where(function):
    """[B, T] from one number a response."""
    return spread(np.array([function(i, slice(0, LENGTHS[i])) for i in range(B)]))


R, R_MU, RHO = np.exp(NEW - OLD), np.exp(NEW - MU), np.exp(OLD - MU)
A = spread(by_group(normalized))
CENTERED = spread(by_group(centered))
TOKEN = MASK / TOKENS
SEQUENCE = MASK / (B * np.array(LENGTHS)[:, None])
GSPO = rows_where(lambda i, s: np.exp((NEW - OLD)[i, s].mean()))


def geometric(i, s):
    x, sign = (NEW - OLD)[i, s], np.sign(A[i, 0])
    return np.exp((sign * np.minimum(sign * x, sign * np.clip(x, -0.4, 0.4))).mean())


def returns_to_go(beta):
    reward = -beta * (OLD - REF)
    for i, n in enumerate(LENGTHS):
        reward[i, n - 1] += REWARDS[i]
        reward[i, :n] = np.cumsum(reward[i, :n][::-1])[::-1]
    return np.where(MASK, reward, 0)


def generalized(gamma=1.0, lam=0.95):
    a = np.zeros((B, T))
    for i, n in enumerate(LENGTHS):
        following, ahead = 0.0, 0.0
        for t in reversed(range(n)):
            reward = REWARDS[i] if t == n - 1 else 0.0
            following = reward + gamma * ahead - VALUES[i, t] + gamma * lam * following
            ahead = VALUES[i, t]
            a[i, t] = following
    return a


def decoupled_components():
    total = np.zeros(B)
    for k, weight in enumerate((1.0, 0.5)):
        for members in GROUPS:
            total[members] += weight * normalized(COMPONENTS[members, k])
    return spread((total - total.mean()) / np.sqrt(total.var(ddof=1) + 1e-8))


def k3():
    return np.exp(REF - NEW) - 1 - (REF - NEW)


def sapo_gate():
    tau = np.where(A > 0, 1.0, 1.05)
    return 4 / tau / (1 + np.exp(-tau * (R - 1)))


def vespo_weight():
    w = rows_where(lambda i, s: np.exp((NEW - MU)[i, s].sum()))
    return np.where(A >= 0, w**2 * np.exp(3 * (1 - w)), w**3 * np.exp(2 * (1 - w)))


def past_the_window():
    return ((CENTERED > 0) & (R > 1.27)) | ((CENTERED < 0) & (R < 0.8))


def moved_too_far():
    moved = np.exp(NEW) - np.exp(MU)
    return ((A > 0) & (moved > 0.05)) | ((A < 0) & (moved < -0.05))


def far_and_bad():
    gap = rows_where(lambda i, s: (MU - NEW)[i, s].mean())
    return (A < 0) & (gap > 0.1)


WHITE = {
    "rpp": whitened(returns_to_go(0.1)),
    "baseline": whitened(CENTERED),
    "gae": whitened(generalized()),
}
SCALED = CENTERED / np.sqrt(by_group(centered).var(ddof=1) + 1e-8)
PROMPT = MASK * spread(np.repeat([1 / (2 * 10), 1 / (2 * 10)], 3))
LEAVE = spread(by_group(lambda r: (r - r.mean()) * 3 / 2))
MEAN = spread(by_group(lambda r: (r - r.mean()) / r.mean()))
PRODUCT = rows_where(lambda i, s: np.exp((NEW - OLD)[i, s].sum()))

# name: (objective, J of each token, w of each token)
CASES = {
    "grpo": (L.grpo(), clip(R, A) - 0.04 * k3(), SEQUENCE),
    "dr_grpo": (L.dr_grpo(7), clip(R, CENTERED), MASK / (B * 7)),
    "dapo": (L.dapo(), clip(R, A, 0.2, 0.28), TOKEN),
    "gspo": (L.gspo(0.02, 0.03), clip(GSPO, A, 0.02, 0.03), SEQUENCE),
    "gspo_token": (L.gspo_token(0.02, 0.03), clip(GSPO, A, 0.02, 0.03), SEQUENCE),
    "cispo": (L.cispo(1.1), np.minimum(R, 1.1) * A * NEW, TOKEN),
    "gmpo": (L.gmpo(), rows_where(geometric) * A, SEQUENCE),
    "sapo": (L.sapo(), sapo_gate() * A, SEQUENCE),
    "rloo": (L.rloo(), clip(PRODUCT, LEAVE), SEQUENCE),
    "reinforce_plus_plus": (L.reinforce_plus_plus(beta=0.1), clip(R, WHITE["rpp"]), TOKEN),
    "reinforce_plus_plus_baseline": (
        L.reinforce_plus_plus_baseline(beta=0.1),
        clip(R, WHITE["baseline"]) - 0.1 * 0.5 * (NEW - REF) ** 2,
        TOKEN,
    ),
    "minirl": (
        L.minirl(),
        ~past_the_window() * np.minimum(R_MU, 5) * CENTERED * NEW,
        MASK / B,
    ),
    "scalerl": (L.scalerl(), np.minimum(R_MU, 5) * SCALED * NEW, PROMPT),
    "dppo": (L.dppo(0.05), ~moved_too_far() * np.minimum(R_MU, 20) * A * NEW, TOKEN),
    "decoupled_ppo": (L.decoupled_ppo(), RHO * clip(R, A), TOKEN),
    "deepseek_v32": (
        L.deepseek_v32(delta=0.1, beta=0.1),
        ~far_and_bad() * clip(R, A) - 0.1 * R * k3(),
        SEQUENCE,
    ),
    "maxrl": (L.maxrl(), clip(R, MEAN), TOKEN),
    "gdpo": (L.gdpo((1.0, 0.5)), clip(R, decoupled_components()), SEQUENCE),
    "vespo": (L.vespo(), vespo_weight() * A * NEW, TOKEN),
    "distillation": (L.distillation(), R * (TEACHER - NEW), TOKEN),
    "supervised": (L.supervised(), NEW, TOKEN),
}


@pytest.mark.parametrize("name", CASES)
def test_value(batch, name):
    objective, j, w = CASES[name]
    rows, _ = objective.prepare(batch)
    np.testing.assert_allclose(rows.weights, w, rtol=1e-5)
    expected = -np.where(MASK, w * j, 0).sum()
    loss = objective.loss(jnp.asarray(NEW, jnp.float32), rows)[0]
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)


def test_ppo_value(batch):
    objective, new_values = L.ppo(), VALUES + 0.3
    rows, _ = objective.prepare(batch)
    outputs = L.PolicyOutputs(
        jnp.asarray(NEW, jnp.float32), values=jnp.asarray(new_values, jnp.float32)
    )
    returns = generalized() + VALUES
    errors = np.maximum((new_values - returns) ** 2, (VALUES + 0.2 - returns) ** 2) / 2
    j = clip(R, WHITE["gae"])
    expected = np.where(MASK, (errors - j) / TOKENS, 0).sum()
    np.testing.assert_allclose(objective.loss(outputs, rows)[0], expected, rtol=1e-4)


# Where J is differentiated as it stands; the others stop a gradient somewhere.
DIFFERENTIABLE = ["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "sapo", "rloo", "deepseek_v32"]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_is_that_of_the_value(batch, name):
    objective = CASES[name][0]
    rows, _ = objective.prepare(batch)
    logp = jnp.asarray(NEW, jnp.float32)
    direction = jnp.asarray(np.random.default_rng(0).normal(0, 1, (B, T)), jnp.float32)
    loss = jax.jit(lambda x: objective.loss(x, rows)[0])
    gradient = jax.grad(loss)(logp)
    step = 1e-3
    slope = (loss(logp + step * direction) - loss(logp - step * direction)) / (2 * step)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-2, atol=3e-4)


WEIGHTED_LOG_PI = {
    "cispo": np.minimum(R, 1.1) * A,
    "minirl": ~past_the_window() * np.minimum(R_MU, 5) * CENTERED,
    "scalerl": np.minimum(R_MU, 5) * SCALED,
    "dppo": ~moved_too_far() * np.minimum(R_MU, 20) * A,
    "vespo": vespo_weight() * A,
    "distillation": R * (TEACHER - NEW),
}


@pytest.mark.parametrize("name", WEIGHTED_LOG_PI)
def test_the_gradient_is_the_stopped_weight(batch, name):
    objective, _, w = CASES[name]
    gradient = L.token_gradient(objective, batch, jnp.asarray(NEW, jnp.float32))
    expected = -np.where(MASK, w * WEIGHTED_LOG_PI[name], 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_gspo_token_has_the_gradient_of_gspo(batch):
    new = jnp.asarray(NEW, jnp.float32)
    whole, token = (L.token_gradient(make(0.1, 0.1), batch, new) for make in (L.gspo, L.gspo_token))
    np.testing.assert_allclose(token, whole, rtol=1e-5, atol=1e-7)


def test_rloo_gives_every_token_its_response_s_gradient_undivided(batch):
    wide = L.rloo(np.inf, np.inf)
    gradient = L.token_gradient(wide, batch, jnp.asarray(NEW, jnp.float32))
    np.testing.assert_allclose(
        gradient, -np.where(MASK, PRODUCT * LEAVE / B, 0), rtol=1e-4, atol=1e-6
    )


def test_every_name_is_public_and_tested():
    names = {make.__name__ for make in named.ALL}
    assert names == {*CASES, "ppo"} and names <= set(L.__all__)


@pytest.mark.parametrize("make", named.ALL, ids=lambda make: make.__name__)
def test_docstrings_say_what_it_is(make):
    text = inspect.getdoc(make)
    assert "J = " in text and "Supply" in text
    if make is not L.supervised:
        assert "arXiv:" in text


CHANGED = {"kl_estimator": "k2", "kl_unbiased": None, "reward_weights": (1.0, 2.0)}
REQUIRED = {L.dr_grpo: {"length": 5.0}}


@pytest.mark.parametrize("make", named.ALL, ids=lambda make: make.__name__)
def test_every_argument_changes_the_objective(make):
    parameters = inspect.signature(make).parameters
    base = REQUIRED.get(make, {}) | ({"beta": 0.5} if "beta" in parameters else {})
    for name in parameters.keys() - {"overlong_max", "overlong_cache"}:
        default = parameters[name].default
        value = not default if isinstance(default, bool) else CHANGED.get(name, 1.75)
        value = "k3" if value == default == "k2" else value
        assert make(**{**base, name: value}) != make(**base), name


def test_the_overlong_penalty_has_both_its_arguments():
    made = [L.dapo(), L.dapo(9, 3), L.dapo(9, 4), L.dapo(8, 3)]
    assert len(set(made)) == 4
