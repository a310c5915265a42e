"""Keeping experts busy alike: an auxiliary loss, or a bias that follows the load."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.models.config import Experts, ModelConfig
from rljax.models.parameters import Params


def balance_loss(probs: Float[Array, "N E"], load: Float[Array, " E"]) -> Float[Array, " N"]:
    """Each token's load-balancing loss: E·Σ share of the load · probability; 1 in balance.

    The load is that of the whole optimizer batch and has no gradient, so the loss is a sum over
    tokens and does not depend on how the batch is cut. Its mean over tokens is the auxiliary loss
    of Switch Transformers (Fedus et al., 2021, arXiv:2101.03961), for any number of experts.

    Args:
      probs: The router's probabilities over all experts.
      load: Tokens that each expert was given.

    Returns:
      float32, to be weighed and added to the loss.
    """
    share = load / jnp.maximum(load.sum(), 1.0)
    return probs.shape[-1] * (probs @ jax.lax.stop_gradient(share))


def routed_load(
    routing: Int[Array, "B T layers k"],
    num_experts: int,
    copies: Int[Array, "B T"] | None = None,
) -> Float[Array, "layers E"]:
    """Tokens that known routing gives to each expert of each mixture layer; -1 counts nowhere.

    Args:
      routing: The experts of each token.
      num_experts: E.
      copies: How often each token counts; None: once.
    """
    layers = jnp.broadcast_to(jnp.arange(routing.shape[2])[:, None], routing.shape)
    known = (routing >= 0).astype(jnp.float32)
    known = known if copies is None else known * copies[..., None, None]
    empty = jnp.zeros((routing.shape[2], num_experts), jnp.float32)
    return empty.at[layers, jnp.maximum(routing, 0)].add(known)


def move_corrections(
    params: Params, config: ModelConfig, load: Float[Array, "layers E"], rate: float
) -> Params:
    """Raises the correction bias of experts with less than the mean load, lowers that of others.

    Balance without an auxiliary loss (Wang et al., 2024, arXiv:2408.15664), as in DeepSeek-V3: the
    bias decides which experts are chosen and enters no weight, so no gradient speaks for it.

    Args:
      params: The model's.
      config: The model; layers without a correction bias are left as they are.
      load: Tokens given to each expert of each mixture layer over the optimizer batch.
      rate: By how much a bias moves.

    Returns:
      The parameters with their biases moved; all else is untouched.
    """
    stacks, mixture = [], 0
    for stack, layers in zip(config.stacks, params["stacks"], strict=True):
        mixtures = sum(isinstance(b.feed_forward, Experts) for b in stack.pattern)
        part = load[mixture : mixture + mixtures * stack.repeats]
        loads = iter(part.reshape(stack.repeats, mixtures, -1).swapaxes(0, 1)) if mixtures else None
        mixture += mixtures * stack.repeats
        moved = []
        for block, layer in zip(stack.pattern, layers, strict=True):
            c = block.feed_forward
            if isinstance(c, Experts):
                assert loads is not None
                given = next(loads)[:, : c.num_experts]
                if c.router.correction_bias:
                    ffn = layer["feed_forward"]
                    step = rate * jnp.sign(given.mean(1, keepdims=True) - given)
                    new = ffn["correction"] + step.astype(ffn["correction"].dtype)
                    layer = {**layer, "feed_forward": {**ffn, "correction": new}}
            moved.append(layer)
        stacks.append(moved)
    return {**params, "stacks": stacks}
