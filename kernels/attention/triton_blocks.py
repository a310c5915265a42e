"""How attention's Triton kernels cut rows into blocks, and what they know of each block."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int
from rljax_kernels import triton_tools
from rljax_kernels.attention.tokens import Tokens

FORWARD = triton_tools.Kernel("rljax_kernels.attention.triton_kernels", "forward")
QUERIES_GRADIENT = triton_tools.Kernel(
    "rljax_kernels.attention.triton_gradient_kernels", "queries_gradient"
)
KEYS_GRADIENT = triton_tools.Kernel(
    "rljax_kernels.attention.triton_gradient_kernels", "keys_gradient"
)

FAR = 1 << 30
BUSY = 528  # programs: four for each multiprocessor of an H100


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel is cut.

    Attributes:
      queries: In a block; a power of two, at least 16.
      keys: In a block; likewise.
      warps: Of a program.
      stages: Of software pipelining.
    """

    queries: int
    keys: int
    warps: int
    stages: int


_HALF = {
    FORWARD: {
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        192: (128, 64, 8, 2),
        256: (128, 32, 8, 2),
    },
    QUERIES_GRADIENT: {
        64: (128, 64, 8, 2),
        128: (128, 64, 8, 2),
        192: (128, 32, 8, 2),
        256: (64, 32, 4, 2),
    },
    KEYS_GRADIENT: {
        64: (64, 128, 8, 2),
        128: (64, 128, 8, 2),
        192: (32, 128, 8, 2),
        256: (32, 64, 8, 2),
    },
}
"""For 16-bit numbers on GPUs with 160 KiB of shared memory and more (A100, H100, B200), by the
largest width that they are for; found by compiling for compute capability 9.0 with next to no
spills. They have not been tuned on a GPU."""

_HALF_SMALL = {
    FORWARD: {128: (64, 64, 4, 2), 256: (64, 32, 4, 1)},
    QUERIES_GRADIENT: {128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
    KEYS_GRADIENT: {128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
}
"""For 16-bit numbers on the others (99 KiB)."""

_FULL = {
    FORWARD: {128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    QUERIES_GRADIENT: {64: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    KEYS_GRADIENT: {128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
}
"""For float32, which is multiplied without tensor cores, so that no bit is lost."""


def block_sizes(kernel: triton_tools.Kernel, dtype: Any, width: int, capability: int) -> Blocks:
    """How to cut a kernel so that a GPU's registers and shared memory hold it.

    Args:
      kernel: Which of the three.
      dtype: Of queries, keys and values.
      width: The larger of the keys' and the values' widths.
      capability: The GPU's compute capability, ten times.
    """
    if jnp.dtype(dtype) == jnp.float32:
        sizes = _FULL
    else:
        sizes = _HALF if capability in (80, 90, 100, 103) else _HALF_SMALL
    return next(Blocks(*cut) for widest, cut in sizes[kernel].items() if width <= widest)


def parts(programs: int, group: int) -> int:
    """Into how many parts to cut the gradient of keys by the heads of queries that read them.

    As few as keep a large GPU busy: the programs of a row's first keys have the most to do.

    Args:
      programs: Blocks of keys, in all rows and heads.
      group: Heads of queries for each head of keys.
    """
    enough = (p for p in range(1, group) if group % p == 0 and programs * p >= BUSY)
    return next(enough, group)


def fields(tokens: Tokens) -> Int[Array, "B 4 T"]:
    """Index, position, segment and prefix of tokens in one array."""
    prefix = jnp.zeros_like(tokens.segments) if tokens.prefix is None else tokens.prefix
    found = (tokens.index, tokens.positions, tokens.segments, prefix)
    return jnp.stack([f.astype(jnp.int32) for f in found], axis=1)


def extents(tokens: Tokens, block: int) -> Int[Array, "B 10 N"]:
    """Smallest and largest index, position, segment and prefix of each block of tokens.

    In the kernels' order: least and greatest index, position and segment of what is not padding (a
    block of padding alone has its least beyond its greatest), the least segment with padding as 0;
    least and greatest prefix of those that have one, the least with none as 0.
    """
    at = fields(tokens)
    at = jnp.pad(at, ((0, 0), (0, 0), (0, -at.shape[2] % block)))
    index, position, segment, prefix = at.reshape(*at.shape[:2], -1, block).swapaxes(0, 1)
    real = segment > 0
    prefix = jnp.where(real, prefix, 0)

    def least(values: Array, counted: Array) -> Array:
        return jnp.min(jnp.where(counted, values, FAR), axis=-1)

    def greatest(values: Array, counted: Array) -> Array:
        return jnp.max(jnp.where(counted, values, -1), axis=-1)

    found = [
        bound(values, real) for values in (index, position, segment) for bound in (least, greatest)
    ]
    found += [jnp.min(segment, axis=-1)]
    found += [least(prefix, prefix > 0), greatest(prefix, prefix > 0), jnp.min(prefix, axis=-1)]
    return jnp.stack(found, axis=1)
