"""One declaration of every parameter, from which shapes, shardings and initial values derive."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray

from rljax import mesh as meshes
from rljax import processes
from rljax.errors import InputError
from rljax.models.config import (
    Attention,
    Block,
    Dense,
    Experts,
    LatentAttention,
    ModelConfig,
)

Params = dict[str, Any]
"""Nested dict of arrays, in the shape of `declare(config)`."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What one parameter is.

    Attributes:
      shape: Its shape; equal layers are stacked along a leading `layers` axis.
      axes: One logical axis for each dimension, for the rule tables of `rljax.mesh`.
      scale: Standard deviation of its initial normal; None: initialised to `value`.
      value: The constant it starts from where `scale` is None.
      precise: Whether it stays in float32 when the weights are cast to the compute dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None = None
    value: float = 0.0
    precise: bool = False

    def stacked(self, repeats: int) -> Parameter:
        """The same parameter for `repeats` equal layers."""
        return dataclasses.replace(self, shape=(repeats, *self.shape), axes=("layers", *self.axes))


def _matrix(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> Parameter:
    return Parameter(shape, axes, scale=1.0 / math.sqrt(fan_in))


def _norm(shape: tuple[int, ...], axes: tuple[str | None, ...] = (None,)) -> Parameter:
    return Parameter(shape, axes, value=1.0, precise=True)


def _attention(c: Attention | LatentAttention, width: int) -> Params:
    if isinstance(c, LatentAttention):
        return _latent_attention(c, width)
    h, k, d = c.num_heads, c.num_kv_heads, c.head_dim
    out: Params = {
        "q": _matrix((width, h, d), ("embed", "heads", "head_dim"), width),
        "k": _matrix((width, k, d), ("embed", "kv_heads", "head_dim"), width),
        "v": _matrix((width, k, d), ("embed", "kv_heads", "head_dim"), width),
        "o": _matrix((h, d, width), ("heads", "head_dim", "embed"), h * d),
    }
    if c.bias:
        out["q_bias"] = Parameter((h, d), ("heads", "head_dim"))
        out["k_bias"] = Parameter((k, d), ("kv_heads", "head_dim"))
        out["v_bias"] = Parameter((k, d), ("kv_heads", "head_dim"))
    if c.output_bias:
        out["o_bias"] = Parameter((width,), ("embed",))
    if c.qk_norm == "head":
        out["q_norm"] = _norm((d,))
        out["k_norm"] = _norm((d,))
    elif c.qk_norm == "full":
        out["q_norm"] = _norm((h, d), ("heads", "head_dim"))
        out["k_norm"] = _norm((k, d), ("kv_heads", "head_dim"))
    if c.sinks:
        out["sinks"] = Parameter((h,), ("heads",), precise=True)
    return out


def _latent_attention(c: LatentAttention, width: int) -> Params:
    # Ranks are split as the width of hidden states is, where they are the inner dimension.
    h, query = c.num_heads, c.nope_dim + c.rope_dim
    out: Params = {
        "kv_down": _matrix((width, c.kv_rank + c.rope_dim), ("embed", None), width),
        "kv_norm": _norm((c.kv_rank,)),
        "kv_up": _matrix(
            (c.kv_rank, h, c.nope_dim + c.value_dim), ("embed", "heads", "head_dim"), c.kv_rank
        ),
        "o": _matrix((h, c.value_dim, width), ("heads", "head_dim", "embed"), h * c.value_dim),
    }
    if c.q_rank is None:
        out["q"] = _matrix((width, h, query), ("embed", "heads", "head_dim"), width)
    else:
        out["q_down"] = _matrix((width, c.q_rank), ("embed", None), width)
        out["q_norm"] = _norm((c.q_rank,))
        out["q_up"] = _matrix((c.q_rank, h, query), ("embed", "heads", "head_dim"), c.q_rank)
    return out


def _dense(size: int, width: int) -> Params:
    return {
        "gate": _matrix((width, size), ("embed", "mlp"), width),
        "up": _matrix((width, size), ("embed", "mlp"), width),
        "down": _matrix((size, width), ("mlp", "embed"), size),
    }


def _router(width: int, outputs: int) -> Parameter:
    matrix = _matrix((width, outputs), ("embed", None), width)
    return dataclasses.replace(matrix, precise=True)


def _feed_forward(c: Dense | Experts, width: int) -> Params:
    if isinstance(c, Dense):
        return _dense(c.intermediate_size, width)
    e, f = c.num_experts, c.intermediate_size
    out: Params = {
        "router": _router(width, e),
        "gate": _matrix((e, width, f), ("experts", "embed", "mlp"), width),
        "up": _matrix((e, width, f), ("experts", "embed", "mlp"), width),
        "down": _matrix((e, f, width), ("experts", "mlp", "embed"), f),
    }
    if c.router.bias:
        out["router_bias"] = Parameter((e,), (None,), precise=True)
    if c.router.correction_bias:
        out["correction"] = Parameter((e,), (None,), precise=True)
    if c.bias:
        out["gate_bias"] = Parameter((e, f), ("experts", "mlp"))
        out["up_bias"] = Parameter((e, f), ("experts", "mlp"))
        out["down_bias"] = Parameter((e, width), ("experts", "embed"))
    if c.shared_size:
        out["shared"] = _dense(c.shared_size, width)
    if c.shared_gated:
        out["shared_gate"] = _router(width, 1)
    return out


def declare(config: ModelConfig) -> Params:
    """Every parameter of a model, as a tree of `Parameter`.

    The tree is `{"embed", "stacks": [[layer, ...], ...], "norm", "output"?}`; a layer is
    `{"attention_norm", "attention", "feed_forward_norm", "feed_forward"}`, each leaf stacked
    over the repeats of its stack. Expert matrices are [experts, in, out], gate and up apart; the
    shared expert is a tree of its own, `shared`.
    `output` [hidden, vocab] is absent where the embedding is tied.
    """
    width = config.hidden_size

    def layer(block: Block) -> Params:
        return {
            "attention_norm": _norm((width,)),
            "attention": _attention(block.attention, width),
            "feed_forward_norm": _norm((width,)),
            "feed_forward": _feed_forward(block.feed_forward, width),
        }

    tree: Params = {
        "embed": Parameter((config.vocab_size, width), ("vocab", "embed"), scale=0.02),
        "stacks": [
            [
                jax.tree.map(lambda p, n=stack.repeats: p.stacked(n), layer(block))
                for block in stack.pattern
            ]
            for stack in config.stacks
        ],
        "norm": _norm((width,)),
    }
    if not config.tie_embeddings:
        tree["output"] = _matrix((width, config.vocab_size), ("embed", "vocab"), width)
    return tree


def path_name(path: Any) -> str:
    """The name of a leaf by its place in the tree, such as `stacks/0/0/attention/q`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)


def _names(tree: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), tree)


def names(config: ModelConfig) -> Params:
    """The tree of parameter names."""
    return _names(declare(config))


def lay_out(tree: Params, mesh: Mesh | AbstractMesh, rules: meshes.Rules) -> Params:
    """The tree of `NamedSharding`s of declared parameters on a mesh, by a rule table.

    Raises:
      ValueError: A parameter cannot be laid out as asked; named, with the sizes that work.
    """
    return jax.tree.map(
        lambda p, name: meshes.sharding(mesh, p.shape, p.axes, rules, name), tree, _names(tree)
    )


def shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, rules: meshes.Rules = meshes.TRAIN_RULES
) -> Params:
    """The tree of `NamedSharding`s of a model's parameters on a mesh, by a rule table.

    Raises:
      ValueError: A parameter cannot be laid out as asked; named, with the sizes that work.
    """
    return lay_out(declare(config), mesh, rules)


def abstract(
    config: ModelConfig,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    rules: meshes.Rules = meshes.TRAIN_RULES,
) -> Params:
    """The tree of `jax.ShapeDtypeStruct`s, with shardings where a mesh is given."""
    tree = declare(config)
    if mesh is None:
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), tree)
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, dtype, sharding=s),
        tree,
        shardings(config, mesh, rules),
    )


def init(
    key: PRNGKeyArray,
    config: ModelConfig,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    rules: meshes.Rules = meshes.TRAIN_RULES,
) -> Params:
    """Random parameters, created where they live.

    Args:
      key: A JAX random key; each parameter draws from `key` folded with its place in the tree,
        so values do not depend on the mesh.
      config: The model.
      dtype: Dtype of all parameters.
      mesh: Where to create them; None: on the default device.
      rules: How to lay them over the mesh.

    Returns:
      Matrices normal with deviation 1/√fan-in (embedding .02), norms 1, biases 0.
    """
    return initial(key, declare(config), dtype, mesh, rules)


def initial(
    key: PRNGKeyArray, tree: Params, dtype: Any, mesh: Mesh | None, rules: meshes.Rules
) -> Params:
    """The initial values of declared parameters; arguments as in `init`."""
    leaves, structure = jax.tree.flatten(tree)
    out = None if mesh is None else tuple(jax.tree.leaves(lay_out(tree, mesh, rules)))
    build = _initialiser(tuple(leaves), jnp.dtype(dtype), out)
    return jax.tree.unflatten(structure, processes.run_serially(build)(key))


@functools.lru_cache(maxsize=64)
def _initialiser(
    leaves: tuple[Parameter, ...], dtype: Any, out: tuple[NamedSharding, ...] | None
) -> Callable[[Array], tuple[Array, ...]]:
    """The program of `initial`, kept so that equal models do not compile again."""

    def build(key: Array) -> tuple[Array, ...]:
        return tuple(
            jnp.full(p.shape, p.value, dtype)
            if p.scale is None
            else (p.scale * jax.random.normal(jax.random.fold_in(key, i), p.shape)).astype(dtype)
            for i, p in enumerate(leaves)
        )

    return jax.jit(build, out_shardings=out)


def cast_for_compute(params: Params, config: ModelConfig) -> Params:
    """Weights in the dtypes that the forward pass uses; those already in it stay as they are.

    Matrices are in `config.dtype`, norms and routers in float32. The forward pass casts so by
    itself; casting once beforehand spares it the work at every decode step.
    """
    return jax.tree.map(
        lambda x, p: x.astype(jnp.float32 if p.precise else config.dtype), params, declare(config)
    )


def count(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(declare(config)))


def count_active(config: ModelConfig) -> int:
    """Number of parameters that take part in one token.

    They are all but the experts of each mixture that are neither among its top k nor shared.
    """

    def active(stack: int, place: int, p: Parameter) -> int:
        if "experts" not in p.axes:
            return math.prod(p.shape)
        mixture = config.stacks[stack].pattern[place].feed_forward
        assert isinstance(mixture, Experts)
        return math.prod(p.shape) // mixture.num_experts * mixture.top_k

    tree = declare(config)
    layers = tree.pop("stacks")
    return sum(math.prod(p.shape) for p in jax.tree.leaves(tree)) + sum(
        active(s, i, p)
        for s, stack in enumerate(layers)
        for i, layer in enumerate(stack)
        for p in jax.tree.leaves(layer)
    )


def check(params: Params, config: ModelConfig) -> None:
    """Refuses parameters that are not the model's.

    Raises:
      ValueError: A parameter is missing, surplus or misshapen; named, with both shapes.
    """

    def flat(tree: Any) -> dict[str, tuple[int, ...]]:
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): tuple(x.shape) for path, x in found}

    want, got = flat(declare(config)), flat(params)
    for name in sorted(want.keys() | got.keys()):
        if want.get(name) != got.get(name):
            raise InputError(
                f"parameter {name}: the configuration has {want.get(name, 'absent')}, "
                f"got {got.get(name, 'absent')}"
            )
