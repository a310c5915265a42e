"""What every process of several does in test_processes.py: `process_checks.py ADDRESS N I DIR`."""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rljax import mesh as meshes
from rljax import models, processes
from rljax.config import OptimizerSettings, ProcessSettings
from rljax.losses import grpo
from rljax.rewards.shared import SharedScorer
from rljax.training import state as states
from rljax.training.checkpoints import Checkpoints
from rljax.training.optimizer import make_optimizer
from rljax.training.state import RunState

CONFIG = models.decoder(
    vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, num_experts=4
)


def raises(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def check_exchange(place, number):
    assert processes.exchange("x" * (1 + 300 * place)) == [
        "x" * (1 + 300 * i) for i in range(number)
    ]
    items = list(range(7))
    assert [i for part in processes.exchange(items[processes.share(7)]) for i in part] == items
    assert processes.on_first(lambda: place) == 0
    assert raises(processes.on_first, int, "no number").startswith("invalid literal")
    processes.agree({"steps": 4})
    told = raises(processes.agree, {"seed": 0, "steps": 4 + place})
    assert told.startswith("process 0 has steps=4, process 1 steps=5; start all processes")


def check_arrays(mesh):
    x = np.arange(48).reshape(8, 6)
    for spec in (P(), P("fsdp"), P(None, "expert"), P(("fsdp", "expert"))):
        there = processes.put(x, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(processes.fetch({"x": there, "y": 1})["x"], x)
    rows = meshes.shard_rows(x, mesh)
    assert not rows.is_fully_addressable
    assert len(rows.addressable_shards) == 4  # this process's own part


def check_scores(place, number, folder):
    """A function that says something else in every process, and fails in the last one alone."""
    with SharedScorer([f"{folder}/reward.py:where"], timeout_s=2) as scorer:
        size = 6
        scores = scorer(["?"] * size, list("abcdeX"), [[1]] * size, {})
        assert [*map(bool, scores.valid)] == [True] * 5 + [False]
        own = scores.scores[processes.share(size)][:2]
        assert (own == own[0]).all()
        assert len(set(scores.scores[:5].tolist())) == number  # each scored its part
        for other in processes.exchange((scores.rewards.tolist(), scores.failures)):
            assert other == (scores.rewards.tolist(), scores.failures)
        assert "took longer than 2 s" in scores.failures[0]
        assert scores.failures[0].startswith("where, sample 5: ")


def check_checkpoints(mesh, folder):
    optimizer, objective = make_optimizer(OptimizerSettings(), 9), grpo()
    state = states.create(
        models.init(jax.random.key(0), CONFIG, mesh=mesh), optimizer, objective, mesh
    )
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    checkpoints.save(RunState(state, step=1))
    later = jax.tree.map(processes.run_serially(jax.jit(lambda x: x + 1)), state)
    checkpoints.save(RunState(later, step=2))
    checkpoints.close()

    def restored():
        again = Checkpoints(folder / "checkpoints", keep=3)
        found = again.restore(states.abstract(CONFIG, optimizer, objective, mesh))
        again.close()
        return found

    def same(a, b):
        assert a.sharding == b.sharding
        for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, other.data)

    found, host = restored()
    assert host["step"] == 2
    jax.tree.map(same, found, later)
    if processes.is_first():
        for file in (folder / "checkpoints" / "2" / "state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"damaged")
    processes.exchange(None)
    found, host = restored()
    assert host["step"] == 1
    jax.tree.map(same, found, state)
    return state


def check_export(state, folder):
    models.save_pretrained(folder / "export", CONFIG, state.params)
    _, read = models.from_pretrained(folder / "export")
    jax.tree.map(np.testing.assert_array_equal, read, processes.fetch(state.params))


def main(address, number, place, folder):
    settings = ProcessSettings(address, number, place, heartbeat_timeout=20)
    processes.initialize(settings)
    assert (jax.process_count(), jax.process_index(), len(jax.devices())) == (number, place, 8)
    mesh = meshes.from_flags("fsdp=4,expert=2")
    check_exchange(place, number)
    check_arrays(mesh)
    check_scores(place, number, folder)
    check_export(check_checkpoints(mesh, folder), folder)
    print("all is well")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
