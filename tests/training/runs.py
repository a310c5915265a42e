"""A shortened run of the embedded default, as a command, and what it leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp

ROOT = Path(__file__).parents[2]
_TIMES = ("time", "perf/", "perf_")

SHORT = [
    "--steps=6", "--prompts_per_step=4", "--num_generations=4", "--mini_batch_size=8",
    "--slots=16", "--eval_prompts=16", "--eval_every=2", "--save_every=2", "--stop_at=0",
    "--warmup_steps=2", "--sft_target=0.9", "--sft_max_steps=4", "--sft_eval_every=2",
    "--sft_batch_size=32",
]  # fmt: skip


def command(run_dir, *extra, devices=1):
    """Starts it, with the tests' compilation cache and as little optimization as they have."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-m", "experiments.train", *SHORT, f"--run_dir={run_dir}", *extra]
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def last_state(run_dir):
    """The newest checkpoint's step and state, on one device, whatever wrote it."""
    places = sorted((run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    place = places[-1].absolute() / "state"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as reader:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            reader.metadata(place).item_metadata.tree,
        )
        return int(places[-1].name), reader.restore(place, target)


def lines(run_dir):
    text = (run_dir / "metrics.jsonl").read_text()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(_TIMES)}
        for line in text.splitlines()
    ]


def wait_for_step(process, run_dir, step):
    """Waits until a step is logged, and a moment more, so that a save may be under way."""
    for _ in range(3000):
        file = run_dir / "metrics.jsonl"
        if file.exists():
            found = [json.loads(x)["step"] for x in file.read_text().splitlines() if x[-1:] == "}"]
            if found and max(found) >= step:
                return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("the run never got there")
