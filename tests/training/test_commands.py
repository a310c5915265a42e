"""What is wrong ends in one clear line, or costs one sample."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rljax_kernels import cpu

from experiments import train
from experiments.flags import parse
from rljax import models
from rljax.config import Config, ObjectiveSettings
from rljax.data import CharTokenizer
from rljax.presets import PRESETS
from rljax.training.policy import open_policy

sys.path.insert(0, str(Path(__file__).parent))
from runs import ROOT, SHORT, command


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "empty.jsonl").write_text("")
    (folder / "no_weights").mkdir()
    (folder / "no_weights" / "config.json").write_text('{"model_type": "qwen3"}')
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "reward.py").write_text(
        "calls = 0\n"
        "def picky(completions, answer, **_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 3:\n"
        "        raise RuntimeError('not today')\n"
        "    if len(completions) == 1 and '1' in completions[0]:\n"
        "        raise ValueError('no ones')\n"
        "    return [None if '2' in c else float('3' in c) for c in completions]\n"
        "def half(completions, **_):\n"
        "    return [float(i % 2) for i in range(len(completions))]\n"
    )
    return folder


@pytest.mark.parametrize(
    "flags,line",
    [
        (["--lerning_rate=1"], "flag --lerning_rate is unknown; did you mean --learning_rate?"),
        (["--steps=many"], "--steps"),
        (["--preset=nope"], "preset='nope' is unknown; the presets are arithmetic,"),
        (["--data=nope.jsonl"], "'nope.jsonl' is neither a file, a folder nor a generated task"),
        (["--data={base}/empty.jsonl"], "holds no rows"),
        (["--model=nope"], "model='nope' is neither a folder or .gguf file nor one of smollm2,"),
        (["--model={base}/no_weights"], "no_weights"),
        (["--max_prompt_length=4"], "longer than max_prompt_length=4"),
        (["--mesh=fsdp=3"], "mesh fsdp=3 needs 3 devices, got 8"),
        (["--mini_batch_size=7"], "mini_batch_size=7 must divide the 16 responses"),
        (["--cap=3", "--objective=grpo"], "cap=3.0 means nothing to objective=grpo"),
        (["--objective=dr_grpo", "--mask_truncated=True"], "means nothing to objective=dr_grpo"),
        (["--overlong_max=9", "--objective=dapo"], "longer than max_completion_length=6"),
        (["--router_bias_update_rate=0.001"], "have no correction bias"),
        (["--lora_rank=2", "--lora_targets=nothing"], "'nothing' names no matrix of the model"),
        (["--objective=distillation"], "distillation needs a teacher"),
        (["--rewards=nope.py:f"], "nope.py"),
        (["--top_p=0"], "top_p=0.0 must be above 0 and at most 1"),
        (["--resume=must"], "holds no run"),
    ],
)
def test_bad_input_is_refused_in_one_line(base, tmp_path, monkeypatch, capsys, flags, line):
    flags = [*SHORT, f"--run_dir={tmp_path}/run", *(f.format(base=base) for f in flags)]
    flags.append("--num_processes=1")
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    levels = {name: logging.getLogger(name).level for name in ("rljax", "absl")}
    try:
        status = train.main()
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    out, err = capsys.readouterr()
    complaints = [text for text in err.splitlines() if text.startswith("error: ")]
    assert status == 1
    assert out == ""
    assert len(complaints) == 1, err
    assert "Traceback" not in err
    assert line in complaints[0]


def test_a_reward_function_that_raises_costs_samples_not_the_run(base, tmp_path):
    """Custom data, custom reward and dynamic sampling, through to the end."""
    process = command(
        tmp_path / "run", f"--data={base}/data.jsonl", f"--rewards={base}/reward.py:picky",
        "--sft_target=0", "--steps=2", "--objective=dapo", "--dynamic_sampling=True",
        "--max_oversampling=2",
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(r.get("reward/invalid_frac", 0) for r in rows) > 0
    assert "picky" in err  # a line says which function lost how many samples


def test_a_kept_support_is_trained_under(base, tmp_path):
    """Sets that top-p and top-k cut, replayed in rows that share their prompts.

    Drawn and trained with the CPU's kernels, where they can be built.
    """
    native = ["--rollout_kernels=native", "--expert_backend=native"] if cpu.compiler() else []
    process = command(
        tmp_path / "run", f"--data={base}/data.jsonl", "--sft_target=0", "--steps=2",
        "--top_p=0.9", "--top_k=8", "--max_support=6", "--temperature=0.8",
        *native,
    )  # fmt: skip
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(r["mismatch/logp_diff_max"] < 1e-5 for r in rows[1:])
    assert rows[1]["policy/entropy"] <= np.log(6)


def test_a_run_on_a_mesh_exchanges_tokens_as_asked(base, tmp_path):
    """Sampling and training on other layouts agree as they do on one device."""
    process = command(
        tmp_path / "run", f"--data={base}/data.jsonl", "--sft_target=0", "--steps=1",
        "--warmup_steps=1", "--mesh=expert=2,context=2", "--expert_dispatch=all_to_all",
        devices=4,
    )  # fmt: skip
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1]
    assert rows[1]["mismatch/logp_diff_max"] < 1e-5


def test_settings_of_the_model_reach_it():
    flags = ["--expert_dispatch=all_to_all", "--remat=layer", "--compute_dtype=bfloat16"]
    flags += ["--pipeline_repeats=2", "--pipeline_rows=3"]
    found = open_policy(parse(flags, "train").config, lambda: "0123456789").model
    assert (found.expert_dispatch, found.remat, found.dtype) == ("all_to_all", "layer", "bfloat16")
    assert (found.pipeline_repeats, found.pipeline_rows) == (2, 3)


def test_distillation_moves_the_policy_to_its_teacher(base, tmp_path):
    """And with what any objective may have beside: an entropy bonus and Clip-Cov."""
    size = CharTokenizer("0123456789+=").vocab_size
    teacher = dataclasses.replace(models.PRESETS["tiny-moe"](), vocab_size=size)
    params = models.init(jax.random.key(7), teacher)
    params["embed"] *= 8  # sharp enough to be told from the policy
    models.save_pretrained(tmp_path / "teacher", teacher, params)
    process = command(
        tmp_path / "run", f"--data={base}/data.jsonl", "--sft_target=0", "--objective=distillation",
        f"--teacher={tmp_path}/teacher", "--learning_rate=0.01", "--num_generations=1",
        "--prompts_per_step=32", "--steps=60", "--clip_cov=0.01", "--warmup_steps=1",
        "--entropy_coef=0.001",
    )  # fmt: skip
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [r["policy/kl_teacher"] for r in rows[1:]]
    assert sum(gaps[-8:]) < 0.6 * sum(gaps[:8])


def test_adapters_are_trained_resumed_compared_with_their_base_and_exported(base, tmp_path):
    flags = [
        f"--data={base}/data.jsonl", "--objective=grpo", "--sft_target=0", "--lora_rank=2",
        "--lora_targets", "attention/q", "down", "--warmup_steps=1", "--save_every=1",
        "--lr_schedule=constant", f"--rewards={base}/reward.py:half",
    ]  # fmt: skip

    def run(name, steps):
        export = tmp_path / f"{name}{steps}"
        process = command(tmp_path / name, *flags, f"--steps={steps}", f"--export={export}")
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return models.from_pretrained(export)

    _, start = run("broken", 1)
    _, once = run("broken", 3)
    config, whole = run("whole", 3)
    jax.tree.map(np.testing.assert_array_equal, once, whole)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), start, whole)
    names = jax.tree.leaves(models.names(config))
    moved = [n for n, c in zip(names, jax.tree.leaves(changed), strict=True) if c]
    assert moved == ["stacks/0/0/attention/q", "stacks/0/0/feed_forward/down"]
    rows = [json.loads(x) for x in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert 0 < rows[2]["policy/kl_ref"] < rows[3]["policy/kl_ref"]
    assert max(r.get("mismatch/logp_diff_max", 0) for r in rows) < 1e-5


def test_a_run_goes_on_with_its_reference_and_refuses_another_configuration(base, tmp_path):
    flags = [
        f"--data={base}/data.jsonl", "--sft_target=0", "--objective=grpo", "--lr_schedule=constant",
        "--warmup_steps=1",
    ]  # fmt: skip
    first = command(tmp_path / "run", *flags, "--steps=1")
    assert first.wait(300) == 0, first.communicate()[1]
    longer = command(tmp_path / "run", *flags, "--steps=2")
    _, err = longer.communicate(timeout=300)
    assert longer.returncode == 0, err
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert rows[1]["policy/kl_ref"] < rows[2]["policy/kl_ref"]  # still against the start policy
    other = command(tmp_path / "run", *flags, "--temperature=0.5")
    _, err = other.communicate(timeout=120)
    assert other.returncode == 1
    assert "holds a run with temperature=1.0, got 0.5" in err
    never = command(tmp_path / "run", *flags, "--resume=never")
    assert "choose another run_dir" in never.communicate(timeout=120)[1]


@pytest.mark.smoke
def test_import_is_quick_and_starts_no_device():
    code = (
        "import time; t = time.perf_counter(); import rljax, sys; "
        "assert 'jax' not in sys.modules; print(time.perf_counter() - t); "
        "from rljax import losses; import jax; from jax._src import xla_bridge; "
        "assert not xla_bridge._backends; "
        "alone = ('losses', 'batch', 'packing', 'errors'); "
        "assert not any(m.startswith('rljax.') and m.split('.')[1] not in alone "
        "for m in sys.modules), 'losses must stand alone'"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert float(out) < 1.0


@pytest.mark.smoke
@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_documented(name):
    config = PRESETS[name]()
    config.check()
    hash(config)
    assert "Command:" in PRESETS[name].__doc__ and "Cost" in PRESETS[name].__doc__


@pytest.mark.smoke
def test_every_field_is_read_somewhere():
    """An option that nothing reads does nothing."""
    files = [p for p in (ROOT / "rljax").rglob("*.py") if p.name != "settings.py"]
    source = "".join(p.read_text() for p in files)
    by_name = vars(Config().objective).keys() | vars(Config().terms).keys()
    for name in Config().flat().keys() - by_name:  # those are refused where they mean nothing
        assert f".{name}" in source, name


@pytest.mark.smoke
def test_settings_have_one_name_each():
    parts = [getattr(Config(), part.name) for part in dataclasses.fields(Config)]
    names = [field.name for part in parts for field in dataclasses.fields(part)]
    assert len(names) == len(set(names)) == len(Config().flat())


@pytest.mark.smoke
def test_a_model_without_a_preset_starts_from_neutral_defaults():
    parsed = parse(["--model=somewhere", "--data=questions.jsonl"], "train")
    assert parsed.name == "custom"
    assert parsed.config.optimizer.learning_rate <= 1e-5
    assert parsed.config.rollout.max_completion_length >= 512
    assert parsed.config.objective == ObjectiveSettings()
    parsed = parse(["--model=tiny-moe", "--preset", "arithmetic"], "train")
    assert parsed.config == PRESETS["arithmetic"]()


@pytest.mark.smoke
def test_print_config_says_what_would_be_used_and_why(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--print-config", "--steps", "7"])
    assert train.main() == 0
    lines = {x.split()[0]: x.split(None, 1)[1] for x in capsys.readouterr().out.splitlines()}
    assert lines.keys() == Config().flat().keys()
    assert lines["steps"].split() == ["7", "flag"]
    assert lines["learning_rate"].split() == ["0.001", "preset", "arithmetic"]
    assert lines["top_k"].split() == ["0", "default"]


@pytest.mark.smoke
def test_a_flag_that_was_renamed_is_refused_with_its_new_name():
    with pytest.raises(ValueError, match="--native_rollouts was renamed; use --rollout_kernels"):
        parse(["--native_rollouts=True"], "train")
    with pytest.raises(ValueError, match="--expert_exchange was renamed; use --expert_dispatch"):
        parse(["--expert_exchange", "gather"], "train")


@pytest.mark.smoke
def test_only_refusals_become_one_line(monkeypatch):
    """A fault inside keeps its traceback."""

    def fail(*_, **__):
        raise ValueError("a fault of the library")

    monkeypatch.setattr(sys, "argv", ["train", "--num_processes=1"])
    monkeypatch.setattr("rljax.training.train", fail)
    with pytest.raises(ValueError, match="a fault of the library"):
        train.main()
