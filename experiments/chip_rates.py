"""What the device at hand can do at most: by its vendor's figures, or as measured."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Peak:
    """What the device can do at most.

    Attributes:
      name: Where the rates come from.
      flops: Operations a second.
      bandwidth: Bytes a second.
    """

    name: str
    flops: float
    bandwidth: float

    def seconds(self, work: Any) -> float:
        """The least time of a call."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)

    def bound(self, work: Any) -> str:
        """What takes that time."""
        compute = work.flops / self.flops >= work.bytes / self.bandwidth
        return "compute" if compute else "memory"


def chip_of(kind: str) -> Any:
    """The chip of a device's kind, as JAX calls it; None: it is not known."""
    from rljax.planning.chips import CHIPS

    names = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v5p": "v5p", "tpu v6 lite": "v6e"}
    kind = kind.lower()
    words = kind.replace("-", " ").split()
    found = names.get(kind) or next((name for name in CHIPS if name in words), None)
    return None if found is None else CHIPS[found]


def measured_peak(dtype: str, size: int, copied: int) -> Peak:
    """What a square matmul and a copy reach.

    Args:
      dtype: Of the matrices.
      size: Their side.
      copied: float32 numbers that are copied.
    """
    import jax
    import jax.numpy as jnp

    square, line = jnp.ones((size, size), dtype), jnp.ones(copied, jnp.float32)
    matmul, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)

    def best(call: Callable[[], Any]) -> float:
        took = []
        for _ in range(20):
            start = time.perf_counter()
            jax.block_until_ready(call())
            took.append(time.perf_counter() - start)
        return min(took)

    return Peak(
        "measured here",
        2 * size**3 / best(lambda: matmul(square, square)),
        2 * line.nbytes / best(lambda: copy(line)),
    )


def peak_here() -> tuple[Peak, Peak]:
    """The rates that shares are of, and those measured."""
    import jax

    on_cpu = jax.default_backend() == "cpu"
    measured = measured_peak(*(("float32", 2048, 2**25) if on_cpu else ("bfloat16", 8192, 2**28)))
    chip = None if on_cpu else chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return measured, measured
    return Peak(chip.name, chip.flops, chip.memory_bandwidth), measured
