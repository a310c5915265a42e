"""The halves of `experiments.benchmark_step` that run on other libraries.

They run in a Python that need not have rljax, and start from the weights and the tokenizer in a
folder. Each gives its steps in seconds; `first_s` is from the start to the end of the first step,
which compiles or warms up and is not among them.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.step_workload import (
    VOCABULARY,
    Config,
    lengths_of,
    parities,
    prompts_of,
    responses_of,
    texts_of,
)

__all__ = ["Config", "run_torch", "run_trl", "run_tunix"]


def run_trl(config: Config, folder: str) -> dict[str, Any]:
    """Whole steps of TRL's GRPOTrainer, which samples by transformers' generate.

    Its defaults but for: float32, on the CPU, no dropout of logs or checkpoints, no recomputation
    unless `checkpointing`, and no end token.
    """
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    start, parts = time.perf_counter(), config.responses // config.micro_batch
    arguments = GRPOConfig(
        output_dir=str(Path(folder) / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_steps=1 + config.repeats,
        per_device_train_batch_size=config.micro_batch,
        gradient_accumulation_steps=parts,
        num_generations=config.generations,
        max_completion_length=config.new_tokens,
        temperature=1.0,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=config.checkpointing,
        generation_kwargs={"min_new_tokens": config.new_tokens},
    )
    sampling: list[float] = []

    class Trainer(GRPOTrainer):
        """Notes how long each call takes that samples and scores."""

        def _generate_and_score_completions(self, *inputs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_and_score_completions(*inputs)
            sampling.append(time.perf_counter() - start)
            return found

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=parities,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts_of(config)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    )
    trainer.train()
    return _steps(config, ends[0] - start, np.diff(ends), sampling[1:])


def run_tunix(config: Config, folder: str) -> dict[str, Any]:
    """Whole steps of tunix's GRPOLearner, which samples by its own "vanilla" sampler.

    Its defaults but for: beta=0 (no reference policy, as for the others), all responses sampled at
    once, and no end token. AdamW is optax's. A micro-batch holds whole groups.
    """
    import jax
    import transformers
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as weights
    from tunix.rl import rl_cluster as clusters
    from tunix.rl.grpo import grpo_learner

    start = time.perf_counter()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    remat = qwen3.RematConfig.DECODER if config.checkpointing else qwen3.RematConfig.NONE
    model = weights.create_model_from_safe_tensors(
        folder, qwen3.ModelConfig(**_tunix_sizes(folder), remat_config=remat), mesh
    )
    group = config.generations
    cluster = clusters.RLCluster(
        actor=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        cluster_config=_tunix_cluster(config, mesh),
    )
    sampling, ends = [], []

    def sample(*inputs: Any, **others: Any) -> Any:
        begun = time.perf_counter()
        found = generate(*inputs, **others)
        sampling.append(time.perf_counter() - begun)
        return found

    def step(*inputs: Any, **others: Any) -> Any:
        found = run_step(*inputs, **others)
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        ends.append(time.perf_counter())
        return found

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=group, beta=0.0),
        reward_fns=_parities_of_texts,
    )
    generate, cluster.generate = cluster.generate, sample
    run_step, learner._run_global_step = learner._run_global_step, step
    with mesh:
        learner.train([{"prompts": texts_of(config)} for _ in range(1 + config.repeats)])
    return _steps(config, ends[0] - start, np.diff(ends), sampling[1:])


def _tunix_cluster(config: Config, mesh: Any) -> Any:
    """How tunix trains and samples."""
    import optax
    from tunix.rl import rl_cluster as clusters
    from tunix.rl.rollout import base_rollout

    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    return clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optax.adamw(config.learning_rate, weight_decay=0.0),
            eval_every_n_steps=1000,
            max_steps=1 + config.repeats,
            mini_batch_size=config.prompts,
            train_micro_batch_size=max(config.tunix_micro_batch // config.generations, 1),
            rollout_micro_batch_size=config.prompts,
            compute_logps_micro_batch_size=config.prompts,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=config.new_tokens,
            max_prompt_length=config.prompt_length,
            kv_cache_size=config.prompt_length + config.new_tokens,
            temperature=1.0,
            eos_tokens=[VOCABULARY],  # which is never drawn
        ),
    )


def _tunix_sizes(folder: str) -> dict[str, Any]:
    """The model of a folder as the fields of tunix's configuration."""
    found = json.loads((Path(folder) / "config.json").read_text())
    return {
        "num_layers": found["num_hidden_layers"],
        "vocab_size": found["vocab_size"],
        "embed_dim": found["hidden_size"],
        "hidden_dim": found["intermediate_size"],
        "num_heads": found["num_attention_heads"],
        "num_kv_heads": found["num_key_value_heads"],
        "head_dim": found["head_dim"],
        "norm_eps": found["rms_norm_eps"],
        "rope_theta": found.get("rope_theta") or found["rope_parameters"]["rope_theta"],
        "use_tied_embedding": found["tie_word_embeddings"],
    }


def _parities_of_texts(completions: list[str], **_: Any) -> list[float]:
    return parities([[ord(letter) for letter in text] for text in completions])


def _steps(
    config: Config, first: float, whole: np.ndarray, sampling: list[float]
) -> dict[str, Any]:
    steps = [
        {"step": float(all_), "rollout": part, "update": float(all_ - part)}
        for all_, part in zip(whole, sampling, strict=True)
    ]
    return {"first_s": first, "steps": steps, "tokens": config.responses * config.new_tokens}


def run_torch(config: Config, folder: str) -> dict[str, Any]:
    """Updates of transformers' model on the long-tail responses: plain torch, rows padded.

    All rows are padded to the longest; micro-batches of `micro_batch` rows, whose gradients are
    added up; the loss is the mean over the responses' tokens of advantage times log-probability
    (the logits of the responses' places only, up to the longest); then AdamW.
    """
    import torch
    import transformers

    started = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if config.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    lengths, prompt = lengths_of(config), config.prompt_length
    tokens = np.zeros((config.responses, prompt + max(lengths)), np.int64)
    tokens[:, :prompt] = np.repeat(prompts_of(config), config.generations, axis=0)
    for row, response in zip(tokens, responses_of(config), strict=True):
        row[prompt : prompt + len(response)] = response
    mask = np.arange(tokens.shape[1])[None] < prompt + lengths[:, None]
    advantages = np.where(np.arange(config.responses) % 2, 1.0, -1.0)
    parts = [
        slice(i, i + config.micro_batch) for i in range(0, config.responses, config.micro_batch)
    ]
    ids, seen = torch.from_numpy(tokens), torch.from_numpy(mask)
    weights = torch.from_numpy(advantages[:, None] * mask[:, prompt:] / lengths.sum()).float()
    kept = tokens.shape[1] - prompt + 1

    def update() -> float:
        start = time.perf_counter()
        for part in parts:
            found = model(
                input_ids=ids[part],
                attention_mask=seen[part].long(),
                logits_to_keep=kept,
                use_cache=False,
            )
            logp = torch.nn.functional.cross_entropy(
                found.logits[:, :-1].flatten(0, 1), ids[part, prompt:].flatten(), reduction="none"
            )
            (logp * weights[part].flatten()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    update()
    first = time.perf_counter() - started
    steps = [{"update": update()} for _ in range(config.repeats)]
    return {"first_s": first, "steps": steps, "tokens": int(lengths.sum())}
