"""The settings of a run: one frozen dataclass for each part; every field is a flag.

The defaults suit a pretrained model; `rljax.presets` has whole configurations that change them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy: its weights, what of them is trained, and its teacher."""

    model: str = ""
    """A Hugging Face folder, a .gguf file, smollm2 (from its package), or a named configuration
    (random weights)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matmuls; master weights are float32 always."""
    remat: Literal["auto", "none", "layer", "attention", "offload"] = "auto"
    """What the backward pass recomputes, which saves memory and takes time. none: nothing; layer:
    all of each layer but its input; attention: that, but for attention; offload: as layer, with the
    inputs in host memory meanwhile. auto: none where the activations of a micro-batch take at most
    a quarter of a device's memory by estimate, else attention. Never changes a result."""
    lora_rank: int = 0
    """Rank of low-rank adapters, trained in place of the weights; 0: the weights are trained."""
    lora_alpha: float = 32.0
    """Over lora_rank it multiplies the adapters' product."""
    lora_targets: tuple[str, ...] = ("attention/*", "feed_forward/*")
    """Target modules: suffixes of the names of the adapted matrices, such as attention/q."""
    teacher: str = ""
    """distillation: a Hugging Face folder, a .gguf file, or smollm2, of the policy's vocabulary."""

    def __post_init__(self) -> None:
        if isinstance(self.remat, bool):  # as it was once written
            object.__setattr__(self, "remat", "layer" if self.remat else "none")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """The devices, how weights are laid out over them, and how they compute together."""

    mesh: str = ""
    """Sizes of mesh axes, such as data=2,fsdp=4,expert=2; their product is the number of devices.
    Empty puts all devices on fsdp. Rows and slots are split over stage×data×fsdp×expert."""
    train_rules: str = ""
    """Changes to the sharding of weights during the update, as logical axis=mesh axes, such as
    vocab= (not sharded); the tables are TRAIN_RULES and ROLLOUT_RULES of rljax.mesh."""
    rollout_rules: str = ""
    """Changes to the sharding of weights during sampling, such as experts=fsdp+expert: each device
    then holds fewer experts, and tokens travel further."""
    host_memory: tuple[Literal["optimizer", "reference"], ...] = ()
    """What is kept in host memory while it is not used: the optimizer's moments, the reference
    policy. Saves device memory, costs time."""
    attention_backend: Literal[
        "auto", "pallas", "splash", "cudnn", "triton", "blocked", "reference"
    ] = "auto"
    """How attention is computed in training and scoring. blocked: plain JAX, by blocks, on any
    device. reference: all scores at once. pallas, splash: kernels for TPU. cudnn, triton: kernels
    for GPU. auto: the fastest for the devices and the rows."""
    expert_dispatch: Literal["all_gather", "all_to_all"] | None = None
    """Mesh axis expert: whether each device receives all tokens, or each token is sent to the
    devices that hold its experts; never changes a result. Unset: the one that sends less."""
    expert_backend: Literal[
        "auto", "native", "blocks", "triton", "pallas", "megablox", "ragged"
    ] = "auto"
    """How rows are multiplied by their experts' matrices. native: C++ kernels, compiled at first
    use, for one CPU in float32. triton: kernels for GPU. pallas, megablox: kernels for TPU. ragged:
    XLA's own. auto: native where it is possible, blocks on other CPUs, a kernel on TPU and GPU."""
    logprob_backend: Literal["auto", "triton", "pallas", "chunked", "reference"] = "auto"
    """How log-probabilities and entropies are computed from hidden states. triton, pallas: kernels
    for GPU and TPU that hold no logits. chunked: the logits of a chunk of tokens at a time. auto: a
    kernel where there is one for the devices, chunked elsewhere."""
    pipeline_repeats: int = 1
    """Mesh axis stage: circular repeats, the number of non-adjacent pieces of the layers that a
    stage holds. More of them shorten the pipeline's bubble and send more; never changes a
    result."""
    pipeline_rows: int = 1
    """Mesh axis stage: rows on a device of each micro-batch that passes through the pipeline. Fewer
    of them shorten the bubble and read weights more often; never changes a result."""


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the questions come from and how they are asked."""

    data: str = ""
    """A generated task, or a JSONL or Parquet file or folder, of questions to train on."""
    eval_data: str = ""
    """Held-out questions; empty: the test split of `data`, where it has one."""
    question_column: str = ""
    """The column of the question; empty: the usual names are looked for."""
    answer_column: str = ""
    """The column of the answer; empty: the usual names are looked for."""
    template: Literal["none", "chat", "r1", "qwen-math"] = "chat"
    """How a question becomes a prompt."""
    max_prompt_length: int = 512
    """Tokens; longer prompts are left out, and their number is logged."""


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """The reward functions."""

    rewards: tuple[str, ...] = ("boxed",)
    """Reward functions: exact_match, boxed, numeric, or file.py:function; the first one is the
    verifier."""
    reward_weights: tuple[float, ...] = ()
    """A weight for each; empty: 1 each."""
    reward_timeout: float = 10.0
    """Seconds that a call of a user's function may take."""


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How responses are sampled."""

    prompts_per_step: int = 32
    """Prompts of a rollout batch."""
    num_generations: int = 8
    """Responses a prompt, G."""
    max_completion_length: int = 1024
    """Tokens of a response, its end token included."""
    temperature: float = 1.0
    """Divides the logits, at sampling and at training."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that reach this probability; 1: all."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest; 0: all."""
    dynamic_sampling: bool = False
    """Sample further groups until the batch is full of groups whose scores differ (DAPO)."""
    max_oversampling: float = 4.0
    """With dynamic sampling: at most this many times prompts_per_step groups are generated; at
    the cap the batch is completed with groups whose scores are equal, and a warning is logged."""
    max_staleness: int = 0
    """Policy versions by which a surplus group of dynamic sampling may be older than the policy
    it trains; at 0 surplus groups are dropped, and counted."""
    routing_replay: Literal["none", "trainer", "sampler"] = "sampler"
    """Mixture models: the experts that the update uses: none: routed anew; trainer: those of the
    trainer at the start of the step (R2); sampler: those of the sampler (R3)."""


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """The sampling engine: its memory and its programs; only max_support can change a result."""

    slots: int = 64
    """Sequences decoded at once."""
    page_size: int = 0
    """Tokens of a page of the KV cache; 0: 128 on TPU, where kernels need it, 16 elsewhere."""
    num_pages: int = 0
    """Pages of the KV cache; 0: enough for all slots at full length."""
    decode_chunk: int = 16
    """Decode steps per host synchronisation."""
    max_support: int = 64
    """With top_p, top_k or min_p: the most tokens that are kept to draw from. The trainer scores
    each token among the same tokens."""
    rollout_kernels: Literal[
        "auto", "off", "native", "triton", "pallas", "blocked", "reference"
    ] = "auto"
    """What decoding is computed by. native: C++ kernels, compiled at first use: on one CPU in
    float32 up to twice as fast. triton, pallas: kernels for GPU and TPU that read the KV cache in
    place. blocked, reference: the same in plain JAX. off: XLA alone. auto: the fastest that is
    possible."""


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The objective. Unset values are its own defaults; one it does not take is refused.

    A preset's values belong to the preset's objective: with another one they are unset.
    """

    objective: str = "gspo"
    """Its name in rljax.losses, or file.py:name for an Objective, or a function that returns one,
    of your own."""
    clip_low: float | None = None
    """Ratio window from 1 - clip_low ..."""
    clip_high: float | None = None
    """... to 1 + clip_high."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages, above 1."""
    beta: float | None = None
    """Weight of the KL penalty against the reference policy, which is the policy before the first
    step."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL."""
    kl_unbiased: bool | None = None
    """Multiply the KL penalty by the live ratio, which makes its gradient exact off-policy."""
    cap: float | None = None
    """Absolute bound of the importance weight (cispo, minirl, scalerl, dppo, decoupled_ppo)."""
    tau_pos: float | None = None
    """sapo: temperature of its gate at positive advantages ..."""
    tau_neg: float | None = None
    """... and at negative ones."""
    delta: float | None = None
    """dppo, deepseek_v32: how far the policies may part before a token or sequence is dropped."""
    gamma: float | None = None
    """ppo, reinforce_plus_plus: discount of the returns."""
    lam: float | None = None
    """ppo: λ of generalised advantage estimation."""
    value_clip: float | None = None
    """ppo: how far the critic may move from its value at the start of the step."""
    overlong_max: int | None = None
    """DAPO: tokens from which a response has the full length penalty; by default
    max_completion_length."""
    overlong_cache: int | None = None
    """DAPO: tokens over which the penalty grows; by default a fifth of overlong_max."""
    mask_truncated: bool | None = None
    """DAPO: leave truncated responses out of the loss."""


@dataclasses.dataclass(frozen=True)
class TermSettings:
    """Terms that are added to any objective; unset ones are not added."""

    truncated_is: float | None = None
    """Cap of the truncated importance weight trainer/sampler."""
    top_entropy: float | None = None
    """Share of the tokens, those of highest entropy at the start of the step, that train."""
    entropy_coef: float | None = None
    """Weight of an entropy bonus; with entropy_target the weight it starts from."""
    entropy_target: float | None = None
    """Entropy in nats that is held by adapting the weight of the bonus after each update."""
    router_aux_loss_coef: float | None = None
    """Mixture models: weight of the routers' load-balancing loss (which is 1 at even load)."""
    clip_cov: float | None = None
    """Clip-Cov: share of the tokens, drawn from those of high covariance between advantage and
    log-probability, that lose their gradient (published: 2e-4)."""
    kl_cov: float | None = None
    """KL-Cov: weight of |log ratio| on the 2e-4 of the tokens of highest covariance (published:
    1); replaces the clipping window by the plain policy gradient."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float = 1e-6
    """Of AdamW, after the warm-up."""
    critic_learning_rate: float = 1e-5
    """Of the critic, where the objective has one; same warm-up and schedule."""
    warmup_steps: int = 10
    """Optimizer steps over which the rate rises from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up: not at all, or to a tenth by the last step."""
    weight_decay: float = 0.0
    """Decoupled, on all parameters."""
    adam_b1: float = 0.9
    """Decay of the first moment."""
    adam_b2: float = 0.999
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """How a rollout batch is cut into optimizer steps."""

    num_iterations: int = 1
    """Passes over a rollout batch."""
    mini_batch_size: int = 0
    """Responses of one optimizer step; 0: the whole rollout batch."""
    micro_batch_size: int = 8
    """At most so many responses per device at a time, or, packed, as many tokens as so many of the
    longest; memory only, never changes a result. 0: all at once."""
    packing: Literal["auto", "never"] = "auto"
    """auto: responses are packed into rows of a few lengths, in scoring and updates, so that little
    is computed for padding; never: one response a row. Never changes a result."""
    micro_batch_tokens: int = 0
    """Packed: tokens of a micro-batch on each device at most, but for a response that is longer;
    0: micro_batch_size times the longest row. Never changes a result."""
    share_prompts: Literal["auto", "never"] = "auto"
    """auto: in packed rows a group's prompt is computed once, where that costs less, attention's
    scores counted; never changes a result."""
    router_bias_update_rate: float = 0.0
    """Step by which the routers' correction biases (DeepSeek-V3) follow the load after each update;
    0: they do not change (published: 1e-3)."""
    max_skipped_updates: int = 5
    """The run stops after this many updates in a row were skipped for a non-finite gradient."""


@dataclasses.dataclass(frozen=True)
class SupervisedSettings:
    """Supervised warm-up on the answers, before reinforcement learning."""

    sft_target: float = 0.0
    """Validation accuracy (greedy) at which the warm-up stops; 0: no warm-up."""
    sft_max_steps: int = 400
    """Steps after which it stops anyway."""
    sft_batch_size: int = 256
    """Question and answer pairs a step."""
    sft_learning_rate: float = 2e-3
    """Of AdamW."""
    sft_eval_every: int = 2
    """Steps between two validations."""


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Held-out evaluation."""

    eval_every: int = 25
    """Steps between evaluations; 0: only before and after."""
    eval_prompts: int = 256
    """Held-out prompts; 0: all there are."""
    eval_k: int = 0
    """Samples a prompt for avg@k and pass@k before and after; 0: greedy only."""
    eval_temperature: float = 1.0
    """Of those samples."""
    eval_top_p: float = 1.0
    """Of those samples."""
    stop_at: float = 0.0
    """The run ends once greedy held-out accuracy is at least this in two evaluations in a row;
    0: never."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The run as a whole."""

    steps: int = 100
    """Rollout batches."""
    seed: int = 0
    """Of everything random."""
    run_dir: str = ""
    """Where everything is written; empty: runs/<preset>-seed<seed>."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue what run_dir holds; never: refuse a run_dir that holds a run; must: refuse
    one that holds none."""
    save_every: int = 20
    """Steps between checkpoints; one is written at the end too."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept."""
    export: str = ""
    """A folder for the final policy, adapters merged, as transformers loads it; empty: none."""
    log_samples: int = 4
    """Responses written to samples.jsonl each step."""


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
    """The processes of a run on several hosts; each is started by the same command.

    They see one file system, where run_dir is.
    """

    coordinator: str = ""
    """HOST:PORT of process 0; empty: found from Slurm, Open MPI, GKE or a TPU pod, else there is
    one process."""
    num_processes: int | None = None
    """With coordinator: how many there are. 1: this one alone, even on a cluster."""
    process_id: int | None = None
    """With coordinator: which of them this is, from 0."""
    heartbeat_timeout: int = 100
    """Seconds without a heartbeat after which a process counts as dead, and all others end."""
