"""Plans: machines, memory, times, the search, and the command."""

import dataclasses
import importlib.util
import sys

import pytest

from experiments import plan as command
from rljax import mesh as meshes
from rljax import models, planning
from rljax.errors import MissingDependencyError
from rljax.planning import memory

CONFIG = models.decoder(
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=12,
    num_experts=4,
    tie_embeddings=False,
    dtype="bfloat16",
    remat=True,
)
WORK = planning.Work(
    prompts_per_step=4,
    num_generations=2,
    max_prompt_length=16,
    max_completion_length=16,
    mini_batch_size=8,
    slots=8,
    page_size=8,
)
DEEPSEEK = models.PRESETS["deepseek-v3"]()


def make(topology="v5p:8", config=CONFIG, work=WORK, experts=("expert",), **sizes):
    machine = planning.Topology.parse(topology)
    mesh = meshes.make_abstract(machine.num_chips, **sizes)
    rules = {**meshes.ROLLOUT_RULES, "experts": experts}
    return planning.plan(config, machine, mesh, work, rollout_rules=rules)


def test_topologies():
    pod = planning.Topology.parse(" V5P:8x8x16")
    assert (pod.name, pod.num_chips, pod.chip.memory) == ("v5p:8x8x16", 1024, 95 * 2**30)
    assert planning.Topology.parse("h100:64").num_chips == 64
    for text, message in [
        ("v9:4", "chip 'v9' is unknown; the chips are v5e, v5p, v6e, h100, h200, b200"),
        ("v5p", "'' is not a grid of chips; write v5p:4x4 or v5p:16"),
        ("v5p:4x", "'4x' is not a grid"),
        ("v5p:0", "'0' is not a grid"),
    ]:
        with pytest.raises(ValueError, match=message):
            planning.Topology.parse(text)
    with pytest.raises(ValueError, match="described TPUs only; leave out compile"):
        planning.Topology.parse("h100:8").devices()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_the_error_says_how_to_install_it():
    with pytest.raises(
        MissingDependencyError, match=r"libtpu, which is not installed .* install the extra tpu"
    ):
        planning.Topology.parse("v5p:2x2x1").devices()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 0}, "num_generations=0 must be at least 1"),
        ({"mini_batch_size": 3}, "mini_batch_size=3 must divide the 1024 responses"),
    ],
)
def test_work_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        planning.Work(**fields)


def test_memory_by_hand():
    plan = make(fsdp=2, expert=2, tensor=2)
    # 2 layers × k and v × 4 tokens a page ... : pages hold twice the slots at full length.
    tokens = 2 * 4 * 8 * 8
    assert memory.kv_bytes(CONFIG, tokens) == tokens * 2 * 2 * 2 * 4 * 2
    assert plan.update["KV pool"] == plan.rollout["KV pool"] == tokens * 64 // 8
    # 1 row of 32 tokens a device and micro-batch.
    assert plan.update["inputs of layers, kept for the backward pass"] == 2 * 32 * 16 * 2
    assert plan.update["attention scores"] == 4 * 4 * 4 * 32 * 32 // 2
    # While sampling, weights are whole on each fsdp shard.
    sampler = sum(
        r.shard_size * r.itemsize * (2 if "fsdp" in r.spec else 1) for r in plan.sharding.rows
    )
    assert plan.rollout["sampler's weights"] == sampler
    kept = plan.sharding.totals["master weights"] + plan.sharding.totals["optimizer moments"]
    # 11 numbers of 4 bytes and 2 truths of each token, and the 2 experts of 2 layers.
    rows = 8 // 4 * 32 * (4 * 11 + 2 + 2 * 2 * 4)
    assert plan.update["rows of a mini-batch"] == rows
    assert plan.arguments == {"train": kept + rows, "decode": sampler + plan.rollout["KV pool"]}
    assert plan.resident == {"train": plan.update["KV pool"], "decode": kept}
    # In float32 and without fsdp the sampler uses the trainer's very buffers.
    single = dataclasses.replace(CONFIG, dtype="float32")
    shared = make(config=single, data=8)
    assert shared.rollout["sampler's weights"] == 0
    assert shared.resident["decode"] == shared.sharding.totals["optimizer moments"]
    assert make(config=single, fsdp=8).rollout["sampler's weights"] > 0


def test_experts_over_more_axes_while_sampling():
    narrow, wide = (
        make(fsdp=2, expert=2, tensor=2, experts=e) for e in ("expert", ("fsdp", "expert"))
    )
    # 3 matrices of 4 experts a layer, in bfloat16: a half or a quarter of the experts.
    experts = 2 * 3 * 4 * 16 * 12 * 2 // 2
    saved = narrow.rollout["sampler's weights"] - wide.rollout["sampler's weights"]
    assert saved == experts // 2 - experts // 4
    assert wide.update == narrow.update and wide.update_time == narrow.update_time
    assert wide.rollout_time.links > narrow.rollout_time.links
    assert wide.rollout_time.memory < narrow.rollout_time.memory
    assert wide.rollout_time.compute == narrow.rollout_time.compute


def test_moments_on_the_host():
    machine = planning.Topology.parse("v5p:8")
    given = CONFIG, machine, meshes.make_abstract(8, fsdp=8), WORK
    here, there = planning.plan(*given), planning.plan(*given, on_host=True)
    moments = here.sharding.totals["optimizer moments"]
    assert (here.on_host, there.on_host) == (0, moments)
    for phase in ("update", "rollout"):
        assert sum(getattr(here, phase).values()) - sum(getattr(there, phase).values()) == moments
    assert here.arguments["train"] - there.arguments["train"] == moments
    assert "in the host's memory" in str(there)


def test_times_by_hand():
    """A dense model, whose operations are 2 for each active weight and token."""
    config = models.PRESETS["qwen2.5-7b"]()
    work = planning.Work(
        prompts_per_step=8, num_generations=8, max_prompt_length=1, max_completion_length=255,
        mini_batch_size=64, slots=64,
    )  # fmt: skip
    plan = make("h100:8", config, work, fsdp=8)
    chip = planning.CHIPS["h100"]
    weights = models.count(config) - 152_064 * 3584  # the embedding is looked up
    tokens = 64 * 256 / 8
    forward = 2 * weights * tokens + 28 * 4 * tokens * 256 * 3584
    assert plan.update_time.compute == pytest.approx(4 * forward / chip.flops, rel=2e-3)
    sent = sum(c.bytes for c in plan.sharding.collectives)
    assert plan.update_time.links == sent / chip.link_bandwidth
    # Each of the 255 decode steps reads all weights.
    assert plan.rollout_time.memory > 255 * 2 * weights / chip.memory_bandwidth
    assert plan.rollout_time.bound == "memory"
    assert plan.seconds == plan.rollout_time.seconds + plan.update_time.seconds


def test_deepseek_v3_on_a_thousand_chips():
    plan = make("v5p:8x8x16", DEEPSEEK, planning.Work(), fsdp=64, expert=16)
    assert round(plan.sharding.parameters / 1e9) == 671
    # XLA's arguments for this mesh are 10.90 GB.
    assert plan.arguments["train"] == pytest.approx(10.90e9, rel=0.005)
    assert sum(plan.update.values()) < plan.topology.chip.memory
    assert not plan.fits  # the sampler's weights are split over `expert` only
    assert "NO" in str(plan)
    sizes = {"data": 2, "fsdp": 32, "expert": 8, "tensor": 2}
    wide = make("v5p:8x8x16", DEEPSEEK, planning.Work(), experts=("fsdp", "expert"), **sizes)
    assert wide.fits
    assert max(wide.resident.values()) < 20e9


def test_search_ranks_what_fits():
    machine = planning.Topology.parse("v5p:8")
    plans = planning.search(CONFIG, machine, WORK)
    assert len(plans) > 5
    assert all(p.fits for p in plans)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    # Nothing that does not divide: 2 KV heads, 4 experts.
    assert all(p.sharding.mesh.get("tensor", 1) <= 2 for p in plans)
    assert all(p.sharding.mesh.get("expert", 1) <= 4 for p in plans)
    best = plans[0].sharding.mesh
    assert ",".join(f"{k}={v}" for k, v in best.items()) in str(planning.ranking(plans))
    assert any("context" in p.sharding.mesh for p in plans)
    dense = planning.search(models.PRESETS["speed-s"](), machine, WORK)
    assert all("expert" not in p.sharding.mesh for p in dense)


@pytest.mark.parametrize(
    ("config", "topology", "message"),
    [
        (DEEPSEEK, "v5e:16", "no mesh of v5e:16 .16 GB a chip. holds it: the least is"),
        (
            CONFIG,
            "v5p:7",
            "no mesh of v5p:7 .* holds it: 1024 responses of an update do not divide",
        ),
    ],
)
def test_search_refuses(config, topology, message):
    with pytest.raises(ValueError, match=message):
        planning.search(config, planning.Topology.parse(topology), planning.Work())


def test_search_hides_no_fault(monkeypatch):
    """It skips the meshes that the user's sizes do not divide over, and nothing else."""

    def broken(*_):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(sys.modules["rljax.planning.search"], "plan", broken)
    with pytest.raises(ValueError, match=r"^a fault of ours$"):
        planning.search(CONFIG, planning.Topology.parse("v5p:8"), WORK)


def run(monkeypatch, capsys, *flags):
    # The command changes both; monkeypatch restores them after the test.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setattr(sys, "argv", ["plan", *flags])
    status = command.main()
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_prints_a_plan(monkeypatch, capsys):
    flags = ("--model=tiny-moe", "--topology=v5e:2x4", "--mesh=fsdp=4,expert=2", "--layout")
    status, out, _ = run(monkeypatch, capsys, *flags)
    assert status == 0
    for part in ("stacks/0/0/attention/q", "on 8 v5e (fsdp=4, expert=2)", "KV pool", "bound by"):
        assert part in out
    rules = "--rollout_rules=experts=fsdp+expert"
    status, wide, _ = run(monkeypatch, capsys, *flags[:2], "--mesh=data=2,fsdp=2,expert=2", rules)
    assert status == 0 and wide != out
    status, out, _ = run(monkeypatch, capsys, *flags[:2], "--search", "--moments_on_host")
    assert status == 0 and "meshes fit; the fastest by estimate" in out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--modle=x", "flag --modle is unknown; did you mean --model?"),
        ("--model=x", "model='x' is unknown; the models are tiny-moe,"),
        ("--topology=x:1", "topology='x:1': chip 'x' is unknown"),
        ("--mesh=fsdp=3", "mesh fsdp=3 needs 3 devices, got 1024"),
        ("--mesh=fsdp=2,tensor=512", "embed: axis 'vocab' of size 129280 does not divide over"),
        (
            "--mesh=data=1024 --mini_batch_size=32",
            "32 responses of an update do not divide over stage×data×fsdp×expert = 1024",
        ),
        ("--mesh=data=1024 --slots=1", "do not divide over stage×data×fsdp×expert = 1024"),
        ("--rollout_rules=experts=row", "rules flag 'experts=row': mesh axis 'row' is unknown"),
        ("--dtype=int8", "dtype"),
        ("", "fsdp=512 (without --mesh all chips are on fsdp; --search lists meshes that fit)"),
    ],
)
def test_the_command_refuses_in_one_line(monkeypatch, capsys, flags, line):
    status, out, err = run(monkeypatch, capsys, *flags.split())
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert line in err
