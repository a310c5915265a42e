"""XLA's own account of the real steps, on eight virtual devices and for described chips."""

import dataclasses
import importlib.util

import jax
import pytest

from rljax import mesh as meshes
from rljax import models, planning
from rljax.planning.compile import Compared, compile_decode, compile_update

CONFIG = models.decoder(
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
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


def planned(topology, sizes):
    machine = planning.Topology.parse(topology)
    mesh = meshes.make_abstract(machine.num_chips, **sizes)
    return planning.plan(CONFIG, machine, mesh, WORK)


def within(a, b, share):
    return abs(a - b) <= share * b


def test_the_train_step_agrees_with_the_estimate():
    sizes = {"fsdp": 4, "expert": 2}
    plan = planned("v5p:8", sizes)
    compiled = compile_update(CONFIG, meshes.make(**sizes), WORK)
    assert within(compiled.arguments, plan.arguments["train"], 0.02)
    # What is donated comes back in place.
    assert within(compiled.aliases, plan.arguments["train"], 0.02)
    assert compiled.temporaries > plan.layout.totals["gradients"]
    sent = {(c.kind, c.axis): c.bytes for c in compiled.collectives}
    estimated = {(c.kind, c.axis): c.bytes for c in plan.layout.collectives}
    gathered = sum(n for (kind, axis), n in sent.items() if kind == "all-gather")
    assert gathered > 0.5 * estimated["all-gather", "fsdp"]
    print(compiled, estimated)
    text = str(Compared(plan, compiled))
    assert "train step: compiled in" in text and "all-gather" in text


def test_the_decode_step_agrees_with_the_estimate():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    plan = planned("v5p:8", sizes)
    compiled = compile_decode(CONFIG, meshes.make(**sizes), WORK)
    print(compiled)
    assert within(compiled.arguments, plan.arguments["decode"], 0.02)
    # The pool is donated.
    assert within(compiled.aliases, plan.rollout["KV pool"], 0.02)
