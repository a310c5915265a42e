"""Plans: machines, memory, times, the search, and the command."""

import dataclasses
import importlib.util
import sys

import pytest

from experiments import plan as command
from rljax import mesh as meshes
from rljax import models, planning
from rljax.errors import MissingDependencyError
from rljax.planning import attention, memory

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
    remat="layer",
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
        ("v9:4", "chip 'v9' is unknown; the chips are v5e, v5p, v6e, a100, h100, h200, b200"),
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
    # 2 query heads and 1 key head of 4 numbers, and 2 softmax sums: in bfloat16 forward, with
    # outputs; backward the gradients of the same, which add up in float32.
    q, kv, out = 32 * 2 * 4, 32 * 2 * 4, 32 * 2 * 4
    forward = 2 * (q + kv + out) + 4 * 32 * 2
    # So few scores are computed all at once, forward and backward with their softmax.
    square = 2 * 4 * 32 * 2 * 32
    assert plan.attention == ("reference",)
    assert plan.update["attention"] == forward + 6 * (q + kv) + 2 * out + 2 * square
    assert plan.score["attention"] == forward + square
    # The output matrix in bfloat16, and twice in float32: the gradient of a chunk, and their sum.
    assert plan.update["output matrix, gathered, and its gradient"] == (2 + 2 * 4) * 64 * 16 // 2
    numbers = sum(r.shard_size for r in plan.sharding.rows)
    assert plan.update["gradients of a micro-batch"] == 4 * numbers
    assert make(data=8).update["gradients of a micro-batch"] == 0
    # While sampling, weights are whole on each fsdp shard.
    sampler = sum(
        r.shard_size * r.itemsize * (2 if "fsdp" in r.spec else 1) for r in plan.sharding.rows
    )
    assert plan.rollout["sampler's weights"] == sampler
    kept = plan.sharding.totals["master weights"] + plan.sharding.totals["optimizer moments"]
    # 11 numbers of 4 bytes and 2 truths of each token, and the 2 experts of 2 layers.
    rows = 8 // 4 * 32 * (4 * 11 + 2 + 2 * 2 * 4)
    assert plan.update["rows of a mini-batch"] == rows
    # Scoring reads tokens, masks, groups, rewards, positions, segments, experts.
    batch = 8 // 4 * (32 * (4 * 3 + 1 + 2 * 2 * 4) + 4 * 2)
    assert plan.score["sampled batch"] == batch
    pool, weights = plan.rollout["KV pool"], plan.sharding.totals["master weights"]
    output = 64 * 16 * 2 // 2  # which prefill does not need
    sampling = {"prefill": sampler + pool - output, "decode": sampler + pool}
    assert plan.arguments == {"train": kept + rows, "score": weights + batch, **sampling}
    moments = plan.sharding.totals["optimizer moments"]
    assert plan.resident == {
        "train": pool,
        "score": moments + pool,
        "prefill": kept + output,
        "decode": kept,
    }
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
    forward = 2 * weights * tokens
    # By blocks half of the square is computed, and backward the scores once more.
    attention = 28 * 4 * tokens * 128 * 3584
    assert plan.attention == ("triton",)
    compute = 4 * forward + 4.5 * attention
    assert plan.update_time.compute == pytest.approx(compute / chip.flops, rel=2e-3)
    sent = sum(c.bytes for c in plan.sharding.collectives)
    assert plan.update_time.links == sent / chip.link_bandwidth
    # Each of the 255 decode steps reads all weights.
    assert plan.rollout_time.memory > 255 * 2 * weights / chip.memory_bandwidth
    assert plan.rollout_time.bound == "memory"
    assert plan.seconds == plan.rollout_time.seconds + plan.update_time.seconds
    # Of two updates the second needs scores of the policy at the start.
    twice = make("h100:8", config, dataclasses.replace(work, mini_batch_size=32), fsdp=8)
    assert twice.score_time.compute == pytest.approx((forward + attention) / chip.flops, rel=2e-3)
    assert twice.seconds > twice.rollout_time.seconds + 2 * twice.update_time.seconds


LONG = dataclasses.replace(WORK, max_completion_length=2**14 - 16)


def test_attention_of_long_rows_grows_with_their_tokens():
    twice = dataclasses.replace(LONG, max_completion_length=2**15 - 16)
    for topology, name in (("v5p:8", "pallas"), ("h100:8", "triton")):
        short, long = (make(topology, work=work, fsdp=8) for work in (LONG, twice))
        assert short.attention == long.attention == (name,)
        for phase in ("update", "score"):
            held, more = (getattr(p, phase)["attention"] for p in (short, long))
            assert more == 2 * held
    # All scores at once are a square; they are asked for by name.
    config = dataclasses.replace(CONFIG, attention_backend="reference")
    held, more = (make(config=config, work=work, fsdp=8) for work in (LONG, twice))
    assert more.update["attention"] > 3.9 * held.update["attention"]
    # Half of them are computed by blocks: the keys before a query.
    square = operations(config, LONG)
    assert operations(CONFIG, LONG) == pytest.approx(square / 2)
    blocks = tuple(
        dataclasses.replace(b, attention=dataclasses.replace(b.attention, window=2**10))
        for b in CONFIG.stacks[0].pattern
    )
    window = dataclasses.replace(CONFIG, stacks=(models.Stack(blocks, 2),))
    assert operations(window, LONG) == pytest.approx(square / 16, rel=0.05)


def operations(config, work, **sizes):
    return attention.operations(
        meshes.make_abstract(8, **sizes or {"fsdp": 8}), config, work, "tpu"
    )


def test_keys_go_round_where_rows_are_split():
    whole, split = (make(work=LONG, fsdp=8 // n, context=n) for n in (1, 4))
    # A quarter of the queries, and what is worked on and what comes of the keys.
    assert split.update["attention"] < whole.update["attention"] / 2
    key = "inputs of layers, kept for the backward pass"
    assert split.update[key] == whole.update[key] // 4
    sent = {(c.kind, c.axis): c.bytes for c in split.sharding.collectives}
    # Four rounds: 2 layers × 2 heads × 8 numbers of the device's tokens, in bfloat16 forward,
    # recomputed and backward, and gradients in float32; in 4 micro-batches.
    numbers = 2 * 2 * 8 * 2**14 // 4
    assert sent["collective-permute", "context"] == 4 * 4 * numbers * (3 * 2 + 4)
    # The device with the ends of rows sees 7/8 of their keys on average.
    each = operations(CONFIG, LONG, fsdp=2, context=4) * 4
    assert each == pytest.approx(operations(CONFIG, LONG) * 2 * 7 / 8)


def test_what_is_recomputed_is_not_kept():
    def held(remat):
        config = dataclasses.replace(CONFIG, remat=remat)
        plan = make(config=config, work=LONG, fsdp=8)
        return plan, sum(n for kind, n in plan.update.items() if kind in KINDS)

    KINDS = (memory.INPUTS, memory.ATTENTION, memory.FEED_FORWARD)
    (none, most), (layer, little), (kept, more) = map(held, ("none", "layer", "attention"))
    assert most > 1.9 * little and little < more < most
    assert none.update_time.compute < kept.update_time.compute < layer.update_time.compute
    # The inputs of layers wait in the host's memory.
    waiting, least = held("offload")
    assert little - least == waiting.on_host == layer.update[memory.INPUTS]


def test_packed_rows():
    """Responses of a quarter of the longest: an eighth of the rows' tokens would be theirs."""
    work = dataclasses.replace(LONG, mean_completion_length=2**12 - 16, micro_batch_tokens=2**14)
    padded, packed = make(work=LONG, data=2, fsdp=4), make(work=work, data=2, fsdp=4)
    assert work.row_length == LONG.length and work.mean_length == 2**12
    mesh = meshes.make_abstract(2, data=2)
    assert LONG.parts(mesh) == 4 * work.parts(mesh) == 4
    assert packed.update[memory.INPUTS] == padded.update[memory.INPUTS]
    two = {w: make("v5p:2", work=w, data=2) for w in (LONG, work)}
    assert two[LONG].update_time.compute > 4 * two[work].update_time.compute
    with pytest.raises(ValueError, match="mean_completion_length=99 exceeds max_completion_length"):
        planning.Work(max_completion_length=98, mean_completion_length=99)


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
        (
            "--mesh=data=1024 --attention_backend=triton",
            "attention_backend='triton': it is for gpu, not for tpu; use auto",
        ),
        ("", "fsdp=512 (without --mesh all chips are on fsdp; --search lists meshes that fit)"),
    ],
)
def test_the_command_refuses_in_one_line(monkeypatch, capsys, flags, line):
    status, out, err = run(monkeypatch, capsys, *flags.split())
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert line in err
