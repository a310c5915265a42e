"""Operations counted by hand, and peaks looked up by device kind."""

import pytest

from rljax import models
from rljax.monitoring import mfu, model_flops_per_token, peak_flops

CONFIG = models.decoder(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tie_embeddings=False,
)


def test_a_token_costs_two_operations_a_weight_and_its_attention():
    attention = 16 * 16 * 2 + 16 * 8 * 2  # q and o, k and v
    layer = attention + 3 * 16 * 24 + 2 * 16 + 2 * 4  # norms: before each half, of q and k
    weights = 2 * layer + 16 + 50 * 16  # last norm and output; the embedding is looked up
    assert model_flops_per_token(CONFIG, 0) == 2 * weights
    assert model_flops_per_token(CONFIG, 100) == 2 * weights + 2 * 4 * 100 * 16


def test_of_experts_only_those_a_token_takes_count():
    dense = models.PRESETS["tiny-moe"]()
    assert model_flops_per_token(dense, 0) <= 2 * models.count_active(dense)
    assert model_flops_per_token(dense, 0) < 2 * models.count(dense)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
        ("NVIDIA H1000", None),
    ],
)
def test_peaks_are_known_by_the_kind_of_device(kind, peak):
    assert peak_flops(kind) == peak


def test_utilisation_is_training_work_over_the_peak_of_all_devices():
    work = 3 * 1000 * model_flops_per_token(CONFIG, 8)
    found = mfu(CONFIG, 1000, 8, 0.5, ["TPU v4"] * 2)
    assert found == pytest.approx(work / 0.5 / (2 * 275e12))
    assert mfu(CONFIG, 1000, 8, 0.5, ["cpu"]) is None
    assert mfu(CONFIG, 1000, 8, 0.5, ["TPU v4", "cpu"]) is None
