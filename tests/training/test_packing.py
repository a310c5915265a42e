"""The trainer's packed rows: few shapes, even work, and the results of one response a row."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rljax
from rljax import mesh as meshes
from rljax import models
from rljax.config import ModelSettings, ObjectiveSettings, TermSettings, UpdateSettings
from rljax.packing import Lengths
from rljax.training.metrics import finish
from rljax.training.row_cost import row_cost
from rljax.training.rows import RowPlanner, RowShapes
from tests.training import tiny

SPEED_S = row_cost(models.PRESETS["speed-s"]())
BLOCKS = dataclasses.replace(SPEED_S, reach=lambda rows, length: "seen")
SQUARES = dataclasses.replace(SPEED_S, reach=lambda rows, length: "all")


def shapes_of(prompts, own, group_size):
    prompts = np.repeat(prompts, group_size)
    return RowShapes(0, Lengths(prompts, prompts + np.asarray(own), group_size))


def drawn(groups, group_size=8, seed=0, prompt=64, longest=128):
    rng = np.random.default_rng(seed)
    own = np.clip(7 + rng.geometric(1 / 32, groups * group_size), 8, longest)
    return shapes_of(np.full(groups, prompt), own, group_size)


def planner(**options):
    defaults = {"packs": True, "shares": True, "micro_batch_size": 8, "cost": BLOCKS}
    return RowPlanner(64, 128, 8, **{**defaults, **options})


def rows_of(packed):
    """Segments of the rows that are computed, [micro-batches, devices, rows of one, L]."""
    cut, (rows, length) = packed.layout.cut, packed.layout.shape
    segments, spans = np.zeros(rows * length, int), packed.layout.spans
    for start, size, number in zip(spans.start, spans.size, spans.segment, strict=True):
        assert not segments[start : start + size].any()
        segments[start : start + size] = number
    return segments.reshape(-1, packed.rows, cut.parts, length).transpose(2, 0, 1, 3)


def test_long_tailed_responses_are_packed_into_the_budget():
    """The lengths of the benchmark: 12,288 padded tokens, of which 2,466 + 8 · 64 are something."""
    packed = planner().pack(drawn(8, seed=1))
    assert packed.layout.shared and packed.padding < 0.1
    assert packed.layout.cut.live * packed.rows * packed.layout.shape[1] < 12288 * 0.27
    apart = planner(shares=False).pack(drawn(8, seed=1))
    assert not apart.layout.shared and apart.padding < 0.12


def test_prompts_are_shared_where_that_costs_less():
    uniform = shapes_of(np.full(8, 64), np.full(64, 128), 8)
    packed = planner().pack(uniform)
    assert packed.layout.shared
    assert packed.layout.cut.live * packed.rows * packed.layout.shape[1] == 9216
    # A square of scores for each row: not worth it, and the shortest rows are best.
    alone = planner(cost=SQUARES).pack(uniform)
    assert not alone.layout.shared and alone.layout.shape[1] == 192 and alone.padding == 0
    # Prompts of a token are not worth a segment of their own.
    brief = shapes_of(np.ones(8, int), np.full(64, 127), 8)
    assert planner().pack(brief).padding < 0.12


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12), st.sampled_from([1, 2, 8]), st.integers(0, 99), st.sampled_from([0, 1, 8])
)
def test_devices_have_equal_rows_and_nothing_is_lost(groups, shards, seed, micro):
    shapes = drawn(groups, seed=seed)
    packed = planner(shards=shards, micro_batch_size=micro).pack(shapes)
    cut, layout = packed.layout.cut, packed.layout
    rows = rows_of(packed)
    assert rows.shape[:2] == (cut.parts, shards)
    assert 1 <= cut.live <= cut.parts and cut.parts & (cut.parts - 1) == 0
    assert not rows[int(cut.live) :].any()  # what is not computed holds nothing
    assert rows.max() <= layout.max_segments
    spans, lengths = layout.spans, shapes.lengths
    tokens = np.bincount(spans.source, spans.size * spans.copies).reshape(-1, 8)
    # Of a shared prompt, in each row that has it, the first response is the source.
    assert tokens.sum() == lengths.totals.sum()
    if layout.shared:
        own = (lengths.totals - lengths.prompts).reshape(-1, 8)
        assert (tokens.sum(1) == (own + lengths.prompts.reshape(-1, 8)).sum(1)).all()
    else:
        np.testing.assert_array_equal(tokens.reshape(-1), lengths.totals)


def test_rows_of_like_cost_are_computed_at_the_same_time():
    """A device waits for the others at each layer: their rows of a micro-batch cost alike."""
    own = np.tile([128] * 4 + [8] * 4, 16)
    shapes = shapes_of(np.full(16, 8), own, 8)
    packed = planner(shards=4, shares=False, micro_batch_tokens=256).pack(shapes)
    rows = rows_of(packed)[: int(packed.layout.cut.live)]
    longest = np.array(
        [[[np.bincount(r[r > 0]).max(initial=0) for r in d] for d in m] for m in rows]
    )
    spread = longest.sum(2).max(1) - longest.sum(2).min(1)
    assert (spread <= 128).all() and (np.diff(longest.sum(2).max(1)) <= 0).all()


def test_a_run_has_a_handful_of_shapes():
    """Batches whose lengths drift from 8 to 128 tokens."""
    found = set()
    for step in range(0, 20, 2):
        rng = np.random.default_rng(step)
        own = np.clip(rng.normal(8 + 6 * step, 8, 256), 1, 128).astype(int)
        packed = planner().pack(shapes_of(np.full(32, 60), own, 8))
        found.add((packed.layout.shape, packed.layout.max_segments, packed.layout.cut.parts))
        assert packed.padding < 0.2
    assert len(found) <= 8


def test_a_response_longer_than_the_budget_has_rows_of_its_own_length():
    shapes = shapes_of(np.full(2, 64), [128] * 16, 8)
    packed = planner(micro_batch_tokens=100).pack(shapes)
    assert packed.layout.shape[1] == 192 and packed.rows == 1


def test_lengths_divide_over_the_context_axis():
    packed = planner(divisor=6, micro_batch_tokens=1000).pack(drawn(8))
    assert packed.layout.shape[1] % 6 == 0


def test_the_cost_of_a_model_is_in_its_operations():
    config, cost = models.PRESETS["speed-s"](), SPEED_S
    assert cost.logits == 2 * 8192 * 512
    assert cost.score == 8 * 4 * 8 * 64  # layers, two products, heads of 64
    weights = models.count_active(config)
    np.testing.assert_allclose(cost.token + cost.logits, 2 * weights, rtol=0.01)
    # A shared prompt of 64 and two responses of 128, in blocks of one token: P²/2 + 2 (RP + R²/2).
    one = dataclasses.replace(BLOCKS, block=0)
    lengths = Lengths(np.array([64, 64]), np.array([192, 192]), 2)
    assert one.scores(((0, 1),), lengths, True, (1, 400)) == 64**2 / 2 + 2 * (128 * 64 + 128**2 / 2)
    assert one.scores(((0,), (1,)), lengths, False, (1, 400)) == 192**2
    assert SQUARES.scores(((0, 1),), lengths, True, (1, 400)) == 400**2
    # Few scores are computed all at once, many by blocks, as `attention_backend` says.
    assert (cost.reach(1, 64), cost.reach(1, 4096)) == ("all", "seen")


def run(directory, mesh, steps=1, micro=1, **parts):
    """Metrics of each step, and the last weights."""
    settings = tiny.config(directory, **parts)
    update = dataclasses.replace(settings.update, micro_batch_size=micro)
    settings = dataclasses.replace(settings, update=dataclasses.replace(update, mini_batch_size=8))
    found = []
    rollout = dataclasses.replace(settings.rollout, prompts_per_step=8)
    settings = dataclasses.replace(settings, rollout=rollout)
    opened = rljax.open_run(settings, prompts=tiny.ROWS, rewards=[tiny.half_right], mesh=mesh)
    with opened as (run, state):
        for _ in range(steps):
            groups, state, _ = run.sample(state)
            shapes = run.plan(groups)
            batch, scored = run.score(state, groups, shapes)
            rows, prepared = run.prepare(batch)
            state, learned = run.learn(state, rows, shapes)
            state = state.replace(step=state.step + 1)
            run.sync_weights(state)
            found.append(finish(scored, prepared, learned))
        return found, jax.device_get(run.weights(state))


RUNS = {
    "adapters": {
        "model": ModelSettings("tiny-moe", lora_rank=2),
        "objective": ObjectiveSettings("gspo", beta=0.02),
        "steps": 2,
    },
    "critic, support": {
        "objective": ObjectiveSettings("ppo"),
        "rollout": {"top_p": 0.9},
        "mesh": {"fsdp": 8},
    },
    "batch statistics, routing": {
        "objective": ObjectiveSettings("dapo"),
        "terms": TermSettings(kl_cov=1.0, entropy_target=1.0, router_aux_loss_coef=0.1),
        "rollout": {"routing_replay": "trainer"},
        "mesh": {"fsdp": 2, "context": 2},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_not_depend_on_packing(name, tmp_path):
    parts = dict(RUNS[name])
    sizes = parts.pop("mesh", {})
    mesh = meshes.make(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    rollout = parts.pop("rollout", {})
    parts["rollout"] = dataclasses.replace(tiny.config("").rollout, **rollout)
    packed = run(tmp_path / "packed", mesh, **parts)
    alone = run(tmp_path / "alone", mesh, update=UpdateSettings(packing="never"), **parts)
    for one, other in zip(packed[0], alone[0], strict=True):
        assert one.keys() == other.keys() and "perf/padding_frac" in one
        for tag in itertools.filterfalse(lambda tag: tag.startswith("perf/"), one):
            np.testing.assert_allclose(one[tag], other[tag], rtol=2e-3, atol=1e-5, err_msg=tag)
    for one, other in zip(
        *(jax.tree.leaves(weights) for _, weights in (packed, alone)), strict=True
    ):
        # Adam divides a gradient by its own size: rounding decides where it is tiny.
        assert np.mean(np.abs(one - other) > 1e-3) < 0.01
