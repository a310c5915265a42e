"""What the benchmarks share: timing a call, and running a peer's half by another Python."""

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

HOW_TO_COMPARE = {
    "torch": "no torch here: give --torch-python a Python that has it "
    "(pip install torch transformers --extra-index-url https://download.pytorch.org/whl/cpu)",
    "vllm": "no vllm here: give --vllm-python a Python that has its CPU build "
    "(experiments/README.md says how to install it)",
    "trl": "no trl here: give --trl-python a Python that has it (pip install trl)",
    "tunix": "no tunix here: give --tunix-python a Python that has it (pip install google-tunix)",
}
"""What to say where a library is missing."""


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


def peer_half(
    library: Literal["jax", "torch", "vllm", "trl", "tunix"],
    python: Path | None,
    module: str,
    config: Any,
    **arguments: Any,
) -> Any:
    """What a benchmark's `run_<library>` gives, through JSON.

    Args:
      library: The peer.
      python: The Python that runs it; None: this one.
      module: The benchmark's full name.
      config: Its `Config`, the first argument.
      **arguments: Further arguments, as JSON holds them.

    Returns:
      The result; None where this Python is to run it and has no such library.
    """
    function = f"run_{library}"
    if python is None:
        if importlib.util.find_spec(library) is None:
            return None
        return getattr(importlib.import_module(module), function)(config, **arguments)
    call = [module, function, dataclasses.asdict(config), arguments]
    done = subprocess.run(
        [str(python), "-m", "experiments.timing", json.dumps(call, default=str)],  # paths as text
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    name, wanted, fields, others = json.loads(sys.argv[1])
    benchmark = importlib.import_module(name)
    print(json.dumps(getattr(benchmark, wanted)(benchmark.Config(**fields), **others)))
