"""What the benchmarks share: timing a call, and running the torch half by another Python."""

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HOW_TO_COMPARE = (
    "no torch here: give --torch-python a Python that has it "
    "(pip install torch transformers --extra-index-url https://download.pytorch.org/whl/cpu)"
)


def timed(function: Callable[[], Any], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Milliseconds of a call that waits for its result: the median and the fastest."""
    for _ in range(warm_up):
        function()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        took.append(1e3 * (time.perf_counter() - start))
    return {"median_ms": float(np.median(took)), "fastest_ms": min(took)}


def spelt(times: dict[str, Any]) -> str:
    """Fastest and median milliseconds."""
    return f"{times['fastest_ms']:6.2f} ms (median {times['median_ms']:6.2f})"


def torch_half(module: str, config: Any, **arguments: Any) -> Any:
    """What a benchmark's `run_torch(config, **arguments)` gives, through JSON.

    Args:
        module: The benchmark's full name.
        config: Its `Config`; `torch_python` names the Python that runs it, None this one.
        **arguments: Further arguments, as JSON holds them.

    Returns:
        The result; None where this Python is to run it and has no torch.
    """
    python = config.torch_python
    if python is None:
        if importlib.util.find_spec("torch") is None:
            return None
        return importlib.import_module(module).run_torch(config, **arguments)
    plain = dataclasses.asdict(dataclasses.replace(config, torch_python=None))
    done = subprocess.run(
        [str(python), "-m", "experiments.timing", json.dumps([module, plain, arguments])],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    name, fields, others = json.loads(sys.argv[1])
    benchmark = importlib.import_module(name)
    print(json.dumps(benchmark.run_torch(benchmark.Config(**fields), **others)))
