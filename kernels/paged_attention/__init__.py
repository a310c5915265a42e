"""Attention of decode steps: one new token a row, over a KV cache in pages; several ways.

`paged_attention` computes it by the implementation that `OPERATION.choose` picks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import cpu, triton_tools
from rljax_kernels.paged_attention import blocked, native, pallas_tpu, reference, triton
from rljax_kernels.paged_attention.pages import PageTables, Pool
from rljax_kernels.registry import PLATFORMS, Implementation, Operation

__all__ = ["OPERATION", "Asked", "PageTables", "Pool", "paged_attention"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of `paged_attention` asks for, all of it static.

    Attributes:
      dtype: Of queries, keys and values.
      rows: R.
      heads: H, of the queries.
      kv_heads: K.
      head_dim: d, of queries and keys.
      value_dim: dv.
      page_size: Tokens of a page.
      sharing: How many rows share pages; 0: there are no shared pages.
      latent: Whether values are part of the keys.
      window: How many positions back a query sees; None: all.
      sinks: Whether heads have sinks.
      static_layer: Whether the layer is a Python integer, and not an array.
    """

    dtype: str
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    sharing: int = 0
    latent: bool = False
    window: int | None = None
    sinks: bool = False
    static_layer: bool = True


OPERATION = Operation(
    "paged_attention",
    (
        Implementation(
            "native",
            ("cpu",),
            native.run,
            native.refuses,
            lambda: cpu.unavailable_reason(),
            source="C++, kernels/cpu.cpp",
        ),
        Implementation(
            "triton",
            ("gpu",),
            triton.run,
            triton.refuses,
            triton_tools.missing,
            source="our own kernels, after Flash-Decoding (Dao et al. 2023)",
        ),
        Implementation(
            "pallas",
            ("tpu",),
            pallas_tpu.run,
            pallas_tpu.refuses,
            source="Pallas, kernels/paged_attention/pallas_tpu.py",
        ),
        Implementation(
            "blocked",
            PLATFORMS,
            blocked.run,
            source="plain JAX, online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867)",
        ),
        Implementation("reference", PLATFORMS, reference.run, source="plain JAX"),
    ),
    reference="reference",
)
"""The ways to compute paged attention, in the order in which they are preferred."""


def paged_attention(
    q: Float[Array, "R H d"],
    k: Float[Array, "R K d"],
    v: Float[Array, "R K dv"],
    pool: Pool,
    layer: Int[Array, ""] | int,
    tables: PageTables,
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "R H dv"], Pool]:
    """Writes one new token of each row into its page, and attends over all tokens of the row.

    Grouped-query attention, its softmax in float32. The pages that a block of rows shares are read
    once for all of them. There are no gradients.

    Args:
      q: Queries of the new tokens.
      k: Their keys.
      v: Their values; of a pool without `v` only the width matters.
      pool: Keys and values of all layers; updated in place where XLA may, so that the caller must
        not use them again. Pages that no row reads may hold anything.
      layer: The layer that is read and written.
      tables: Where the tokens of each row lie.
      positions: The position of each row's new token in its sequence, `tables.base` or more.
      live: Which rows hold a token; the others write nothing, and their output is 0.
      scale: Multiplies the scores.
      window: How many positions back a query sees, its own included; None: all.
      sinks: Logits that take part in the softmax and have no value; None: there are none.
      backend: The name of an implementation, or `auto`.

    Returns:
      The output, in q's dtype, and the pool with the new tokens.

    Raises:
      ValueError: Rows are no whole number of blocks, or the backend is unknown, or does not compute
        this here.
    """
    rows, blocks = q.shape[0], tables.shared.shape[0]
    if rows % blocks:
        raise ValueError(
            f"{rows} rows are not a multiple of the {blocks} blocks of tables.shared; pad them"
        )
    asked = Asked(
        dtype=jnp.dtype(q.dtype).name,
        rows=rows,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        page_size=pool["k"].shape[4],
        sharing=rows // blocks if tables.shared.shape[1] else 0,
        latent="v" not in pool,
        window=window,
        sinks=sinks is not None,
        static_layer=isinstance(layer, int),
    )
    run = OPERATION.choose(backend, asked).run
    return run(
        q, k, v, pool, layer, tables, positions, live, scale=scale, window=window, sinks=sinks
    )
