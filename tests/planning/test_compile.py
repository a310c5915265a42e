"""XLA's own account of the real steps, on eight virtual devices and for described chips."""

import dataclasses
import importlib.util

import jax
import pytest

from rljax import mesh as meshes
from rljax import models, planning
from rljax.planning.comparison import Comparison
from rljax.planning.compile import (
    compile_decode,
    compile_prefill,
    compile_score,
    compile_update,
)

CONFIG = models.decoder(
    vocab_size=512,
    hidden_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    num_experts=4,
    dtype="bfloat16",
    remat="layer",
)
WORK = planning.Work(
    prompts_per_step=4,
    num_generations=4,
    max_prompt_length=8,
    max_completion_length=8,
    mini_batch_size=16,
    micro_batch_size=2,
    slots=8,
    page_size=8,
)
SIZES = {"fsdp": 4, "expert": 2}


def planned(topology, config=CONFIG):
    machine = planning.Topology.parse(topology)
    return planning.plan(config, machine, meshes.make_abstract(machine.num_chips, **SIZES), WORK)


def test_the_train_step_agrees_with_the_estimate():
    plan = planned("v5p:8")
    compiled = compile_update(CONFIG, meshes.make(**SIZES), WORK)
    assert compiled.arguments == pytest.approx(plan.arguments["train"], rel=0.02)
    # What is donated comes back in place; gradients are no arguments.
    kept = plan.sharding.totals["master weights"] + plan.sharding.totals["optimizer moments"]
    assert compiled.aliases == pytest.approx(kept, rel=0.02)
    assert compiled.outputs == pytest.approx(kept, rel=0.02)
    assert compiled.temporaries > plan.sharding.totals["gradients"]
    assert compiled.total == compiled.arguments + compiled.temporaries + (
        compiled.outputs - compiled.aliases
    )
    # CPUs gather weights in float32.
    sent = sum(c.bytes for c in compiled.collectives)
    assert sent > sum(c.bytes for c in plan.sharding.collectives)
    assert {"all-gather", "all-reduce"} <= {c.kind for c in compiled.collectives}
    # Of the sum of experts' gradients each device is given its part.
    given = [c for c in compiled.collectives if (c.kind, c.axis) == ("reduce-scatter", "fsdp")]
    assert given and "feed_forward" in given[0].why
    text = str(Comparison(plan, compiled))
    for part in ("train program: compiled in", "arguments", "largest temporaries", "feed_forward"):
        assert part in text


def test_the_decode_step_agrees_with_the_estimate():
    plan = planned("v5p:8")
    compiled = compile_decode(CONFIG, meshes.make(**SIZES), WORK)
    assert compiled.arguments == pytest.approx(plan.arguments["decode"], rel=0.02)
    assert compiled.aliases == plan.rollout["KV pool"]  # the pool is written in place


def test_the_scoring_program_agrees_with_the_estimate():
    plan, compiled = planned("v5p:8"), compile_score(CONFIG, meshes.make(**SIZES), WORK)
    assert compiled.arguments == pytest.approx(plan.arguments["score"], rel=0.02)
    assert compiled.temporaries > plan.score["compute weights"]
    assert compiled.outputs < plan.score["sampled batch"]
    assert "score program: compiled in" in str(Comparison(plan, compiled))


def test_the_prefill_program_agrees_with_the_estimate():
    """Of two layers: nothing needs the experts of the last, whose hidden states are not kept."""
    config = dataclasses.replace(CONFIG, stacks=(models.Stack(CONFIG.stacks[0].pattern, 2),))
    plan = planned("v5p:8", config)
    compiled = compile_prefill(config, meshes.make(**SIZES), WORK)
    assert compiled.arguments == pytest.approx(plan.arguments["prefill"], rel=0.02)
    assert compiled.aliases == plan.prefill["KV pool"]


LONG = models.decoder(
    vocab_size=64,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    remat="layer",
)


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "context": 2}])
def test_memory_grows_with_the_tokens_of_a_row_as_estimated(sizes):
    chip = dataclasses.replace(planning.CHIPS["v5p"], platform="cpu")
    mesh = meshes.make(devices=jax.devices()[:4], **sizes)
    found = []
    for length in (2048, 4096):
        work = planning.Work(
            prompts_per_step=4,
            num_generations=1,
            max_prompt_length=16,
            max_completion_length=length - 16,
            mini_batch_size=4,
            slots=4,
        )
        plan = planning.plan(LONG, planning.Topology("cpu:4", chip, 4), mesh, work)
        assert plan.attention == ("blocked",)
        for compile_program in (compile_update, compile_score):
            compiled = compile_program(LONG, mesh, work)
            estimate = plan.temporaries[compiled.name]
            assert 0.4 < compiled.temporaries / estimate < 1.7, compiled.name
            found.append(compiled.temporaries)
    # The score matrices of one layer alone would be 4 times as large, and 4 times the whole.
    square = 4 * 4 * 4 * 4096**2
    (update, score), (longer_update, longer_score) = found[:2], found[2:]
    assert update < longer_update < 2.4 * update and longer_update < square / 4
    assert score < longer_score < 3 * score and longer_score < square / 4


@pytest.mark.targets
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu (the extra tpu) to describe chips",
)
def test_described_chips():
    # TPUs pad the last dimension of a shard to 128 numbers: here all have as many.
    config = models.decoder(
        vocab_size=1024,
        hidden_size=512,
        num_layers=2,
        num_heads=4,
        head_dim=128,
        intermediate_size=512,
        num_experts=4,
        dtype="bfloat16",
        remat="layer",
    )
    machine = planning.Topology.parse("v5p:2x2x2")
    plan = planned("v5p:2x2x2", config)
    mesh = meshes.make(devices=machine.devices(), **SIZES)
    train = compile_update(config, mesh, WORK)
    assert train.arguments == pytest.approx(plan.arguments["train"], rel=0.02)
    assert train.peak > train.arguments
    assert any(c.kind == "reduce-scatter" for c in train.collectives)
    waiting = compile_update(config, mesh, WORK, on_host=True)
    moments = plan.sharding.totals["optimizer moments"]
    assert train.arguments - waiting.arguments == pytest.approx(moments, rel=0.02)
    for compile_program, rules in (
        (compile_score, meshes.TRAIN_RULES),
        (compile_prefill, meshes.ROLLOUT_RULES),
        (compile_decode, meshes.ROLLOUT_RULES),
    ):
        compiled = compile_program(config, mesh, WORK, rules)
        assert compiled.arguments == pytest.approx(plan.arguments[compiled.name], rel=0.02)
    with pytest.raises(ValueError, match="topology='v5p:3x3': libtpu knows no such slice"):
        planning.Topology.parse("v5p:3x3").devices()
