"""Low-rank adapters: chosen matrices learn a sum of two thin ones, and all else stays (LoRA)."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.models.parameters import Parameter, Params, declare, initial, lay_out, names, path_name

_STACKED = ("layers", "experts")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices are adapted, and how (Hu et al., 2021, arXiv:2106.09685).

    A matrix W [in, out] becomes W + alpha/rank · a·b with a [in, rank], b [rank, out]; b starts
    from 0. Every layer and every expert has adapters of its own.

    Attributes:
      rank: Columns of a.
      alpha: Divided by the rank it multiplies the product.
      targets: Target module suffixes: the ends of the names of the matrices, such as
        `attention/q`; `*` matches anything.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention/*", "feed_forward/*")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"rank={self.rank} of adapters must be at least 1")
        if not self.targets:
            raise InputError("targets=() adapts nothing; name matrices such as attention/q")


def adapted(config: ModelConfig, lora: Lora) -> dict[str, Parameter]:
    """The matrices that are adapted, by name.

    Raises:
      ValueError: A target names no matrix.
    """
    named = dict(zip(jax.tree.leaves(names(config)), jax.tree.leaves(declare(config)), strict=True))
    # Norms, biases and routers are no matrices of the residual stream's width to adapt.
    matrices = {
        name: p for name, p in named.items() if len(_own(p)) > 1 and p.scale and not p.precise
    }
    found: dict[str, Parameter] = {}
    for target in lora.targets:
        hits = {n: p for n, p in matrices.items() if fnmatch.fnmatch(f"/{n}", f"*/{target}")}
        if not hits:
            ends = sorted({"/".join(n.split("/")[-2:]) for n in matrices})
            raise InputError(
                f"targets={target!r} names no matrix of the model; there are {', '.join(ends)}"
            )
        found |= hits
    return {name: p for name, p in named.items() if name in found}


def _own(p: Parameter) -> tuple[str | None, ...]:
    """The axes of one matrix, without layers and experts."""
    return p.axes[sum(axis in _STACKED for axis in p.axes) :]


def _split(p: Parameter) -> tuple[int, int]:
    """Where a matrix's input axes begin and end; what follows is its output."""
    own = _own(p)
    start = len(p.axes) - len(own)
    # [embed, heads, head_dim] takes the residual stream in, [heads, head_dim, embed] gives it out.
    inputs = len(own) - 1 if own[-1] == "embed" and own[0] != "embed" else 1
    return start, start + inputs


def declare_adapters(config: ModelConfig, lora: Lora) -> Params:
    """Every adapter as a `Parameter`: name of the matrix -> `{"a", "b"}`."""
    tree: Params = {}
    for name, p in adapted(config, lora).items():
        start, end = _split(p)
        fan_in = math.prod(p.shape[start:end])
        tree[name] = {
            "a": Parameter((*p.shape[:end], lora.rank), (*p.axes[:end], None), scale=fan_in**-0.5),
            "b": Parameter(
                (*p.shape[:start], lora.rank, *p.shape[end:]),
                (*p.axes[:start], None, *p.axes[end:]),
            ),
        }
    return tree


def init_adapters(
    key: PRNGKeyArray,
    config: ModelConfig,
    lora: Lora,
    mesh: Mesh | None = None,
    rules: meshes.Rules = meshes.TRAIN_RULES,
) -> Params:
    """Adapters that change nothing yet, in float32, created where they live.

    Args:
      key: A JAX random key.
      config: The model.
      lora: What is adapted.
      mesh: Where to create them; None: on the default device.
      rules: How to lay them over the mesh.

    Returns:
      Name of the matrix -> `{"a", "b"}`; a is normal with deviation 1/√fan-in, b is 0.
    """
    return initial(key, declare_adapters(config, lora), jnp.float32, mesh, rules)


def abstract_adapters(config: ModelConfig, lora: Lora) -> Params:
    """Shapes and dtypes of the adapters."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declare_adapters(config, lora)
    )


def adapter_shardings(
    config: ModelConfig, lora: Lora, mesh: Mesh, rules: meshes.Rules = meshes.TRAIN_RULES
) -> Params:
    """The adapters' shardings: those of their matrices, the rank whole."""
    return lay_out(declare_adapters(config, lora), mesh, rules)


def merge_adapters(params: Params, adapters: Params, lora: Lora) -> Params:
    """The model's weights with the adapters in them, for the forward pass, sampler and export.

    Args:
      params: The base model's; adapted ones are replaced in a copy of the tree, in their dtype.
      adapters: As `init_adapters` makes them.
      lora: What is adapted; its alpha and rank scale the product.

    Returns:
      Parameters in the shape of `declare(config)`.
    """

    def merged(path: Any, w: jax.Array) -> jax.Array:
        name = path_name(path)
        if name not in adapters:
            return w
        a, b = adapters[name]["a"], adapters[name]["b"]
        batch = a.shape[: a.ndim + b.ndim - 2 - w.ndim]  # layers and experts, in all three
        delta = a.reshape(*batch, -1, lora.rank) @ b.reshape(*batch, lora.rank, -1)
        scaled = (lora.alpha / lora.rank) * delta.reshape(w.shape)
        return (w.astype(jnp.float32) + scaled).astype(w.dtype)

    return jax.tree_util.tree_map_with_path(merged, params)
