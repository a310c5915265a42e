"""Terms added to an objective: their place, their form, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import named, views

OLD = np.array(
    [[-1.0, -2.0, -0.5], [-0.7, -0.1, -3.0], [-0.4, -0.6, -0.2], [-2.0, -1.0, -1.5]], np.float32
)
NEW = jnp.asarray(OLD + np.array([[0.2, -0.1, 0.3], [0.4, 0, 0], [0.1, -0.3, 0.2], [0, 0.1, -0.2]]))
MU = OLD - np.array([[0.5, 0.4, 0], [0.1, 0, 0], [-0.3, -0.2, 0.1], [0, 0, 0]], np.float32)
ENTROPY = np.array([[1, 2, 3], [4, 9, 9], [0.5, 0.5, 0.5], [1, 1, 5]], np.float32)
LENGTHS = np.array([3, 1, 3, 3])
MASK = np.arange(3) < LENGTHS[:, None]
SIZES = MASK.sum(1)
A = np.array([0.75, -0.25, -0.25, -0.25])


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch(
        [1, 0, 0, 0], list(LENGTHS), old_logp=OLD, rollout_logp=MU, old_entropy=ENTROPY
    )


def by_response(*terms, low=0.05, high=0.06):
    """A sequence-ratio objective with centred advantages, and the terms."""
    policy = L.chain(L.sequence_ratio(), L.ppo_clip(low, high))
    return L.Objective(L.group_center(), policy, L.sequence_mean()).adding(*terms)


def gradient(objective, batch, key=None):
    rows, _ = objective.prepare(batch)
    if "batch_stats" in objective.needs:
        rows = objective.with_batch_stats(NEW, rows, key)
    (loss, stats), found = jax.value_and_grad(objective.loss, has_aux=True)(NEW, rows)
    return float(loss), np.asarray(found), L.finish(stats)


MEAN = (np.where(MASK, NEW - OLD, 0).sum(1)) / SIZES
S = np.exp(MEAN)
OPEN = np.where(A > 0, S <= 1.06, S >= 0.95)  # where the window leaves the gradient


def expected(c, open_to=OPEN):
    """The gradient of GSPO with a factor c on each response's surrogate."""
    return np.where(MASK, (-1.0 * c * A * S * open_to / (4 * SIZES))[:, None], 0)


def test_truncated_is_by_response_is_the_truncated_product(batch):
    objective = by_response(L.truncated_is(1.5))
    assert objective.corrections == (L.truncated_is(1.5, level="sequence"),)
    c = np.minimum(np.exp(np.where(MASK, OLD - MU, 0).sum(1)), 1.5)
    _, found, _ = gradient(objective, batch)
    np.testing.assert_allclose(found, expected(c), atol=1e-6)


def test_top_entropy_by_response_ranks_mean_entropies(batch):
    objective = by_response(L.top_entropy(0.5))
    assert objective.masks == (L.top_entropy(0.5, level="sequence"),)
    kept = np.array([False, True, False, True])  # of 2, 4, 0.5 and 7/3
    _, found, _ = gradient(objective, batch)
    np.testing.assert_allclose(found, expected(kept), atol=1e-6)


def test_clip_cov_by_response_takes_whole_responses_away(batch):
    logp = np.where(MASK, NEW, 0).sum(1) / SIZES
    cov = (A - A.mean()) * (logp - logp.mean())
    low, high = np.sort(cov)[-1] - 1e-4, np.sort(cov)[-1] + 1e-4
    term = L.clip_cov(0.25, low, high)
    objective = by_response(term, low=np.inf, high=np.inf)
    assert objective.regularisers == (L.clip_cov(0.25, low, high, level="sequence"),)
    _, found, stats = gradient(objective, batch, jax.random.key(0))
    kept = cov < low
    np.testing.assert_allclose(found, expected(kept, True), atol=1e-6)
    assert stats["policy/clip_cov_frac"] == pytest.approx(SIZES[~kept].sum() / SIZES.sum())


def test_kl_cov_by_response_penalises_its_log_ratio_per_token(batch):
    plain = L.chain(L.sequence_ratio(), L.policy_gradient())
    objective = by_response(L.kl_cov(2.0, 0.25))
    assert objective.policy == plain  # instead of the window
    assert objective.regularisers == (L.kl_cov(2.0, 0.25, level="sequence"),)
    without, base, _ = gradient(by_response(low=np.inf, high=np.inf), batch)
    loss, found, stats = gradient(objective, batch)
    logp = np.where(MASK, NEW, 0).sum(1) / SIZES
    chosen = np.argmax((A - A.mean()) * (logp - logp.mean()))
    assert loss - without == pytest.approx(2.0 * abs(MEAN[chosen]) / 4, rel=1e-4)
    slope = np.zeros_like(OLD)
    slope[chosen] = 2.0 * np.sign(MEAN[chosen]) / (4 * SIZES[chosen])
    np.testing.assert_allclose(found - base, np.where(MASK, slope, 0), atol=1e-6)
    assert stats["policy/kl_cov_frac"] == pytest.approx(SIZES[chosen] / SIZES.sum())


def test_kl_cov_penalises_no_token_without_a_covariance(batch):
    equal = batch.replace(rewards=jnp.ones(4))
    objective = L.grpo(beta=0.0).adding(L.kl_cov(1.0, 0.5))
    loss, found, stats = gradient(objective, equal)
    assert loss == 0 and not found.any() and stats["policy/kl_cov_frac"] == 0


def test_kl_cov_replaces_windows_and_keeps_what_is_none():
    def policy(objective):
        return objective.adding(L.kl_cov()).policy

    plain = L.chain(L.token_ratio(), L.policy_gradient())
    assert policy(L.dapo()) == policy(L.sapo()) == policy(L.ppo()) == plain
    assert policy(L.deepseek_v32()) == L.chain(*plain.transforms, L.off_policy_mask())
    rollout = L.token_ratio("rollout")
    assert policy(L.dppo()) == L.chain(rollout, L.cispo_weight(20.0))
    assert policy(L.cispo()) == L.cispo().policy
    assert policy(L.gmpo()) == L.chain(L.token_ratio(), L.gmpo_clip(np.inf, np.inf))


def test_terms_find_their_places():
    gate = L.off_policy_mask(0.1)
    terms = (L.soft_overlong(8, 2), L.mask_truncated(), L.icepop(), L.entropy_bonus(0.1), gate)
    made = L.grpo(beta=0.0).adding(*terms)
    assert made.shaping == terms[:1] and made.masks == terms[1:2]
    assert made.corrections == terms[2:3] and made.regularisers == terms[3:4]
    assert made.policy == L.chain(*L.grpo().policy.transforms, gate)
    assert L.grpo().adding() == L.grpo()
    with pytest.raises(ValueError, match="adding takes shaping, masks"):
        L.grpo().adding(L.token_mean())


def test_a_term_without_a_form_by_response_is_refused():
    with pytest.raises(ValueError, match=r"icepop.* judges single tokens"):
        L.gspo().adding(L.icepop())
    with pytest.raises(ValueError, match="a gate judges single tokens"):
        L.gspo().adding(L.clip_mask())


def test_an_importance_weight_is_applied_once():
    with pytest.raises(ValueError, match="on top: keep one of them"):
        L.decoupled_ppo().adding(L.truncated_is())
    L.decoupled_ppo().adding(L.geometric_mask_is())


@pytest.mark.parametrize("name", [make.__name__ for make in named.ALL])
def test_every_setting_is_taken_or_refused_in_one_line(name):
    for setting, outcome in views.settings_matrix()[name].items():
        assert "\n" not in outcome
        refused = setting == "truncated_is" and name in (
            "minirl",
            "scalerl",
            "dppo",
            "vespo",
            "decoupled_ppo",
        )
        refused |= name == "supervised" and setting.endswith("_cov")
        assert outcome.startswith("no: ") == refused, (setting, outcome)


def test_settings_make_terms():
    assert L.additional() == ()
    assert L.additional(entropy_coef=0.1) == (L.entropy_bonus(0.1),)
    adaptive = L.adaptive_entropy(1.5, initial=0.1)
    assert L.additional(entropy_coef=0.1, entropy_target=1.5) == (adaptive,)
    assert L.additional(0.5, 0.2) == (L.truncated_is(0.5), L.top_entropy(0.2))


def test_clip_cov_says_when_it_changes_nothing(batch):
    objective = L.grpo(beta=0.0).adding(L.clip_cov(0.2))
    with pytest.warns(UserWarning, match="clip_cov changed nothing: no unclipped token"):
        _, _, stats = gradient(objective, batch, jax.random.key(0))
    (remark,) = objective.remarks(stats)
    assert remark.startswith("clip_cov changed nothing")
    assert objective.remarks({"policy/clip_cov_frac": 0.1}) == []
