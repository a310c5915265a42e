"""The benchmark of a whole step: its workload, what it changes in a run, and its table."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import tyro

from experiments import benchmark_step, step_peers, step_workload, timing
from experiments.step_workload import Config
from rljax.data import load_tokenizer
from rljax.models import presets

SMALL = Config(
    prompts=2, prompt_length=5, generations=4, new_tokens=12, micro_batch=4, repeats=2, peers=()
)


def test_the_workload_is_the_published_one():
    config = Config()
    assert step_workload.prompts_of(config).shape == (8, 64)
    assert config.responses * (config.prompt_length + config.new_tokens) == 12_288
    lengths = step_workload.lengths_of(config)
    assert lengths.sum() == 2466 and lengths.min() >= 8 and lengths.max() == 128


def test_the_tokenizer_reads_a_word_a_token(tmp_path):
    step_workload.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    config = Config()
    read = [tokenizer.encode(text) for text in step_workload.texts_of(config)]
    np.testing.assert_array_equal(read, step_workload.prompts_of(config))
    assert tokenizer.vocab_size == step_workload.VOCABULARY and tokenizer.end_ids == (1,)


def test_settings_are_the_shipped_ones_but_for_the_workload_and_the_variant(tmp_path):
    neutral = type(benchmark_step.settings(SMALL, tmp_path, {}))().flat()
    shipped = benchmark_step.settings(SMALL, tmp_path, {}).flat()
    changed = {name for name, value in shipped.items() if value != neutral[name]}
    assert changed <= {
        "model", "template", "max_prompt_length", "prompts_per_step", "num_generations",
        "max_completion_length", "micro_batch_size", "objective", "warmup_steps", "run_dir",
        "learning_rate",
    }  # fmt: skip
    for changes in benchmark_step.VARIANTS.values():
        run = benchmark_step.settings(SMALL, tmp_path, changes)
        run.check()
        assert changes.items() <= run.flat().items()


def test_flags():
    given = ["--variants", "as shipped", "--peers", "trl", "--trl-python", sys.executable]
    config = tyro.cli(Config, args=given)
    assert config.variants == ("as shipped",) and config.peers == ("trl",)
    assert str(config.trl_python) == sys.executable and config.responses == 64


def test_every_peer_has_a_half_and_a_hint():
    for peer in Config().peers:
        assert callable(getattr(step_peers, f"run_{peer}")) and peer in timing.HOW_TO_COMPARE
    assert step_peers.Config is Config


def test_the_table_takes_ratios_of_the_fastest_steps():
    def side(*steps, tokens=100):
        return {"first_s": 9.0, "steps": list(steps), "tokens": tokens}

    ours = side(
        {"step": 4.0, "rollout": 1.0, "update": 3.0}, {"step": 6.0, "rollout": 2.0, "update": 4.0}
    )
    theirs = side({"step": 8.0, "rollout": 3.0, "update": 5.0})
    lines = benchmark_step.table("step", {"rljax": ours, "trl": theirs})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len({len(line) for line in cells}) == 1
    assert cells[2] == ["rljax", "4.00 (5.00)", "1.00 (1.50)", "3.00 (3.50)", "25", "9.0", "0.50"]
    assert cells[3][-1] == "1.00"


def test_the_script(capsys, monkeypatch):
    small = presets.decoder(
        vocab_size=8192, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16,
        qk_norm="head", family="qwen3",
    )  # fmt: skip
    monkeypatch.setitem(presets.PRESETS, "speed-s", lambda: small)
    told = []
    monkeypatch.setattr(benchmark_step, "tell", told.append)
    benchmark_step.main(dataclasses.replace(SMALL, variants=("as shipped",)))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    tokens = {"step": 8 * 12, "long-tail": int(step_workload.lengths_of(SMALL).sum())}
    for workload, total in tokens.items():
        ours = found[workload]["rljax, as shipped"]
        assert ours["tokens"] == total and len(ours["steps"]) == 2
        assert all(step["update"] > 0 for step in ours["steps"])
    with pytest.raises(ValueError, match="variants="):
        benchmark_step.main(dataclasses.replace(SMALL, variants=("other",)))
