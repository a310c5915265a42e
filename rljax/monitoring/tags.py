"""The table of every tag a run logs, with its meaning, its unit and when it is logged."""

import dataclasses
import functools
import re
from collections.abc import Iterable

CONDITIONS: dict[str, str] = {
    "step": "at every training step",
    "observed": "at training steps with something to measure: a right response, a clipped token",
    "ratio": "by objectives with a ratio of policies: all but distillation",
    "scored": "at steps whose log-probabilities the trainer computes before the first update: with "
    "several updates a step, a correction, stale responses, or an objective that needs them",
    "rejection": "by objectives with a correction that rejects: icepop and the sequence masks",
    "dual_clip": "by objectives with dual clipping",
    "off_policy_mask": "by objectives that mask off-policy responses: deepseek_v32",
    "reference": "with a KL to the reference policy: beta > 0",
    "teacher": "by distillation",
    "critic": "by objectives with a critic: ppo",
    "entropy_target": "with --entropy_target",
    "clip_cov": "with --clip_cov",
    "kl_cov": "with --kl_cov",
    "mixture": "for models with mixture-of-experts layers",
    "router_loss": "with --router_aux_loss_coef",
    "accelerator": "on devices that report their memory: GPUs and TPUs",
    "known_peak": "on devices whose peak is in the table of rljax.monitoring.flops, never on CPUs",
    "checkpoint": "at steps after which a checkpoint is saved",
    "warmup": "at step 0 of a run with a supervised warm-up: sft_target > 0",
    "eval": "at evaluations, where there are held-out prompts",
    "sampled_eval": "at the first and last evaluation, with eval_k > 0",
}
"""When tags are logged, in words, by the names that the table uses."""


@dataclasses.dataclass(frozen=True)
class Tag:
    """One entry of the table.

    Attributes:
      pattern: The tag; `<name>` matches any one path part, `<n>` a whole number.
      unit: What one of it is: '1' for ratios and probabilities, 'nats', 'tokens', 's', ...
      meaning: One line.
      when: When it is logged: a name in `CONDITIONS`.
    """

    pattern: str
    unit: str
    meaning: str
    when: str = "step"

    def matches(self, tag: str) -> bool:
        """Whether `tag` is an instance of this entry."""
        return _compiled(self.pattern).fullmatch(tag) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", pattern)
    blanks = {"<n>": r"\d+"}
    return re.compile(
        "".join(
            blanks.get(part, r"[^/]+") if part.startswith("<") else re.escape(part)
            for part in parts
        )
    )


TAGS: tuple[Tag, ...] = (
    # What the responses earned.
    Tag("reward/mean", "reward", "Mean reward of the valid responses (weighted sum, unshaped)"),
    Tag("reward/overflow_frac", "1", "Share of responses whose advantage overflowed float32"),
    Tag("reward/std", "reward", "Standard deviation of the rewards over the batch"),
    Tag("reward/<function>/mean", "reward", "Mean of one reward function, before its weight"),
    Tag("reward/invalid_frac", "1", "Share of responses whose scoring failed; they are left out"),
    Tag("score/mean", "score", "Mean raw score of the verifier"),
    # Groups: the samples of one prompt.
    Tag("group/frac_zero_std", "1", "Share of groups whose scores are all equal: no gradient"),
    Tag("group/frac_all_correct", "1", "Share of groups in which every response is right"),
    Tag("group/frac_all_wrong", "1", "Share of groups in which every response is wrong"),
    Tag("group/oversampling", "1", "Groups generated per group kept by dynamic sampling"),
    Tag("group/generated", "groups", "Groups sampled for this step"),
    Tag("group/kept", "groups", "Groups that went into the batch"),
    Tag("group/dropped", "groups", "Groups thrown away as degenerate or stale"),
    # The update.
    Tag(
        "policy/loss",
        "1",
        "The objective that is minimised; near 0 on-policy, as advantages are centred",
    ),
    Tag("policy/entropy", "nats", "Mean entropy of the policy per response token"),
    Tag(
        "policy/entropy_coef",
        "1",
        "Coefficient of the adaptive entropy bonus, as it acts now",
        "entropy_target",
    ),
    Tag(
        "policy/clip_frac_low",
        "1",
        "Share of tokens clipped at the ratio window's lower end",
        "ratio",
    ),
    Tag(
        "policy/clip_frac_high",
        "1",
        "Share of tokens clipped at the ratio window's upper end",
        "ratio",
    ),
    Tag("policy/clip_frac_dual", "1", "Share of tokens at the bound of dual clipping", "dual_clip"),
    Tag(
        "policy/clipped_high_prob", "1", "Mean probability of the tokens clipped above", "observed"
    ),
    Tag("policy/ratio_mean", "1", "Mean ratio of the live to the old policy", "ratio"),
    Tag("policy/ratio_max", "1", "Greatest ratio of the live to the old policy", "ratio"),
    Tag("policy/kl_ref", "nats", "Estimated KL to the frozen reference, per token", "reference"),
    Tag(
        "policy/kl_teacher",
        "nats",
        "Estimated reverse KL to the teacher (k1), per token",
        "teacher",
    ),
    Tag(
        "policy/kl_old",
        "nats",
        "Estimated KL to the policy at the start of the step, per token",
        "scored",
    ),
    Tag(
        "policy/clip_cov_frac",
        "1",
        "Share of tokens whose surrogate Clip-Cov took away",
        "clip_cov",
    ),
    Tag("policy/kl_cov_frac", "1", "Share of tokens that KL-Cov penalised", "kl_cov"),
    Tag(
        "policy/held",
        "1",
        "Share of updates held, since all there was to the gradient was rounding",
    ),
    Tag("policy/mean_prob", "1", "Mean probability of the sampled tokens"),
    Tag("policy/grad_norm", "1", "Norm of the gradient before clipping"),
    Tag("policy/lr", "1", "Learning rate of the last update"),
    Tag(
        "policy/off_policy_frac",
        "1",
        "Share of responses masked as too far off the policy",
        "off_policy_mask",
    ),
    Tag("policy/skipped_updates", "updates", "Updates skipped for a gradient that was not finite"),
    Tag("critic/loss", "1", "Loss of the critic", "critic"),
    Tag(
        "critic/explained_var",
        "1",
        "Share of the returns' variance that the critic explains",
        "critic",
    ),
    # The responses themselves.
    Tag("completion/length_mean", "tokens", "Mean length of the responses"),
    Tag("completion/length_max", "tokens", "Greatest length of a response"),
    Tag("completion/length_min", "tokens", "Least length of a response"),
    Tag("completion/truncated_frac", "1", "Share of responses cut off by the length limit"),
    Tag("completion/length_correct", "tokens", "Mean length of the right responses", "observed"),
    Tag("completion/length_incorrect", "tokens", "Mean length of the wrong responses", "observed"),
    Tag(
        "completion/reflection_frac",
        "1",
        "Share of responses with a phrase of reflection, such as 'wait' or 'let me check'",
    ),
    # Sampler against trainer at equal weights.
    Tag(
        "mismatch/kl",
        "nats",
        "Estimated KL of the sampler's policy from the trainer's, per token",
        "scored",
    ),
    Tag("mismatch/k3", "nats", "The same by the k3 estimator, which is never negative", "scored"),
    Tag(
        "mismatch/logp_diff_mean", "nats", "Mean absolute difference of log-probabilities", "scored"
    ),
    Tag(
        "mismatch/logp_diff_max",
        "nats",
        "Greatest absolute difference of log-probabilities",
        "scored",
    ),
    Tag("mismatch/pearson", "1", "Correlation of the two probabilities over tokens", "scored"),
    Tag(
        "mismatch/ess", "1", "Effective sample size of the importance weights, as a share", "scored"
    ),
    Tag("mismatch/masked_frac", "1", "Share of tokens that a correction rejected", "rejection"),
    Tag(
        "mismatch/routing_flip_frac",
        "1",
        "Share of expert choices that differ between the two",
        "mixture",
    ),
    # Age of the data.
    Tag("staleness/mean", "versions", "Mean number of updates since a token was sampled"),
    Tag("staleness/max", "versions", "Greatest number of updates since a token was sampled"),
    Tag("staleness/dropped", "responses", "Responses thrown away as too old"),
    # Mixture-of-experts layers.
    Tag(
        "moe/load_max_over_mean",
        "1",
        "Tokens of the busiest expert over the mean; 1 is even",
        "mixture",
    ),
    Tag(
        "moe/dead_frac", "1", "Share of the experts, over all layers, that got no token", "mixture"
    ),
    Tag(
        "moe/balance_loss",
        "1",
        "Load-balancing loss of the routers; 1 where load is even",
        "router_loss",
    ),
    Tag("moe/router_entropy", "nats", "Mean entropy of the router's distribution", "mixture"),
    Tag(
        "moe/expert_<n>_load",
        "1",
        "Share of the routed tokens of layer n on its busiest expert",
        "mixture",
    ),
    # Where the time goes.
    Tag("perf/tokens_per_s", "tokens/s", "Response tokens trained per second of the whole step"),
    Tag("perf/rollout_tokens_per_s", "tokens/s", "Response tokens sampled per second of rollout"),
    Tag(
        "perf/mfu",
        "1",
        "Model FLOPs of the updates per second of them, over the devices' peak",
        "known_peak",
    ),
    Tag(
        "perf/padding_frac",
        "1",
        "Share of padding among the tokens that the updates computed: rows are filled up to their "
        "length, and the last micro-batch with empty rows",
    ),
    Tag("perf/step_s", "s", "Time of the whole step"),
    Tag("perf/rollout_s", "s", "Time spent sampling"),
    Tag("perf/reward_s", "s", "Time spent scoring"),
    Tag("perf/score_s", "s", "Time spent on the trainer's log-probabilities"),
    Tag("perf/update_s", "s", "Time spent in updates"),
    Tag("perf/sync_s", "s", "Time spent on syncing weights to the sampler"),
    Tag(
        "perf/sync_bytes", "bytes", "Bytes of weights that were resharded or copied for the sampler"
    ),
    Tag("perf/eval_s", "s", "Time spent in held-out evaluation", "eval"),
    Tag("perf/checkpoint_s", "s", "Time the step waited for a checkpoint", "checkpoint"),
    Tag(
        "perf/compilations",
        "compilations",
        "Compilations since the start; constant after the first steps",
    ),
    Tag("perf/device_memory_gb", "GB", "Greatest memory in use on a device", "accelerator"),
    # The supervised warm-up.
    Tag("warmup/loss", "nats", "Mean negative log-probability of the warm-up's answers", "warmup"),
    Tag("warmup/steps", "steps", "Supervised steps taken", "warmup"),
    Tag("warmup/accuracy", "1", "Share right on the validation prompts during warm-up", "warmup"),
    # Held-out evaluation.
    Tag("eval/<task>/avg@<n>", "1", "Share of right samples, n a prompt", "sampled_eval"),
    Tag(
        "eval/<task>/pass@<n>",
        "1",
        "Chance that one of n samples is right (unbiased)",
        "sampled_eval",
    ),
    Tag(
        "eval/<task>/maj@<n>",
        "1",
        "Share of prompts whose most frequent answer is right",
        "sampled_eval",
    ),
    Tag("eval/<task>/greedy", "1", "Share right when decoding greedily", "eval"),
    Tag(
        "eval/<task>/score_mean",
        "score",
        "Mean raw score of the verifier on the samples",
        "sampled_eval",
    ),
    Tag(
        "eval/<task>/answering_rate",
        "1",
        "Share of samples in which an answer was found",
        "sampled_eval",
    ),
    Tag("eval/<task>/length_mean", "tokens", "Mean length of the samples", "sampled_eval"),
    Tag(
        "eval/<task>/truncated_frac",
        "1",
        "Share of samples cut off by the length limit",
        "sampled_eval",
    ),
    Tag(
        "eval/<task>/invalid_frac",
        "1",
        "Share of samples whose scoring failed; left out above",
        "sampled_eval",
    ),
    Tag("eval/<task>/greedy_score_mean", "score", "As score_mean, of the greedy samples", "eval"),
    Tag(
        "eval/<task>/greedy_answering_rate", "1", "As answering_rate, of the greedy samples", "eval"
    ),
    Tag(
        "eval/<task>/greedy_length_mean", "tokens", "As length_mean, of the greedy samples", "eval"
    ),
    Tag(
        "eval/<task>/greedy_truncated_frac", "1", "As truncated_frac, of the greedy samples", "eval"
    ),
    Tag("eval/<task>/greedy_invalid_frac", "1", "As invalid_frac, of the greedy samples", "eval"),
)


@functools.lru_cache(maxsize=4096)
def find_tag(tag: str) -> Tag | None:
    """Look a tag up in the table.

    Args:
      tag: A tag as logged, such as 'eval/addition/avg@8'.

    Returns:
      Its entry, or None where the table does not know it.
    """
    return next((entry for entry in TAGS if entry.matches(tag)), None)


def describe(tag: str) -> str:
    """Meaning, unit and condition of a tag in one line.

    Args:
      tag: A tag as logged.

    Returns:
      Such as "Mean entropy of the policy per response token (nats), at every training step"; for
      an unknown tag, a line with that fact.
    """
    entry = find_tag(tag)
    if entry is None:
        return f"{tag} is not in the table of rljax.monitoring.tags"
    unit = "" if entry.unit == "1" else f" ({entry.unit})"
    return f"{entry.meaning}{unit}, {CONDITIONS[entry.when]}"


def unknown(logged: Iterable[str]) -> list[str]:
    """The tags that the table does not know.

    Args:
      logged: Tags as logged.

    Returns:
      Those without an entry, in their order.
    """
    return [tag for tag in logged if find_tag(tag) is None]


def missing(logged: Iterable[str], conditions: Iterable[str]) -> list[str]:
    """The entries that a run should have logged and did not.

    Args:
      logged: All tags that the run logged.
      conditions: The names in `CONDITIONS` that held in the run.

    Returns:
      Patterns of entries under these conditions that no logged tag matches, in the table's order.
    """
    tags, held = list(logged), set(conditions)
    return [
        entry.pattern
        for entry in TAGS
        if entry.when in held and not any(entry.matches(tag) for tag in tags)
    ]
