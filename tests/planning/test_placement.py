"""Bytes per device against numbers worked by hand."""

import dataclasses
import math

import jax
import pytest

from rljax import mesh as meshes
from rljax import models, planning

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
)


def row(report, name):
    return next(r for r in report.rows if r.name == name)


@pytest.mark.smoke
def test_sixteen_bytes_a_parameter_eighteen_with_micro_batches():
    assert planning.bytes_per_parameter() == {
        "master weights": 4,
        "optimizer moments": 8,
        "gradients": 2,
        "compute weights": 2,
    }
    assert sum(planning.bytes_per_parameter(parts=2).values()) == 18
    assert sum(planning.bytes_per_parameter(itemsize=4).values()) == 16


@pytest.mark.smoke
def test_a_mixture_of_1_6t_takes_25_6_terabytes():
    each = sum(planning.bytes_per_parameter().values())
    assert each * 1.6e12 == 25.6e12
    assert round(25.6e12 / 2**40, 3) == 23.283
    assert 25.6e12 / 80e9 == 320
    report = meshes.describe(meshes.make_abstract(1), models.PRESETS["mixture-1.6t"]())
    assert sum(report.totals.values()) == pytest.approx(25.6e12, rel=0.01)
    assert sum(report.totals.values()) == 16 * report.parameters


def test_a_row_says_where_a_weight_lies():
    mesh = meshes.make_abstract(8, fsdp=2, expert=2, tensor=2)
    report = meshes.describe(mesh, CONFIG)
    gate = row(report, "stacks/0/0/feed_forward/gate")
    assert gate.shape == (2, 4, 16, 12)
    assert gate.axes == ("layers", "experts", "embed", "mlp")
    assert gate.spec == (None, "expert", "fsdp", "tensor")
    assert gate.shard == (2, 2, 8, 6)
    assert gate.bytes() == {
        "master weights": 768,
        "optimizer moments": 1536,
        "gradients": 384,
        "compute weights": 384,
    }
    # A norm is whole everywhere, and in float32 when computed with.
    norm = row(report, "stacks/0/0/attention_norm")
    assert (norm.shard, norm.itemsize) == ((2, 16), 4)
    assert norm.bytes() == {
        "master weights": 128,
        "optimizer moments": 256,
        "gradients": 128,
        "compute weights": 0,
    }


def test_totals_add_up_and_the_mesh_may_be_of_devices():
    abstract = meshes.describe(meshes.make_abstract(8, fsdp=4, tensor=2), CONFIG)
    report = meshes.describe(meshes.make(fsdp=4, tensor=2), CONFIG)
    assert report == abstract
    whole = sum(math.prod(r.shape) for r in report.rows)
    assert report.parameters == whole == models.count(CONFIG)
    held = sum(r.shard_size for r in report.rows)
    assert report.totals["master weights"] == 4 * held
    assert report.totals["optimizer moments"] == 8 * held
    params = models.init(jax.random.key(0), CONFIG, mesh=meshes.make(fsdp=4, tensor=2))
    device = jax.devices()[3]
    there = sum(
        s.data.nbytes
        for x in jax.tree.leaves(params)
        for s in x.addressable_shards
        if s.device == device
    )
    assert report.totals["master weights"] == there


def test_what_a_step_sends():
    # One mini-batch of 16 rows of 32 tokens, in two micro-batches; weights travel in 2 bytes.
    work = planning.Work(
        prompts_per_step=4, num_generations=4, max_prompt_length=16, max_completion_length=16,
        mini_batch_size=16, micro_batch_size=1, slots=8,
    )  # fmt: skip
    report = meshes.describe(meshes.make_abstract(16, fsdp=4, expert=2, tensor=2), CONFIG, work)
    sent = {(c.kind, c.axis): c.bytes for c in report.collectives}
    assert report.parts == 2
    # The embedding is looked up on the devices that hold it. Gradients of experts and of the
    # vocabulary add up in 4 bytes.
    split = [r for r in report.rows if "fsdp" in r.spec and r.name != "embed"]
    wide = {r.name: 4 if {"experts", "vocab"} & set(r.axes) else r.itemsize for r in report.rows}
    assert set(wide.values()) == {2, 4}
    assert (
        sent["all-gather", "fsdp"]
        == 2 * 2 * sum(r.shard_size * 4 * r.itemsize for r in split) * 3 // 4
    )
    gradients = sum(r.shard_size * 4 * wide[r.name] for r in split)
    assert sent["reduce-scatter", "fsdp"] == 2 * gradients * 3 // 4
    for axis, ring in {"fsdp": 2 * 3 / 4, "expert": 2 / 2}.items():
        whole = sum(r.shard_size * wide[r.name] for r in report.rows if axis not in r.spec)
        assert sent["all-reduce", axis] == 2 * ring * whole
    # 2 micro-batches × (forward, backward) × 1 row of 32 tokens × 16 numbers of 2 bytes; a ring
    # over two devices sends each byte once, and one over four three quarters.
    states = 2 * 2 * 32 * 16 * 2
    assert sent["all-to-all", "fsdp"] == states * 3 // 4
    # Each device hears of the other's tokens, and answers in 4 bytes.
    assert sent["all-gather", "expert"] == 2 * states
    assert sent["reduce-scatter", "expert"] == 2 * 2 * states
    assert sent["all-reduce", "tensor"] == 5 * states
    assert all(c.why for c in report.collectives)
    # A token may travel to 2 of 4 devices instead, there and back.
    config = dataclasses.replace(CONFIG, expert_dispatch="all_to_all")
    report = meshes.describe(meshes.make_abstract(8, expert=4, context=2), config, work)
    sent = {(c.kind, c.axis): c.bytes for c in report.collectives}
    assert report.parts == 4
    passes = 4 * 2 * 16 * 16 * 2  # as above, of half a row
    assert sent["all-to-all", "expert"] == 2 * 2 * (1 + 2) * passes * 3 // 4
    # 2 layers × keys and values × 2 heads × 4 numbers of 32 tokens.
    numbers = 4 * 2 * 2 * 2 * 4 * 32
    # Two rounds of half of them, forward and backward, with gradients in 4 bytes.
    assert sent["collective-permute", "context"] == 2 * numbers // 2 * (2 + 2 + 4)
    # Gathered instead where all scores are computed at once.
    config = dataclasses.replace(config, attention_backend="reference")
    report = meshes.describe(meshes.make_abstract(8, expert=4, context=2), config, work)
    sent = {(c.kind, c.axis): c.bytes for c in report.collectives}
    assert sent["all-gather", "context"] == 2 * numbers // 2
    assert sent["reduce-scatter", "context"] == 4 * numbers // 2
    # Replicas add up all their gradients.
    replicas = meshes.describe(meshes.make_abstract(2, data=2), CONFIG)
    (only,) = replicas.collectives
    assert (only.kind, only.axis) == ("all-reduce", "data")
    assert only.bytes == sum(r.shard_size * wide[r.name] for r in replicas.rows)


def test_what_stages_hold_and_send():
    """Five layers on two stages: four in the pipeline, stored along embed, and one left over."""
    layer = CONFIG.stacks[0].pattern
    deep = dataclasses.replace(CONFIG, stacks=(models.Stack(layer, 5), models.Stack(layer, 2)))
    work = planning.Work(
        prompts_per_step=4, num_generations=2, max_prompt_length=16, max_completion_length=16,
        mini_batch_size=8, micro_batch_size=0, slots=4,
    )  # fmt: skip
    report = meshes.describe(meshes.make_abstract(2, stage=2), deep, work)
    gates = [row(report, f"stacks/{i}/0/feed_forward/gate") for i in range(2)]
    assert [g.spec for g in gates] == [(None, None, "stage", None), ("stage", None, None, None)]
    assert [g.shard for g in gates] == [(5, 4, 8, 12), (1, 4, 16, 12)]
    # Each device has 4 rows, which go on their way one by one: 8 micro-batches.
    first, second = report.schedules
    assert (first.layers, first.repeats, first.depth, first.micro_batches) == (4, 1, 2, 8)
    assert (second.layers, second.turns, second.bubble) == (2, 9, 1 / 9)
    sent = {(c.kind, c.why.split(",")[0].split()[0]): c.bytes for c in report.collectives}
    # Hidden states of a row: 32 tokens × 16 numbers of 2 bytes; both ways, in both stacks.
    assert sent["collective-permute", "hidden"] == 2 * 2 * 9 * 32 * 16 * 2
    assert sent["all-gather", "rows"] == 2 * 4 * 32 * 16 * 2
    split = [r for r in report.rows if r.name.startswith("stacks/0") and r.mesh_axes]
    assert sent["all-to-all", "layers"] == 2 * 4 * sum(r.shard_size for r in split) * 4 // 5 // 2
    assert (
        sent["all-gather", "weights"]
        == 2 * 2 * sum(r.shard_size * r.itemsize for r in split) // 5 // 2
    )
    assert "Layers as a pipeline" in str(report) and "11%" in str(report)
    # Twice round with half the layers each time: waiting is shorter.
    twice = meshes.describe(
        meshes.make_abstract(2, stage=2), dataclasses.replace(deep, pipeline_repeats=2), work
    )
    assert twice.schedules[0].bubble == 1 / 17


def test_a_report_shows_itself():
    report = meshes.describe(meshes.make_abstract(8, fsdp=4, expert=2), CONFIG)
    text, page = str(report), report._repr_html_()
    for part in ("stacks/0/0/attention/q", "2×4×16×12", "reduce-scatter", "optimizer moments"):
        assert part in text and part in page
    assert "<table>" in page


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 8},
            "attention/k: axis 'kv_heads' of size 2 does not divide over mesh axis tensor=8; the "
            "nearest that divide it: tensor=2$",
        ),
        ({"expert": 8}, "feed_forward/down: axis 'experts' of size 4 .* divide it: expert=4$"),
    ],
)
def test_what_does_not_divide_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.describe(meshes.make_abstract(8, **sizes), CONFIG)


def test_a_picture_shows_devices_and_shards():
    import matplotlib

    matplotlib.use("Agg")
    mesh = meshes.make_abstract(8, data=2, fsdp=2, expert=2)
    figure = meshes.draw(mesh, CONFIG, "feed_forward/gate")
    devices, weight = (axes.images[0].get_array() for axes in figure.axes)
    # Devices of both data shards hold the same four shards.
    assert devices.tolist() == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert weight.tolist() == [[0, 1], [2, 3]]
    assert "4 shard(s) of 2×2×8×12" in figure.axes[1].get_title()
    matplotlib.pyplot.close(figure)
    with pytest.raises(ValueError, match="parameter 'nothing' is not one of the model's"):
        meshes.draw(mesh, CONFIG, "nothing")
