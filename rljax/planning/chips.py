"""Chips with their vendors' figures, and machines made of them."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

from rljax.errors import InputError, MissingDependencyError


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peak rates and the memory of one chip.

    Attributes:
      name: Its name in topologies, such as `v5p`.
      flops: Dense bfloat16 matmul operations a second.
      memory: Bytes of its own memory.
      memory_bandwidth: Bytes a second from that memory.
      link_bandwidth: Bytes a second that it sends, all links together.
      platform: What JAX calls its kind. libtpu compiles for TPUs that are not there.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    platform: str = "tpu"


_GB, _GIB = 10**9, 2**30

# Vendors state the bandwidth of links as the sum of both directions; a chip sends half of it.
CHIPS = {
    chip.name: chip
    for chip in (
        # Google Cloud, "TPU v5e": 197 TFLOP/s, 16 GB, 819 GB/s, links 400 GB/s both ways.
        Chip("v5e", 197e12, 16 * _GB, 819e9, 200e9),
        # Google Cloud, "TPU v5p": 459 TFLOP/s, 95 GiB, 2,765 GB/s, links 1,200 GB/s both ways.
        Chip("v5p", 459e12, 95 * _GIB, 2765e9, 600e9),
        # Google Cloud, "TPU v6e": 918 TFLOP/s, 32 GB, 1,638 GB/s, links 800 GB/s both ways.
        Chip("v6e", 918e12, 32 * _GB, 1638e9, 400e9),
        # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s without sparsity, 80 GB, 2,039 GB/s, NVLink
        # 600 GB/s both ways.
        Chip("a100", 312e12, 80 * _GB, 2039e9, 300e9, platform="gpu"),
        # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, half of it without; 80 GB,
        # 3.35 TB/s, NVLink 900 GB/s both ways.
        Chip("h100", 989e12, 80 * _GB, 3350e9, 450e9, platform="gpu"),
        # NVIDIA H200 SXM data sheet: as H100 with 141 GB at 4.8 TB/s.
        Chip("h200", 989e12, 141 * _GB, 4800e9, 450e9, platform="gpu"),
        # NVIDIA DGX B200 data sheet, an eighth of it: 36 PFLOP/s with sparsity, 1,440 GB,
        # 64 TB/s, NVLink 14.4 TB/s both ways.
        Chip("b200", 2250e12, 180 * _GB, 8000e9, 900e9, platform="gpu"),
    )
}
"""The known chips, by name."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine: a number of chips of one kind.

    Attributes:
      name: As the user wrote it, such as `v5p:8x8x16`.
      chip: The kind of chip.
      num_chips: How many.
    """

    name: str
    chip: Chip
    num_chips: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Reads `chip:grid`, such as `v5p:8x8x16` or `h100:64`.

        Raises:
          InputError: There is no such chip, or the grid cannot be read.
        """
        name, _, grid = text.strip().lower().partition(":")
        if name not in CHIPS:
            raise InputError(
                f"topology={text!r}: chip {name!r} is unknown; the chips are {', '.join(CHIPS)}"
            )
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid):
            raise InputError(
                f"topology={text!r}: {grid!r} is not a grid of chips; write {name}:4x4 or {name}:16"
            )
        return cls(text.strip().lower(), CHIPS[name], math.prod(map(int, grid.split("x"))))

    def devices(self) -> list[Any]:
        """Its chips as described devices, for which programs can be compiled but not run.

        Raises:
          InputError: They are not TPUs, or libtpu knows no such slice.
          MissingDependencyError: libtpu is not installed.
        """
        if self.chip.platform != "tpu":
            raise InputError(
                f"topology={self.name!r}: programs are compiled for described TPUs only; leave "
                "out compile, or plan for v5e, v5p or v6e"
            )
        # Without these, libtpu looks for TPUs on this machine, for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
        # Several processes may describe chips at once.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        import jax
        from jax.experimental import topologies

        try:
            found = topologies.get_topology_desc(self.name, platform="tpu")
        except jax.errors.JaxRuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):
                raise
            raise InputError(
                f"topology={self.name!r}: libtpu knows no such slice "
                f"({str(error).splitlines()[0]}); take one that can be rented, such as v5p:4x4x4"
            ) from None
        except (RuntimeError, OSError, ImportError) as error:
            raise MissingDependencyError(
                f"topology={self.name!r}: chips are described by libtpu, which is not installed "
                f"({str(error).splitlines()[0]}); install the extra tpu (pip install 'jax[tpu]'), "
                "or leave out compile"
            ) from None
        if len(found.devices) != self.num_chips:
            raise InputError(
                f"topology={self.name!r} has {self.num_chips} chips, libtpu describes "
                f"{len(found.devices)} devices; take a slice whose chips are one device each"
            )
        return list(found.devices)
