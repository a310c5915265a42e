"""The table of tags knows what runs log, and nothing twice."""

import pytest

from rljax.monitoring import TAGS, find_tag, tags

pytestmark = pytest.mark.smoke


def test_no_tag_stands_twice():
    patterns = [entry.pattern for entry in TAGS]
    assert len(set(patterns)) == len(patterns)


def test_every_entry_says_its_unit_and_meaning_in_one_line():
    for entry in TAGS:
        assert entry.unit and entry.meaning and "\n" not in entry.meaning
        assert not entry.meaning.endswith(".")


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/exact_match/mean", "reward/<function>/mean"),
        ("eval/addition/avg@8", "eval/<task>/avg@<n>"),
        ("eval/gsm8k-test/pass@16", "eval/<task>/pass@<n>"),
        ("eval/addition/greedy", "eval/<task>/greedy"),
        ("moe/expert_11_load", "moe/expert_<n>_load"),
    ],
)
def test_patterns_stand_for_their_instances(tag, pattern):
    assert find_tag(tag).pattern == pattern


@pytest.mark.parametrize(
    "tag",
    [
        "reward/mena",
        "reward",
        "reward/a/b/mean",
        "eval/addition/avg@k",
        "eval/addition/avg@8/x",
        "eval/addition",
        "moe/expert_x_load",
        "policy/entropy ",
    ],
)
def test_what_the_table_lacks_is_unknown(tag):
    assert find_tag(tag) is None


NAMES = {
    "reward": "mean std",
    "score": "mean",
    "group": "frac_zero_std frac_all_correct frac_all_wrong oversampling",
    "policy": "loss entropy clip_frac_low clip_frac_high clipped_high_prob ratio_mean ratio_max "
    "kl_ref kl_old mean_prob grad_norm lr",
    "critic": "loss explained_var",
    "completion": "length_mean length_max length_min truncated_frac length_correct "
    "length_incorrect reflection_frac",
    "mismatch": "kl k3 logp_diff_mean logp_diff_max pearson ess masked_frac routing_flip_frac",
    "staleness": "mean max dropped",
    "moe": "load_max_over_mean router_entropy expert_0_load",
    "perf": "tokens_per_s rollout_tokens_per_s mfu step_s rollout_s update_s sync_s compilations "
    "device_memory_gb",
    "eval/addition": "avg@4 pass@4 maj@4 answering_rate",
}


@pytest.mark.parametrize("group", NAMES)
def test_names_that_users_know_are_there(group):
    assert tags.unknown(f"{group}/{name}" for name in NAMES[group].split()) == []


def test_every_condition_is_explained_and_used():
    assert {entry.when for entry in TAGS} == set(tags.CONDITIONS)


def test_unknown_tags_are_listed_in_their_order():
    assert tags.unknown(["b/c", "reward/mean", "a", "eval/x/greedy"]) == ["b/c", "a"]


def test_missing_entries_are_those_whose_condition_held():
    assert tags.missing([], {"teacher"}) == ["policy/kl_teacher"]
    assert tags.missing(["policy/kl_teacher"], {"teacher"}) == []
    logged = ["eval/a/avg@8", "eval/a/pass@1", "eval/a/maj@8", "eval/a/score_mean"]
    assert tags.missing(logged, {"sampled_eval"}) == [
        "eval/<task>/answering_rate",
        "eval/<task>/length_mean",
        "eval/<task>/truncated_frac",
        "eval/<task>/invalid_frac",
    ]


def test_a_tag_is_described_in_one_line():
    assert tags.describe("perf/update_s") == "Time spent in updates (s), at every training step"
    assert tags.describe("eval/a/greedy") == (
        "Share right when decoding greedily, at evaluations, where there are held-out prompts"
    )
    assert tags.describe("x/y") == "x/y is not in the table of rljax.monitoring.tags"
