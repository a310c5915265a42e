"""The experiments run and hold what they assert, at a smaller size."""

import importlib
import json

import numpy as np
import pytest


def printed(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_length_bias(capsys, tmp_path):
    length_bias = importlib.import_module("experiments.length_bias")
    plot = tmp_path / "lengths.png"
    length_bias.main(length_bias.Config(steps=60, cap=200, prompts=4, plot=plot))
    lengths = printed(capsys)
    assert lengths["sequence_mean"] > 63 and abs(lengths["constant"] - 21) < 3
    assert plot.stat().st_size > 0
    with pytest.raises(SystemExit, match="at least 10"):
        length_bias.main(length_bias.Config(seeds=3))


def test_the_expected_length_of_a_cut_off_geometric():
    length_bias = importlib.import_module("experiments.length_bias")
    go_on = 0.9
    by_hand = sum(go_on**n for n in range(50))
    found = length_bias.expected_length(np.log(go_on / (1 - go_on)), 50)
    assert float(found) == pytest.approx(by_hand, rel=1e-4)


def test_entropy_clip(capsys, monkeypatch):
    entropy_clip = importlib.import_module("experiments.entropy_clip")
    monkeypatch.setattr(entropy_clip, "REGIMES", ((4, 3.0),))  # shares the main compilation
    for windows in ("WINDOWS", "UPPER"):
        monkeypatch.setattr(entropy_clip, windows, ((0.2, 0.2), (0.2, 0.5)))
    found = entropy_clip.main(entropy_clip.Config(steps=4, learning_rate=3.0, seeds=20))
    assert printed(capsys) == found
    assert set(found.values()) <= {"ordered", "reversed", "undecided"} and "main" in found


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([(0.1, -0.1, 0.3), (0.2, 0.1, 0.3)], "ordered"),
        ([(-0.1, -0.3, 0.1), (-0.2, -0.3, -0.1)], "reversed"),
        ([(0.3, 0.1, 0.5), (0.2, 0.1, 0.3)], "undecided"),
        ([(0.1, 0.0, 0.2), (0.2, -0.1, 0.5)], "undecided"),
    ],
)
def test_verdicts(gaps, word):
    assert importlib.import_module("experiments.entropy_clip").verdict(gaps) == word


def test_benchmark_losses(capsys):
    benchmark = importlib.import_module("experiments.benchmark_losses")
    benchmark.main(benchmark.Config(responses=16, length=256, repeats=2))
    assert set(printed(capsys)["jax"]) == set(benchmark.OBJECTIVES)


def test_benchmark_model(capsys):
    benchmark = importlib.import_module("experiments.benchmark_model")
    config = benchmark.Config(
        models=("tiny-moe",),
        tables=("speed",),
        shapes=("4x1", "4x6"),
        micro_batch=2,
        repeats=2,
        matmul_size=32,
    )
    benchmark.main(config)
    found = printed(capsys)
    assert found["torch"] is None or found["torch"]["peak_gflops"] > 0
    one, many = (found["jax"]["cases"][f"tiny-moe 4x{n}"] for n in (1, 6))
    assert set(one) == {"forward"} and set(many) == {"forward", "both"}
    assert many["forward"]["flops"] == 6 * one["forward"]["flops"] == many["both"]["flops"] / 3
    # A new model's log-probabilities are about those of a uniform choice of 64.
    assert many["forward"]["value"] == pytest.approx(-np.log(64) * 5 / 6, rel=0.1)


def test_benchmark_sampler(capsys, monkeypatch):
    benchmark = importlib.import_module("experiments.benchmark_sampler")
    presets = importlib.import_module("rljax.models.presets")
    small = presets.decoder(
        vocab_size=8192, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16
    )
    vllm = {workload: {"best": 123.0} for workload in ("uniform", "long-tail")}
    monkeypatch.setattr(
        benchmark, "peer_half", lambda library, *_, **__: {"torch": None, "vllm": vllm}[library]
    )
    monkeypatch.setattr(
        importlib.import_module("rljax.models"), "PRESETS", {"speed-s": lambda: small}
    )
    sizes = {"prompts": 2, "prompt_length": 5, "generations": 2, "new_tokens": 20, "repeats": 1}
    config = benchmark.Config(models=("speed-s",), **sizes)
    benchmark.main(config)
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert sum("; vLLM 123, " in line for line in lines) == 2
    for word in ("random weights", "programs of the sampler", "uniform", "ideal", "vLLM"):
        assert any(word in line for line in err.splitlines())  # progress, minutes before results
    assert [line.split(":")[0] for line in lines if "--" in line] == ["no torch here"]
    found = json.loads(last)["speed-s"]
    assert found["transformers"] is None and found["vLLM"] == vllm
    assert found["engine"]["late_compilations"] == 0
    for workload in config.workloads:
        assert found["engine"][workload]["best"] > 0 and found["ideal"][workload]["best"] > 0
    assert benchmark.lengths_of(benchmark.Config(), "long-tail").sum() == 2466
