"""The table of every tag a run logs, with its meaning and unit."""

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Tag:
    """One entry of the table.

    Attributes:
        pattern: The tag; `<name>` stands for any one path part, `<n>` for a whole number.
        unit: What one of it is: '1' for ratios and probabilities, 'nats', 'tokens', 's', ...
        meaning: One line.
    """

    pattern: str
    unit: str
    meaning: str

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
    Tag("policy/loss", "1", "The objective that is minimised; its value near 0 is no fault"),
    Tag("policy/entropy", "nats", "Mean entropy of the policy per response token"),
    Tag("policy/entropy_coef", "1", "Coefficient of the adaptive entropy bonus, as it acts now"),
    Tag("policy/clip_frac_low", "1", "Share of tokens clipped at the ratio window's lower end"),
    Tag("policy/clip_frac_high", "1", "Share of tokens clipped at the ratio window's upper end"),
    Tag("policy/clip_cov_frac", "1", "Share of tokens whose surrogate Clip-Cov took away"),
    Tag("policy/kl_cov_frac", "1", "Share of tokens that KL-Cov penalised"),
    Tag("policy/clip_frac_dual", "1", "Share of tokens at the bound of dual clipping"),
    Tag("policy/clipped_high_prob", "1", "Mean probability of the tokens clipped above"),
    Tag("policy/ratio_mean", "1", "Mean ratio of the live to the old policy"),
    Tag("policy/ratio_max", "1", "Greatest ratio of the live to the old policy"),
    Tag("policy/kl_ref", "nats", "Estimated KL to the frozen reference, per token"),
    Tag("policy/kl_teacher", "nats", "Estimated reverse KL to the teacher (k1), per token"),
    Tag("policy/kl_old", "nats", "Estimated KL to the policy at the start of the step, per token"),
    Tag("policy/mean_prob", "1", "Mean probability of the sampled tokens"),
    Tag("policy/grad_norm", "1", "Norm of the gradient before clipping"),
    Tag("policy/lr", "1", "Learning rate of the last update"),
    Tag("policy/off_policy_frac", "1", "Share of responses masked as too far off the policy"),
    Tag("policy/skipped_updates", "updates", "Updates skipped for a gradient that was not finite"),
    Tag("critic/loss", "1", "Loss of the critic"),
    Tag("critic/explained_var", "1", "Share of the returns' variance that the critic explains"),
    # The responses themselves.
    Tag("completion/length_mean", "tokens", "Mean length of the responses"),
    Tag("completion/length_max", "tokens", "Greatest length of a response"),
    Tag("completion/length_min", "tokens", "Least length of a response"),
    Tag("completion/truncated_frac", "1", "Share of responses cut off by the length limit"),
    Tag("completion/length_correct", "tokens", "Mean length of the right responses"),
    Tag("completion/length_incorrect", "tokens", "Mean length of the wrong responses"),
    Tag("completion/reflection_frac", "1", "Share of responses that look back on themselves"),
    # Sampler against trainer at equal weights.
    Tag(
        "mismatch/kl", "nats", "Estimated KL of the sampler's policy from the trainer's, per token"
    ),
    Tag("mismatch/k3", "nats", "The same by the k3 estimator, which is never negative"),
    Tag("mismatch/logp_diff_mean", "nats", "Mean absolute difference of log-probabilities"),
    Tag("mismatch/logp_diff_max", "nats", "Greatest absolute difference of log-probabilities"),
    Tag("mismatch/pearson", "1", "Correlation of the two probabilities over tokens"),
    Tag("mismatch/ess", "1", "Effective sample size of the importance weights, as a share"),
    Tag("mismatch/masked_frac", "1", "Share of tokens that a correction rejected"),
    Tag("mismatch/routing_flip_frac", "1", "Share of expert choices that differ between the two"),
    # Age of the data.
    Tag("staleness/mean", "versions", "Mean number of updates since a token was sampled"),
    Tag("staleness/max", "versions", "Greatest number of updates since a token was sampled"),
    Tag("staleness/dropped", "responses", "Responses thrown away as too old"),
    # Mixture-of-experts layers.
    Tag("moe/load_max_over_mean", "1", "Tokens of the busiest expert over the mean; 1 is even"),
    Tag("moe/dead_frac", "1", "Share of the experts, over all layers, that got no token"),
    Tag("moe/balance_loss", "1", "Load-balancing loss of the routers; 1 where load is even"),
    Tag("moe/router_entropy", "nats", "Mean entropy of the router's distribution"),
    Tag("moe/expert_<n>_load", "1", "Share of the routed tokens of layer n on its busiest expert"),
    # Where the time goes.
    Tag("perf/tokens_per_s", "tokens/s", "Response tokens trained per second of the whole step"),
    Tag("perf/rollout_tokens_per_s", "tokens/s", "Response tokens sampled per second of rollout"),
    Tag("perf/mfu", "1", "Model FLOPs used over the devices' peak"),
    Tag("perf/step_s", "s", "Time of the whole step"),
    Tag("perf/rollout_s", "s", "Time spent sampling"),
    Tag("perf/reward_s", "s", "Time spent scoring"),
    Tag("perf/score_s", "s", "Time spent on the trainer's log-probabilities"),
    Tag("perf/update_s", "s", "Time spent in updates"),
    Tag("perf/sync_s", "s", "Time spent handing weights to the sampler"),
    Tag("perf/sync_bytes", "bytes", "Weights laid out anew for the sampler, or brought to it"),
    Tag("perf/eval_s", "s", "Time spent in held-out evaluation"),
    Tag("perf/checkpoint_s", "s", "Time the step waited for a checkpoint"),
    Tag("perf/compilations", "compilations", "Compilations since the start; still after warm-up"),
    Tag("perf/device_memory_gb", "GB", "Greatest memory in use on a device"),
    # The supervised warm-up.
    Tag("warmup/loss", "nats", "Mean negative log-probability of the warm-up's answers"),
    Tag("warmup/steps", "steps", "Supervised steps taken"),
    Tag("warmup/accuracy", "1", "Share right on the validation prompts during warm-up"),
    # Held-out evaluation.
    Tag("eval/<task>/avg@<n>", "1", "Share of right samples, n a prompt"),
    Tag("eval/<task>/pass@<n>", "1", "Chance that one of n samples is right (unbiased)"),
    Tag("eval/<task>/maj@<n>", "1", "Share of prompts whose most frequent answer is right"),
    Tag("eval/<task>/greedy", "1", "Share right when decoding greedily"),
    Tag("eval/<task>/score_mean", "score", "Mean raw score of the verifier on the samples"),
    Tag("eval/<task>/answering_rate", "1", "Share of samples in which an answer was found"),
    Tag("eval/<task>/length_mean", "tokens", "Mean length of the samples"),
    Tag("eval/<task>/truncated_frac", "1", "Share of samples cut off by the length limit"),
    Tag("eval/<task>/invalid_frac", "1", "Share of samples whose scoring failed; left out above"),
    Tag("eval/<task>/greedy_score_mean", "score", "As score_mean, of the greedy samples"),
    Tag("eval/<task>/greedy_answering_rate", "1", "As answering_rate, of the greedy samples"),
    Tag("eval/<task>/greedy_length_mean", "tokens", "As length_mean, of the greedy samples"),
    Tag("eval/<task>/greedy_truncated_frac", "1", "As truncated_frac, of the greedy samples"),
    Tag("eval/<task>/greedy_invalid_frac", "1", "As invalid_frac, of the greedy samples"),
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
