"""Paged attention by the C++ kernels for CPUs: float32, at the cost of the tokens there are."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import cpu
from rljax_kernels.paged_attention.pages import PageTables, Pool


def refuses(asked: Any) -> str | None:
    """Why it does not compute what is asked."""
    if asked.dtype != "float32":
        return f"it computes in float32, got {asked.dtype}"
    if asked.latent:
        return "it has no latent attention"
    if asked.value_dim != asked.head_dim:
        return f"values are as wide as keys, got {asked.value_dim} and {asked.head_dim}"
    if asked.sharing:
        return "its rows share no pages"
    return None if asked.static_layer else "the layer has to be a Python integer"


def run(
    q: Float[Array, "R H d"],
    k: Float[Array, "R K d"],
    v: Float[Array, "R K d"],
    pool: Pool,
    layer: Int[Array, ""] | int,
    tables: PageTables,
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "R H d"], Pool]:
    """As `rljax_kernels.paged_attention.paged_attention`."""
    tokens = cpu.PagedTokens(pool["k"], pool["v"], tables.own, positions, live)
    out, keys, values = cpu.decode_attention(
        q, k, v, tokens, int(layer), scale=scale, window=window, sinks=sinks
    )
    return out, {"k": keys, "v": values}
