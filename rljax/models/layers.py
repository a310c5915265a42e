"""What layers are made of: norms, matrix products, the SwiGLU layer, and weights in `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from rljax_kernels.cpu import Native

from rljax.mesh import BATCH_AXES, Names, axes_of, constrain, fit, gather, split, vary_alike
from rljax.models.parameters import Params


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm in float32, in x's dtype (Zhang and Sennrich, 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def matmul(x: Array, w: Array | Native, contracted: int = 1) -> Array:
    """Contracts the last dimensions of x with the first of w, in x's dtype.

    As a product of two plain matrices: for more dimensions XLA turns the operands of the weights'
    gradient round on CPU, which takes twice as long. Where rows and their lengths are both split
    over devices, they stay two dimensions.
    """
    inner, lead = math.prod(w.shape[:contracted]), x.shape[: x.ndim - contracted]
    flat = x.reshape(*(lead if split("context") else (-1,)), inner)
    w, outer = w.astype(x.dtype), w.shape[contracted:]
    y = w.product(flat) if isinstance(w, Native) else flat @ w.reshape(inner, -1)
    return y.reshape(*lead, *outer)


def dense(p: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """SwiGLU feed-forward (Shazeer, 2020, arXiv:2002.05202), its inner size over `tensor`."""
    hidden = jax.nn.silu(matmul(x, p["gate"])) * matmul(x, p["up"])
    return matmul(constrain(hidden, BATCH_AXES, "context", "tensor"), p["down"])


def enter(w: Array, names: Sequence[Names], rows: Sequence[str]) -> tuple[P, int | None]:
    """How a weight enters `shard_map`, to meet rows that are split over some axes.

    Returns:
      Its spec, and the dimension that is split over `fsdp`: none where devices along it have the
      same rows, for then none of them could be spared the whole.
    """
    spec = fit(w.shape, *(None if n == "fsdp" and n not in rows else n for n in names))
    return spec, next((d for d, part in enumerate(spec) if "fsdp" in axes_of([part])), None)


def gather_part(w: Array, x: Array, dimension: int | None) -> Array:
    """A weight whole over `fsdp`, to meet x inside `shard_map`.

    Gathered there, so that backwards each device is given its part of the gradients' sum, and only
    parts are added up over other axes: XLA may form the whole sum on every device.
    """
    if dimension is None:
        return w
    w, _ = vary_alike((w, x))
    return gather(w, "fsdp", dimension)
