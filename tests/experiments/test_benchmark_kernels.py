"""The benchmark of the kernels: its cases' work by hand, the registry as text, and small runs."""

import json

import jax
import numpy as np
import pytest
import tyro
from rljax_kernels.attention import sees

from experiments import (
    benchmark_kernels,
    chip_rates,
    kernel_cases,
    kernel_engine,
    kernel_sizes,
    kernel_targets,
)
from experiments.benchmark_kernels import OPERATIONS
from experiments.chip_rates import Peak
from experiments.kernel_cases import Packing, Work
from rljax import models


def test_pairs_are_those_that_attention_sees():
    packing = Packing((3, 2), responses=4, count=2)
    case = kernel_cases.attention("", 2, packing, (2, 1, 8, 6), "float32")
    *arrays, places = case.make()
    assert packing.tokens == 5 + 2 * 2 * 4 == places.segments.shape[1]
    assert int(np.asarray(sees(places, places)).sum()) == 2 * packing.pairs
    # 21 tokens of 2 rows: queries and outputs of 2 heads, keys and values of 1.
    forward, both = case.works["forward"], case.works["both"]
    pairs = 2 * packing.pairs * 2
    assert forward == Work(2 * pairs * (8 + 6), 4 * 2 * 21 * (2 * 8 + 8 + 6 + 2 * 6))
    assert both.flops == 2 * pairs * (8 + 6 + 3 * 8 + 2 * 6)
    assert forward.bytes == sum(4 * x.size for x in arrays) + 4 * 2 * 21 * 2 * 6


def test_a_pass_over_pages_reads_shared_ones_once():
    alone = kernel_cases.paged_attention("", 8, 48, (4, 2, 16, 16), "bfloat16")
    shared = kernel_cases.paged_attention("", 8, 16, (4, 2, 16, 16), "bfloat16", shared=(32, 4))
    token, ends = 2 * 2 * 32, 2 * 8 * 4 * 32
    assert alone.works["forward"] == Work(2 * 8 * 48 * 4 * 32, 8 * 48 * token + ends)
    assert shared.works["forward"] == Work(2 * 8 * 48 * 4 * 32, (8 * 16 + 2 * 32) * token + ends)
    latent = kernel_cases.paged_attention("", 2, 16, (4, 1, 24, 16), "bfloat16", latent=True)
    assert latent.works["forward"].bytes == 2 * 16 * 2 * 24 + 2 * 2 * 4 * 40
    assert "v" not in latent.make()[3] and latent.asked.latent


def test_work_of_products():
    found = kernel_cases.logprobs("", 4, 8, 32, "bfloat16").works
    assert found["forward"] == Work(2 * 4 * 8 * 32, 2 * (4 + 32) * 8)
    assert found["both"].flops == 4 * found["forward"].flops
    found = kernel_cases.grouped_matmul("", 16, 3, 8, 4, "float32").works
    assert found["forward"] == Work(2 * 16 * 8 * 4, 4 * (16 * 12 + 3 * 32))
    assert found["both"].flops == 3 * found["forward"].flops


def test_every_platform_has_cases_of_every_operation():
    for platform in ("cpu", "gpu", "tpu"):
        found = kernel_sizes.cases(platform)
        assert {case.operation for case in found} == set(OPERATIONS)
        for case in found:
            chosen = benchmark_kernels.operation(case.operation)
            assert chosen.named(case.against).objection(case.asked, platform) is None
            assert case.works.keys() == {"forward", "both"} if case.gradients else {"forward"}


def test_rates_and_shares():
    peak = Peak("", flops=100.0, bandwidth=10.0)
    assert (peak.seconds(Work(200, 10)), peak.bound(Work(200, 10))) == (2.0, "compute")
    assert (peak.seconds(Work(100, 30)), peak.bound(Work(100, 30))) == (3.0, "memory")
    kinds = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "TPU v5": "v5p",
        "TPU v5 lite": "v5e",
        "TPU v6 lite": "v6e",
    }
    assert {kind: chip_rates.chip_of(kind).name for kind in kinds} == kinds
    assert chip_rates.chip_of("cpu") is None


def test_differences_are_relative_to_the_largest_value():
    truth = (np.asarray([1.0, -4.0]), np.asarray([0.5]))
    found = (np.asarray([1.0, -3.8]), np.asarray([0.5]))
    assert benchmark_kernels.difference(found, truth) == pytest.approx(0.05)


def test_the_engines_roofline():
    model = models.PRESETS["qwen2.5-7b"]()
    peak = Peak("h200", 989e12, 4800e9)
    # 7.07e9 weights that are multiplied, 2 bytes each; 57,344 bytes of keys and values a token.
    moved = 2 * (models.count_active(model) - 152_064 * 3584) + 64 * 384 * 57_344
    assert moved == pytest.approx(2 * 7.07e9 + 1.41e9, rel=1e-3)
    found = kernel_engine.limit(model, 64, 384, peak)
    assert found == pytest.approx(64 * 4800e9 / moved)


def test_the_listing_names_every_implementation_and_choice():
    lines = "\n".join(kernel_targets.listing(OPERATIONS))
    for name in OPERATIONS:
        chosen = benchmark_kernels.operation(name)
        assert f"{name} (reference: {chosen.reference})" in lines
        for found in chosen.implementations:
            assert f"  {found.name:10} for {', '.join(found.platforms)}: " in lines
    for platform in ("cpu", "gpu", "tpu"):
        for case in kernel_sizes.cases(platform):
            auto = benchmark_kernels.operation(case.operation).choose("auto", case.asked, platform)
            assert f"  {platform}, {case.name}: auto takes {auto.name}" in lines


def test_flags():
    config = tyro.cli(benchmark_kernels.Config, args=["--operations", "logprobs", "--list"])
    assert config.operations == ("logprobs",) and config.list and not config.compile


def test_small_programs_are_timed_and_compared(capsys, monkeypatch):
    monkeypatch.setattr(benchmark_kernels, "tell", lambda line: None)
    peak = Peak("by hand", 1e11, 1e10)
    monkeypatch.setattr(benchmark_kernels, "peak_here", lambda: (peak, peak))
    config = benchmark_kernels.Config(operations=("logprobs",), repeats=2, tiny=True)
    benchmark_kernels.main(config)
    printed = capsys.readouterr().out.splitlines()
    lines = json.loads(printed[-1])["lines"]
    able = [
        i for i in benchmark_kernels.operation("logprobs").implementations if "cpu" in i.platforms
    ]
    assert {(line["by"], line["pass"]) for line in lines} == {
        (i.name, kind) for i in able for kind in ("forward", "both")
    }
    assert sum(line["auto"] for line in lines) == 2
    for line in lines:
        assert line["difference"] < 1e-5
        seconds = peak.seconds(Work(**line["work"]))
        assert line["share"] == pytest.approx(seconds / (line["fastest_ms"] / 1e3))
    assert sum(line.startswith("| logprobs |") for line in printed) == len(lines)


def test_what_cannot_be_compiled_says_why():
    case = kernel_sizes.tiny_cases()[0]
    broken = benchmark_kernels.Program(None, "forward", lambda *_: jax.numpy.zeros(2) @ [1, 2, 3])
    reason = benchmark_kernels.lowered(case, broken, case.make())
    assert reason.startswith("TypeError") and benchmark_kernels.compiled(reason) == reason


@pytest.mark.targets
def test_attention_compiles_for_its_targets(capsys):
    pytest.importorskip("libtpu")
    pytest.importorskip("triton")
    assert kernel_targets.compile_all(("attention",), lambda line: None, tiny=True) == 0
    printed = capsys.readouterr().out.splitlines()
    kernels = [line for line in printed if "| queries_gradient |" in line]
    assert kernels and int(kernels[0].split("|")[5]) > 0  # registers
    assert any("| triton | both |  |" in line for line in printed)


def test_the_script(capsys, monkeypatch):
    monkeypatch.setattr(benchmark_kernels, "tell", lambda line: None)
    benchmark_kernels.main(benchmark_kernels.Config(repeats=1, tiny=True))
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    assert {line["operation"] for line in lines} == set(OPERATIONS)
    assert not [line for line in lines if "failed" in line]
    assert all(line["difference"] < 1e-5 for line in lines)


def test_the_engine_is_timed_to_its_last_token():
    small = {"kernels": "off"}
    peak = Peak("by hand", 1e12, 1e11)
    found = kernel_engine.run(peak, lambda line: None, "tiny-moe", (4, 8, 24), **small)
    assert found["tokens"] == 4 * 24 and 0 < found["tokens_per_s"] < found["limit"]
    assert f"{found['programs']} programs" in kernel_engine.spelt(found)
