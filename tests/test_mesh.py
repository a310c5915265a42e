"""The mesh, its rule tables, and what they refuse."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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
)


def test_make_has_all_axes_of_type_auto():
    mesh = meshes.make(data=2, fsdp=4)
    assert mesh.axis_names == meshes.AXES
    assert dict(mesh.shape) == {
        "data": 2,
        "fsdp": 4,
        "expert": 1,
        "context": 1,
        "tensor": 1,
        "stage": 1,
    }
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.ravel()) == jax.devices()
    two = meshes.make(devices=jax.devices()[2:4], tensor=2)
    assert list(two.devices.ravel()) == jax.devices()[2:4]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": 8}, "mesh axis 'model' is unknown; the axes are stage, data, fsdp, expert"),
        ({"data": 0, "fsdp": 8}, "mesh axis data=0 must be at least 1"),
        ({"fsdp": 3, "expert": 2}, "fsdp=3,expert=2 needs 6 devices, got 8; fsdp=4 would fit"),
        ({"fsdp": 3, "expert": 3}, "needs 9 devices, got 8; choose sizes whose product is 8"),
        (
            {"data": 2, "fsdp": 2},
            "mesh data=2,fsdp=2 needs 4 devices, got 8; data=4 or fsdp=4 would fit",
        ),
        ({}, "mesh all axes 1 needs 1 devices, got 8"),
    ],
)
def test_make_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        meshes.make(**sizes)


def test_from_flags():
    assert dict(meshes.from_flags("").shape)["fsdp"] == 8
    mesh = meshes.from_flags(" fsdp=4, expert=2 ")
    assert (mesh.shape["fsdp"], mesh.shape["expert"]) == (4, 2)
    for text, message in [
        ("fsdp", "mesh flag 'fsdp': 'fsdp' is not axis=size"),
        ("fsdp=four", "is not axis=size; write fsdp=4,expert=2"),
        ("fsdp=-8", "is not axis=size"),
        ("fsdp=8,", "'' is not axis=size"),
        ("fsdp=4,fsdp=2", "names axis 'fsdp' twice"),
        ("rows=8", "mesh axis 'rows' is unknown"),
        ("fsdp=3", "mesh fsdp=3 needs 3 devices, got 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            meshes.from_flags(text)


def test_rules_from_flags():
    rules = meshes.read_rules(" experts=expert+fsdp, vocab=", meshes.ROLLOUT_RULES)
    assert rules == {**meshes.ROLLOUT_RULES, "experts": ("expert", "fsdp"), "vocab": None}
    assert meshes.read_rules("", meshes.TRAIN_RULES) == meshes.TRAIN_RULES
    for text, message in [
        ("experts", "rules flag 'experts': 'experts' is not logical axis=mesh axes; write"),
        ("rows=fsdp", "'rows=fsdp' is not .* the logical axes are embed, heads, "),
        ("experts=fsdp+row", "mesh axis 'row' is unknown; the axes are stage, data, fsdp, expert"),
    ]:
        with pytest.raises(ValueError, match=message):
            meshes.read_rules(text, meshes.TRAIN_RULES)


def test_an_abstract_mesh_needs_no_devices():
    mesh = meshes.make_abstract(1024, fsdp=64, expert=16)
    assert dict(mesh.shape) == {**dict.fromkeys(meshes.AXES, 1), "fsdp": 64, "expert": 16}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert meshes.batch_shards(mesh) == 1024
    found = meshes.sharding(mesh, (256, 128), ("experts", "embed"), meshes.TRAIN_RULES)
    assert found.shard_shape((256, 128)) == (16, 2)
    with pytest.raises(ValueError, match="mesh fsdp=3 needs 3 devices, got 1024"):
        meshes.make_abstract(1024, fsdp=3)


@pytest.mark.smoke
def test_sharding_maps_logical_axes_through_the_rules():
    mesh = meshes.make(fsdp=2, expert=2, tensor=2)
    axes = ("layers", "experts", "embed", "mlp")
    found = meshes.sharding(mesh, (3, 4, 8, 6), axes, meshes.TRAIN_RULES)
    assert found.spec == P(None, "expert", "fsdp", "tensor")
    rollout = meshes.sharding(mesh, (3, 4, 8, 6), axes, meshes.ROLLOUT_RULES)
    assert rollout.spec == P(None, "expert", None, "tensor")
    # Several axes split one dimension in the order of the mesh.
    wide = {**meshes.ROLLOUT_RULES, "experts": ("expert", "data", "fsdp")}
    found = meshes.sharding(mesh, (3, 4, 8, 6), axes, wide)
    assert found.spec == P(None, ("fsdp", "expert"), None, "tensor")
    # A mesh axis of size 1 splits nothing, so any size will do.
    assert meshes.sharding(meshes.make(data=8), (3, 4, 7, 5), axes, meshes.TRAIN_RULES).spec == P(
        None, None, None, None
    )


def test_stages_split_layers_or_where_they_do_not_divide_embed():
    mesh = meshes.make(stage=2, fsdp=2, tensor=2)
    axes = ("layers", "embed", "mlp")
    spec = {n: meshes.sharding(mesh, (n, 8, 6), axes, meshes.TRAIN_RULES).spec for n in (4, 3)}
    assert spec == {4: P("stage", "fsdp", "tensor"), 3: P(None, ("fsdp", "stage"), "tensor")}
    # What has no such dimension is whole; so is everything where layers are not to be split.
    norm = meshes.sharding(mesh, (3, 8), ("layers", None), meshes.TRAIN_RULES)
    rollout = meshes.sharding(mesh, (4, 8, 6), axes, meshes.ROLLOUT_RULES)
    assert (norm.spec, rollout.spec) == (P(None, None), P(None, None, "tensor"))
    with pytest.raises(ValueError, match=r"'embed' of size 6 .* fsdp×stage=4; .*fsdp×stage=3 and"):
        meshes.sharding(mesh, (3, 6, 6), axes, meshes.TRAIN_RULES)


@pytest.mark.parametrize(
    ("shape", "axes", "rules", "message"),
    [
        (
            (10, 4),
            ("embed", None),
            meshes.TRAIN_RULES,
            "w: axis 'embed' of size 10 does not divide over mesh axis fsdp=8; the nearest that "
            "divide it: fsdp=5 and fsdp=10",
        ),
        ((8,), ("width",), meshes.TRAIN_RULES, "w: logical axis 'width' has no rule"),
        (
            (8, 16),
            ("embed", "mlp"),
            {"embed": "fsdp", "mlp": "fsdp"},
            "w: mesh axis 'fsdp' would split two dimensions of \\(8, 16\\)",
        ),
        ((8,), ("embed",), {"embed": "rows"}, "w: .*'embed'.*mesh axis 'rows' which is unknown"),
        (
            (4, 16),
            ("experts", "embed"),
            {"experts": ("expert", "fsdp"), "embed": None},
            "w: axis 'experts' of size 4 does not divide over mesh axis fsdp=8; .*: fsdp=4",
        ),
    ],
)
def test_sharding_refuses(shape, axes, rules, message):
    with pytest.raises(ValueError, match=message):
        meshes.sharding(meshes.make(fsdp=8), shape, axes, rules, "w")


def test_every_parameter_has_a_rule_and_a_shard():
    mesh = meshes.make(fsdp=2, expert=2, tensor=2)
    for rules in (meshes.TRAIN_RULES, meshes.ROLLOUT_RULES):
        placed = models.shardings(CONFIG, mesh, rules)
        shapes = models.abstract(CONFIG)
        assert jax.tree.structure(placed) == jax.tree.structure(shapes)
        layer, shape = placed["stacks"][0][0], shapes["stacks"][0][0]
        split = layer["feed_forward"]["gate"].shard_shape(shape["feed_forward"]["gate"].shape)
        assert split == (2, 2, 8 if rules is meshes.TRAIN_RULES else 16, 6)
        heads = layer["attention"]["k"].shard_shape(shape["attention"]["k"].shape)
        assert heads == (2, 8 if rules is meshes.TRAIN_RULES else 16, 1, 4)
    # In the order of the tree: the first parameter that does not fit is named.
    for sizes, message in (
        (
            {"tensor": 8},
            "stacks/0/0/attention/k: axis 'kv_heads' of size 2 does not divide over mesh axis "
            "tensor=8; the nearest that divide it: tensor=2$",
        ),
        (
            {"expert": 8},
            "stacks/0/0/feed_forward/down: axis 'experts' of size 4 does not divide over mesh "
            "axis expert=8; the nearest that divide it: expert=4$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            models.shardings(CONFIG, meshes.make(**sizes))
    attention = models.LatentAttention(4, None, 8, nope_dim=4, rope_dim=4, value_dim=4)
    block = models.Block(attention, models.Dense(8))
    latent = models.ModelConfig(64, 16, (models.Stack((block,), 1),))
    with pytest.raises(ValueError, match=r"axis 'heads' of size 4 .* tensor=8; .* it: tensor=4$"):
        models.shardings(latent, meshes.make(tensor=8))
    twice = {**meshes.TRAIN_RULES, "mlp": "fsdp"}
    with pytest.raises(ValueError, match="feed_forward/down: mesh axis 'fsdp' would split two dim"):
        models.shardings(CONFIG, meshes.make(fsdp=4, tensor=2), twice)


def test_rows_are_split_over_batch_axes():
    mesh = meshes.make(data=2, fsdp=2, tensor=2)
    assert meshes.batch_shards(mesh) == 4 and meshes.batch_shards(None) == 1
    tree = {"a": np.arange(8), "b": np.ones((4, 3))}
    put = meshes.shard_rows(tree, mesh)
    assert put["a"].sharding.shard_shape((8,)) == (2,)
    assert put["b"].sharding.shard_shape((4, 3)) == (1, 3)
    assert np.array_equal(put["a"], tree["a"])
    with pytest.raises(
        ValueError, match="6 rows do not divide over stage×data×fsdp×expert = 4 devices"
    ):
        meshes.shard_rows(np.ones(6), mesh)
    whole = jax.device_put(np.ones(6), meshes.replicated(mesh))
    assert whole.sharding.is_fully_replicated


def test_fit_splits_what_divides():
    assert meshes.fit((8, 12), meshes.BATCH_AXES, "context") == P(None, None)
    with jax.set_mesh(meshes.make(data=2, expert=2, context=2)):
        for shape, spec in {
            (8, 12): P(("data", "expert"), "context"),
            (6, 12): P("data", "context"),  # not over expert: 3 rows are left
            (3, 7): P(None, None),
        }.items():
            assert meshes.fit(shape, meshes.BATCH_AXES, "context") == spec
        assert meshes.axes_of(P(("data", "expert"), None, "context")) == (
            "data", "expert", "context",
        )  # fmt: skip
    assert meshes.axes_of(P()) == ()


def test_constrain_rows():
    x = np.ones((8, 2), np.float32)
    assert meshes.constrain_rows(x) is x
    mesh = meshes.make(data=2, fsdp=4)
    with jax.set_mesh(mesh):
        split = jax.jit(meshes.constrain_rows)(x)
    assert split.sharding.shard_shape((8, 2)) == (1, 2)
    explicit = jax.make_mesh((8,), ("fsdp",))
    with jax.set_mesh(explicit):
        assert meshes.constrain_rows(x) is x


def test_the_mesh_finds_what_planning_shows():
    assert meshes.describe is planning.describe and meshes.draw is planning.draw_shards
    assert {"describe", "draw", "make"} <= set(dir(meshes))
    with pytest.raises(AttributeError, match="has no attribute 'drawing'"):
        meshes.drawing()


def test_the_mesh_alone_imports_neither_models_nor_planning():
    code = (
        "import sys; from rljax import mesh; "
        "print([m for m in sys.modules if m.startswith(('rljax.models', 'rljax.planning'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
