"""Two processes of four devices do what one of eight does, and lose nothing when one is killed.

Float32 sums over eight devices are taken in another order where processes exchange them; all that
follows from tokens and scores alone is equal exactly.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from experiments.flags import parse
from rljax import processes
from rljax.config import ProcessSettings

sys.path.insert(0, str(Path(__file__).parent))
from runs import ROOT, command, last_state, lines, wait_for_step

HEARTBEAT = 10
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
EXACT = re.compile(
    r"reward/|score/|completion/|group/|eval/|staleness/|policy/lr|policy/skipped|moe/.*load|step"
)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(run_dir, number):
    """The run by so many processes, which have eight devices together."""
    flags = [
        "--mesh=fsdp=4,expert=2", "--steps=2", "--save_every=1", "--eval_every=2",
        "--sft_target=0", "--num_generations=2", "--prompts_per_step=8", "--mini_batch_size=16",
        "--warmup_steps=1", "--dynamic_sampling=True", "--max_oversampling=2",
        "--learning_rate=0.01",
        f"--rewards={run_dir.parent}/reward.py:odd", f"--heartbeat_timeout={HEARTBEAT}",
    ]  # fmt: skip
    address = f"localhost:{free_port()}"
    found = [[]]
    if number > 1:
        found = [
            [f"--coordinator={address}", f"--num_processes={number}", f"--process_id={i}"]
            for i in range(number)
        ]
    return [command(run_dir, *flags, *own, devices=8 // number) for own in found]


def finish(started):
    ended = [process.communicate(timeout=300) for process in started]
    for process, (_, err) in zip(started, ended, strict=True):
        assert process.returncode == 0, err
    return ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By one process; by two, of which one is killed, and which are then started again."""
    base = tmp_path_factory.mktemp("processes")
    (base / "reward.py").write_text(
        "def odd(completions, **_):\n"
        "    return [sum(c in '13579' for c in text) / 8 for text in completions]\n"
    )
    finish(start(base / "one", 1))
    first, second = start(base / "two", 2)
    wait_for_step(first, base / "two", 1)
    second.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, told = first.communicate(timeout=300)
    left_alone = (first.returncode, time.monotonic() - killed, told)
    second.communicate()
    return base, left_alone, finish(start(base / "two", 2))


def test_two_processes_killed_and_started_again_train_as_one_does(runs):
    base, *_ = runs
    one, two = lines(base / "one"), lines(base / "two")
    assert [x["step"] for x in two] == [0, 1, 2]
    assert max(x["policy/grad_norm"] for x in one[1:]) > 0
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for tag, value in a.items():
            if EXACT.match(tag):
                assert b[tag] == value, tag
            else:
                np.testing.assert_allclose(b[tag], value, **CLOSE, err_msg=tag)
    assert (base / "one/samples.jsonl").read_text() == (base / "two/samples.jsonl").read_text()


def test_their_checkpoints_are_the_same(runs):
    base, *_ = runs
    (step, one), (other_step, two) = last_state(base / "one"), last_state(base / "two")
    assert step == other_step == 2

    def close(a, b):  # Adam divides a gradient by its own size: rounding decides where it is tiny
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

    jax.tree.map(close, one, two)


def test_the_first_process_alone_writes_and_shows(runs):
    base, _, ((first, first_err), (second, second_err)) = runs
    assert json.loads(first.splitlines()[-1])["steps"] == 2
    assert "continuing" in first_err and "step 2/2" in first_err
    # Apart from what gloo says, whose lines may come torn.
    assert not re.search("step|run_dir|continuing|error|warning", second + second_err, re.I)
    names = {p.name for p in (base / "two").iterdir()}
    assert {"config.json", "metrics.jsonl", "curves.png", "result.json"} <= names
    assert len([n for n in names if "tfevents" in n]) == 1


def test_where_one_is_killed_the_others_end_with_one_clear_line(runs):
    _, (code, seconds, err), _ = runs
    assert code != 0
    assert seconds < 2 * HEARTBEAT
    told = [x for x in err.splitlines() if x.startswith("error: ")]
    assert told == [
        "error: process 0 of 2 ended in the middle of the run: it failed, was killed, or did "
        f"not hear from another process for {HEARTBEAT} s; start all processes again with the same "
        "command, to continue from the newest checkpoint"
    ]


def test_what_they_exchange_and_keep(tmp_path):
    """Arrays, scores, checkpoints, export: process_checks.py, in each of two processes."""
    (tmp_path / "reward.py").write_text(
        "import os, time\n"
        "def where(completions, **_):\n"
        "    if 'X' in completions:\n"
        "        time.sleep(60)\n"
        "    return [float(os.getpid())] * len(completions)\n"
    )
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    address = f"localhost:{free_port()}"
    checks = str(Path(__file__).parent / "process_checks.py")
    started = [
        subprocess.Popen(
            [sys.executable, checks, address, "2", str(i), str(tmp_path)], env=environment,
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    for out, _ in finish(started):
        assert "all is well" in out


@pytest.mark.smoke
@pytest.mark.parametrize(
    "settings,line",
    [
        ({"coordinator": "host:1"}, "go together; give all three"),
        ({"num_processes": 2, "process_id": 0}, "go together; give all three"),
        ({"num_processes": 0}, "num_processes=0 must be at least 1"),
        (
            {"coordinator": "host:1", "num_processes": 2, "process_id": 2},
            "process_id=2 must be from 0 to 1, for 2 processes",
        ),
        (
            {"coordinator": "host", "num_processes": 2, "process_id": 0},
            "coordinator='host' is not HOST:PORT",
        ),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        processes.initialize(ProcessSettings(**settings))


def slurm_command():
    script = (ROOT / "experiments/launch/slurm.sh").read_text()
    return script.replace("\\\n", " ").split("python -m experiments.train")[1]


def jobset_command():
    jobset = yaml.safe_load((ROOT / "experiments/launch/jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    (line,) = container["args"]
    name, _, flags = line.partition("python -m experiments.train")
    assert not name
    assert f"--num_processes={pods['parallelism']} " in flags and pods["completions"] == 2
    assert f"--coordinator={jobset['metadata']['name']}-{job['name']}-0-0." in flags
    return flags


@pytest.mark.smoke
@pytest.mark.parametrize("written", [slurm_command, jobset_command])
def test_the_launch_scripts_call_what_exists(written):
    line = written().replace('"$@"', "--preset arithmetic").replace("$JOB_COMPLETION_INDEX", "1")
    parsed = parse(shlex.split(line.replace("$RUN_DIR", "runs/x")), "train")
    name, config = parsed.name, parsed.config
    assert name == "arithmetic"
    assert config.run.run_dir and config.processes.heartbeat_timeout == 100


@pytest.mark.smoke
def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", ROOT / "experiments/launch/slurm.sh"], check=True)
