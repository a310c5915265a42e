"""cuDNN's fused attention, through `jax.nn.dot_product_attention`, for rows of one sequence each.

What JAX 0.10 to 0.12 accept of it: bfloat16 and float16, grouped heads, heads up to 256 wide (128
before Hopper) in multiples of 8, values as wide as keys, a causal window, a length for each row.
Everything else would be a mask or bias of [T, S], which is not for long rows.

Packed rows are refused. JAX knows them for cuDNN (`q_offsets`, `kv_offsets`, from Hopper on), but
the call does not do for our rows: the most segments that a row may have is part of its shape, and
it keeps [B, segments, H, T] logarithms, a square again where there may be as many segments as
tokens; JAX 0.10 counts the offsets of keys in strides of the queries' heads, which is wrong for
grouped heads; and it knows no shared prefix. That a row holds one sequence cannot be seen from its
arrays while a program is compiled, so callers have to say it: `attention(..., packed=False)`.

JAX keeps what the backward pass needs under no name, so `jax.checkpoint` with a policy of names
computes the forward pass again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from rljax_kernels import triton_tools
from rljax_kernels.attention.tokens import Tokens


def refuses(asked: Any) -> str | None:
    """Why cuDNN does not compute what is asked; None: it does."""
    if (capability := triton_tools.capability()) < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0"
    widest = 256 if capability >= 90 else 128
    if asked.packed:
        return "it takes rows of one sequence each, and was not told so (packed=False)"
    if asked.prefix or asked.sinks:
        return f"it knows no {'shared prefixes' if asked.prefix else 'sinks'}"
    if asked.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 or float16, not {asked.dtype}"
    if asked.queries != asked.keys:
        return f"it takes whole rows, not {asked.queries} queries of {asked.keys} keys"
    if asked.head_dim != asked.value_dim:
        return f"values must be as wide as keys, not {asked.value_dim} of {asked.head_dim}"
    if asked.head_dim > widest or asked.head_dim % 8:
        return f"heads are multiples of 8 up to {widest} wide, not {asked.head_dim}"
    return None


def run(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    queries: Tokens,
    keys: Tokens,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    implementation: str = "cudnn",
) -> Float[Array, "B T H d"]:
    """As `rljax_kernels.attention.attention`, of rows of one sequence and padding after it.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Where the queries stand: only segments count, since all else follows.
      keys: Where the keys stand: the same places.
      scale: Multiplies the scores.
      window: How many positions back a query sees; None: all.
      sinks: None.
      implementation: Of JAX's function; tests compare its `xla`, which means the same.
    """
    real = queries.segments > 0
    # A row of padding alone attends to its first token, so that nothing is divided by 0.
    lengths = jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return jnp.where(real[:, :, None, None], out, 0)
