"""The embedded default: a small mixture-of-experts policy learns two-digit addition."""

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
    SupervisedSettings,
    UpdateSettings,
)


def arithmetic() -> Config:
    """A small mixture of experts learns two-digit addition by GSPO, from random weights.

    Command: `python -m experiments.train`. Cost: about a minute on 2 CPU cores, compile
    included. Expected: held-out accuracy from about .3 to above .9.

    The published GSPO window of 3e-4/4e-4 belongs to responses of thousands of tokens: the
    sequence ratio here is a mean over 4 tokens and moves much more, so that window would clip
    75% of the responses; with a single mini-batch nothing would ever be clipped. Hence
    .03/.04 and two mini-batches.
    """
    return Config(
        model=ModelSettings(model="tiny-moe", remat="none"),
        data=DataSettings(data="addition", template="none", max_prompt_length=16),
        rewards=RewardSettings(rewards=("exact_match",)),
        rollout=RolloutSettings(prompts_per_step=32, num_generations=8, max_completion_length=6),
        sampler=SamplerSettings(slots=256, decode_chunk=6),
        objective=ObjectiveSettings(objective="gspo", clip_low=0.03, clip_high=0.04),
        optimizer=OptimizerSettings(
            learning_rate=1e-3, critic_learning_rate=3e-3, lr_schedule="linear", adam_b2=0.99
        ),
        update=UpdateSettings(mini_batch_size=128, micro_batch_size=0),
        supervised=SupervisedSettings(sft_target=0.25),
        evals=EvalSettings(eval_prompts=512, stop_at=0.93),
        run=RunSettings(steps=450, save_every=50),
    )
