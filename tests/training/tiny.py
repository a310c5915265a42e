"""The smallest run that does everything, in this process and on one device."""

import dataclasses

import jax

from rljax import mesh as meshes
from rljax.config import (
    Config,
    DataSettings,
    EvalSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    SamplerSettings,
    UpdateSettings,
)

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def one_device():
    return meshes.make(devices=jax.devices()[:1])


def config(directory, **parts):
    """The configuration, with whole parts replaced."""
    small = Config(
        model=ModelSettings(model="tiny-moe", remat="none"),
        data=DataSettings(template="none", max_prompt_length=8),
        rewards=RewardSettings(("exact_match",)),
        rollout=RolloutSettings(prompts_per_step=4, num_generations=2, max_completion_length=4),
        sampler=SamplerSettings(slots=8, decode_chunk=4, rollout_kernels="off"),
        objective=ObjectiveSettings("grpo", beta=0.0),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=1),
        update=UpdateSettings(mini_batch_size=4, micro_batch_size=0),
        evals=EvalSettings(eval_every=0, eval_prompts=4),
        run=RunSettings(steps=2, save_every=1, run_dir=str(directory)),
    )
    return dataclasses.replace(small, **parts)


def half_right(completions, **_):
    """Rewards that differ within a group whatever the policy says."""
    return [float(i % 2) for i in range(len(completions))]
