"""A shortened run of the embedded default, as a command and as a configuration."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHORT = [
    "--steps=6", "--prompts_per_step=4", "--num_generations=4", "--mini_batch_size=8",
    "--slots=16", "--eval_prompts=16", "--eval_every=2", "--save_every=2", "--stop_at=0",
    "--warmup_steps=2", "--sft_target=0.9", "--sft_max_steps=4", "--sft_eval_every=2",
    "--sft_batch_size=32",
]  # fmt: skip


def command(run_dir, *extra, cache=None, devices=1):
    flag = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    arguments = [sys.executable, "-m", "experiments.train", *SHORT, f"--run_dir={run_dir}", *extra]
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
