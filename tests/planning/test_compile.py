"""XLA's own account of the real steps, on eight virtual devices and for described chips."""

import importlib.util

import pytest

from rljax import mesh as meshes
from rljax import models, planning
from rljax.planning.compile import Comparison, compile_decode, compile_update

CONFIG = models.decoder(
    vocab_size=512,
    hidden_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    num_experts=4,
    dtype="bfloat16",
    remat=True,
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
    for part in ("train step: compiled in", "arguments", "largest temporaries", "feed_forward"):
        assert part in text


def test_the_decode_step_agrees_with_the_estimate():
    plan = planned("v5p:8")
    compiled = compile_decode(CONFIG, meshes.make(**SIZES), WORK)
    assert compiled.arguments == pytest.approx(plan.arguments["decode"], rel=0.02)
    assert compiled.aliases == plan.rollout["KV pool"]  # the pool is written in place


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
        remat=True,
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
    decode = compile_decode(config, mesh, WORK)
    assert decode.arguments == pytest.approx(plan.arguments["decode"], rel=0.02)
    with pytest.raises(ValueError, match="topology='v5p:3x3': libtpu knows no such slice"):
        planning.Topology.parse("v5p:3x3").devices()
