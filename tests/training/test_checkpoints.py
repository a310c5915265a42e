"""What a restore does where checkpoints are whole, damaged, of another run, or unreadable now."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.config import ModelSettings, RunSettings
from rljax.errors import InputError
from rljax.training import checkpoints as module
from rljax.training import run_directory
from rljax.training.checkpoints import Checkpoints, is_damage
from rljax.training.state import Progress, RunState, TrainState

sys.path.insert(0, str(Path(__file__).parent))
from tiny import ROWS, config, half_right, one_device

OWN = {"rewards": [half_right], "prompts": ROWS}


def train_state(value, size=3):
    zero = jnp.int32(0)
    return TrainState(zero, {"w": jnp.full(size, value)}, {"m": jnp.zeros(size)}, zero, zero)


def shapes(size=3):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), train_state(0.0, size)
    )


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2, whose weights are their step."""
    with_steps = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2):
        state = RunState(train_state(float(step)), step, {"digest": "d"}, progress=Progress(5.0))
        with_steps.save(state)
    with_steps.close()
    return tmp_path


def restore(directory, size=3, **options):
    opened = Checkpoints(directory / "checkpoints", keep=3)
    try:
        return opened.restore(shapes(size), **options)
    finally:
        opened.close()


def damage(directory, *steps):
    for step in steps:
        for file in (directory / "checkpoints" / str(step) / "state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"damaged")


def names(directory):
    return sorted(p.name for p in (directory / "checkpoints").iterdir() if p.name.isdigit())


def test_the_newest_is_restored_with_what_the_host_knew(saved):
    train, host = restore(saved)
    np.testing.assert_array_equal(train.params["w"], [2.0] * 3)
    state = RunState.restored(train, host, [])
    assert (state.step, state.data, state.progress.seconds) == (2, {"digest": "d"}, 5.0)


def test_what_the_version_before_wrote_is_read():
    host = {
        "step": 3, "seconds": 5.0, "eval_before": 0.1, "eval_last": 0.2, "best": 0.2, "passed": 1,
        "collect": {"degenerate_rate": 0.3, "surplus": []}, "data": {"digest": "d"},
    }  # fmt: skip
    state = RunState.restored(train_state(0.0), host, [])
    assert (state.step, state.collect.degenerate_rate) == (3, 0.3)
    assert state.progress == Progress(5.0, 0.1, 0.2, 0.2)


def test_without_checkpoints_there_is_nothing_to_restore(tmp_path):
    assert restore(tmp_path) is None


def test_a_damaged_newest_one_is_set_aside_once_the_one_before_was_read(saved, caplog):
    damage(saved, 2)
    train, host = restore(saved)
    assert host["step"] == 1
    np.testing.assert_array_equal(train.params["w"], [1.0] * 3)
    assert names(saved) == ["1"]
    assert [p.name[:12] for p in saved.glob("unreadable-*")] == ["unreadable-2"]
    assert "checkpoint of step 2 cannot be read" in caplog.text


def test_where_all_are_damaged_the_run_stops_and_nothing_is_renamed(saved):
    damage(saved, 1, 2)
    with pytest.raises(InputError, match=r"none of the checkpoints 2, 1 .* can be read"):
        restore(saved)
    assert names(saved) == ["1", "2"]
    assert not list(saved.glob("unreadable-*"))


@pytest.mark.parametrize(
    "error", [MemoryError(), PermissionError(13, "denied"), OSError(5, "I/O error"),
              RuntimeError("RESOURCE_EXHAUSTED: out of memory")],
)  # fmt: skip
def test_what_may_pass_is_no_damage_and_stops_the_run(saved, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(module.ocp.CheckpointManager, "restore", fail)
    with pytest.raises(InputError, match="cannot be read now"):
        restore(saved)
    monkeypatch.undo()
    assert names(saved) == ["1", "2"]
    assert restore(saved)[1]["step"] == 2


def test_what_readers_say_of_damaged_data_is_damage():
    assert is_damage(ValueError("DATA_LOSS: checksum of chunk 3 differs"))
    assert is_damage(FileNotFoundError(2, "no manifest"))
    assert is_damage(json.JSONDecodeError("Expecting value", "x", 0))
    assert not is_damage(RuntimeError("UNAVAILABLE: try again"))


def test_a_checkpoint_of_another_model_is_refused_and_kept(saved):
    with pytest.raises(InputError, match=r"does not fit: .* has shape \(3,\) there, \(4,\) here"):
        restore(saved, size=4)
    assert names(saved) == ["1", "2"]


def test_a_checkpoint_over_other_data_is_refused_before_anything_is_read(saved):
    def check(host):
        raise InputError(f"other data than {host['data']}")

    with pytest.raises(InputError, match="other data than"):
        restore(saved, check=check)
    assert names(saved) == ["1", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    rljax.train(short(directory), **OWN, mesh=one_device())
    return directory


def short(directory, **parts):
    run = RunSettings(steps=1, save_every=1, run_dir=str(directory), resume="must")
    if not (Path(directory) / "config.json").exists():
        run = dataclasses.replace(run, resume="auto")
    return config(directory, **{"run": run} | parts)


def refusal(settings, **own):
    with pytest.raises(InputError) as found:
        rljax.train(settings, **(OWN | own), mesh=one_device())
    return str(found.value)


def files(directory):
    return {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file()}


def test_a_restart_over_other_data_or_another_model_stops_and_loses_nothing(finished):
    before = files(finished)
    assert "prompts differ" in refusal(short(finished), prompts=[*ROWS, ROWS[0]])
    told = refusal(short(finished), prompts=[*ROWS, {"question": "x?", "answer": "y"}])
    assert "prompts differ" in told or "does not fit" in told
    assert "model='tiny-moe', got 'tiny'" in refusal(short(finished, model=ModelSettings("tiny")))
    after = files(finished)
    assert after == before


def test_a_setting_that_the_old_version_did_not_know_has_its_default(finished, tmp_path):
    record = json.loads((finished / "config.json").read_text())
    del record["config"]["rollout"]["min_p"], record["config"]["terms"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    run_directory.claim(tmp_path, short(tmp_path), "custom", {})
    changed = dataclasses.replace(short(tmp_path).rollout, min_p=0.1)
    with pytest.raises(InputError, match=r"holds a run with min_p=0.0, got 0.1"):
        run_directory.claim(tmp_path, short(tmp_path, rollout=changed), "custom", {})


def test_settings_that_change_no_result_may_change(finished):
    settings = short(finished)
    other = dataclasses.replace(
        settings,
        sampler=dataclasses.replace(settings.sampler, slots=4, decode_chunk=2, page_size=8),
        model=dataclasses.replace(settings.model, remat="layer"),
        update=dataclasses.replace(settings.update, micro_batch_size=2),
    )
    run_directory.claim(finished, other, "custom", {})


def test_a_run_whose_checkpoints_were_all_set_aside_is_not_new(tmp_path):
    (tmp_path / "unreadable-4-1").mkdir()
    with pytest.raises(InputError, match="holds no checkpoint but unreadable-4-1"):
        run_directory.claim(tmp_path, config(tmp_path), "custom", {})


def test_a_directory_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run_directory.claim(tmp_path / "file" / "run", config(tmp_path), "custom", {})
