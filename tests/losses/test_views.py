"""What people look at: descriptions, gradients by token, the table of the documentation."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax import losses as L
from rljax.losses import named, views

ROOT = Path(__file__).parents[2]


def test_describe_spells_the_composition():
    text = L.describe(L.dapo(20, 4, beta=0.1))
    assert repr(text) == str(text)  # a notebook shows its lines
    for part in (
        "advantage     group_normalize(eps=1e-06, ddof=1)",
        "ratio         token_ratio(anchor='old')",
        "trust region  ppo_clip(low=0.2, high=0.28, dual=None)",
        "masks         mask_truncated(keep_denominator=False) -> drop_zero_variance(",
        "weights       token_mean()",
        "regularisers  kl(beta=0.1, estimator='k3', unbiased=False)",
        "needs         old, ref",
    ):
        assert part in text
    assert "critic" not in text and "critic" in L.describe(L.ppo())


def test_what_repr_says_makes_the_same_objective():
    for make in named.ALL:
        objective = make(8) if make is L.dr_grpo else make()
        again = eval(repr(objective), {**vars(L), "inf": np.inf})
        assert again == objective


def test_token_gradient_is_the_weight_of_a_token(make_batch):
    old = -np.ones((2, 4), np.float32)
    batch = make_batch([1, 0], [2, 4], old_logp=old)
    gradient = L.token_gradient(L.dr_grpo(4), batch, batch.old_logp)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(gradient, np.where(mask, [[-0.0625], [0.0625]], 0))


def test_token_gradient_takes_outputs_and_state(make_batch):
    old = -np.ones((2, 4), np.float32)
    batch = make_batch([1, 0], [2, 4], old_logp=old)
    adaptive = L.Objective(
        L.group_center(), L.token_ratio(), L.constant(4), regularisers=L.adaptive_entropy(1.0)
    )
    outputs = L.PolicyOutputs(batch.old_logp, entropy=batch.old_logp)
    np.testing.assert_allclose(
        L.token_gradient(adaptive, batch, outputs),
        L.token_gradient(L.dr_grpo(4), batch, batch.old_logp),
    )


def test_the_documentation_is_up_to_date():
    written = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert written == views.document(), (
        'run python -c "from rljax.losses import views; views.write()"'
    )


def test_the_table_sets_every_objective_on_one_line():
    lines = L.table().splitlines()
    assert len(lines) == 2 + len(named.ALL)
    assert len({line.count("|") for line in lines}) == 1
    gspo = next(line for line in lines if line.startswith("| `gspo` "))
    assert "`sequence_ratio()`" in gspo and "ppo_clip(low=0.0003, high=0.0004)" in gspo
    assert "live ratio × k3" in next(line for line in lines if "`deepseek_v32`" in line)


def test_the_losses_import_alone():
    """A notebook may use them without the other packages."""
    program = (
        "import sys, rljax.losses;"
        "mine = {m for m in sys.modules if m.startswith('rljax.') and 'losses' not in m};"
        "assert mine == {'rljax.batch', 'rljax.errors', 'rljax.packing'}, mine;"
        "assert not {'optax', 'orbax', 'transformers', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", L.__all__)
def test_public_names_are_documented(name):
    assert getattr(L, name).__doc__
