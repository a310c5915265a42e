"""The table of tags against runs: what is logged is in it, and each of it is logged by some run."""

import dataclasses
import json
import sys
from pathlib import Path

import jax

import rljax
from rljax import losses as L
from rljax import models
from rljax.config import (
    DataSettings,
    EvalSettings,
    ModelSettings,
    ObjectiveSettings,
    SupervisedSettings,
    TermSettings,
    UpdateSettings,
)
from rljax.data import CharTokenizer
from rljax.monitoring import tags

sys.path.insert(0, str(Path(__file__).parent))
from tiny import ROWS, config, half_right, one_device

# Only with devices that tests do not have, or where something happens that need not.
ELSEWHERE = {"accelerator", "known_peak", "observed"}


def logged(directory, *, prompts=ROWS, own=None, **parts):
    settings = config(directory, **parts)
    own = {"rewards": [half_right], "prompts": prompts, "objective": own, "mesh": one_device()}
    rljax.train(settings, **own)
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return {tag for line in lines for tag in json.loads(line)} - {"step", "time"}


def teacher(directory):
    alphabet = sorted({c for row in ROWS for value in row.values() for c in value})
    size = CharTokenizer("".join(alphabet)).vocab_size
    model = dataclasses.replace(models.PRESETS["tiny-moe"](), vocab_size=size)
    models.save_pretrained(directory, model, models.init(jax.random.key(7), model))
    return ModelSettings("tiny-moe", remat="none", teacher=str(directory))


def test_runs_log_the_table_and_nothing_else(tmp_path):
    found = logged(
        tmp_path / "terms",
        prompts=None,
        data=DataSettings("addition", template="none", max_prompt_length=16),
        objective=ObjectiveSettings("grpo", beta=0.1, dual_clip=3.0),
        terms=TermSettings(
            truncated_is=2.0, entropy_target=1.0, router_aux_loss_coef=0.01, clip_cov=0.1
        ),
        supervised=SupervisedSettings(sft_target=0.9, sft_max_steps=1, sft_batch_size=8),
        evals=EvalSettings(eval_every=1, eval_prompts=4, eval_k=2),
    )
    found |= logged(tmp_path / "ppo", objective=ObjectiveSettings("ppo"))
    found |= logged(
        tmp_path / "mask",
        objective=ObjectiveSettings("deepseek_v32"),
        terms=TermSettings(kl_cov=1.0),
        update=UpdateSettings(mini_batch_size=8),
    )
    found |= logged(
        tmp_path / "distilled",
        objective=ObjectiveSettings("distillation"),
        model=teacher(tmp_path / "teacher"),
    )
    found |= logged(
        tmp_path / "rejects", own=dataclasses.replace(L.grpo(beta=0.0), corrections=(L.icepop(),))
    )
    assert list(tags.unknown(found)) == []
    assert tags.missing(found, tags.CONDITIONS.keys() - ELSEWHERE) == []
