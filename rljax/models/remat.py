"""What the backward pass keeps of the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from rljax_kernels.attention import blocked

from rljax.errors import InputError

Remat = Literal["none", "layer", "attention", "offload"]
"""none: nothing is computed again. layer: of each layer only its input is kept. attention: that and
the output of attention, which is then not computed again (where few tokens have all their scores at
once, it is). offload: as layer, with the inputs in the host's memory until they are needed."""

LAYER_INPUT = "layer_input"


def read_remat(value: Any) -> Remat:
    """A value of `ModelConfig.remat`; True and False are layer and none.

    Raises:
      InputError: It is none of them.
    """
    if isinstance(value, bool):
        return "layer" if value else "none"
    known: tuple[Remat, ...] = get_args(Remat)
    for name in known:
        if value == name:
            return name
    raise InputError(f"remat={value!r} is unknown; use one of {', '.join(known)}")


def checkpointed(layer: Callable[..., Any], remat: Any) -> Callable[..., Any]:
    """A layer, (carry, weights) -> (carry, outputs), whose backward pass recomputes what is asked.

    Args:
      layer: Its carry begins with its input.
      remat: A value of `Remat`.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return layer
    if remat == "layer":
        return jax.checkpoint(layer)
    if remat == "attention":
        kept = policies.save_only_these_names(blocked.OUT, blocked.LSE)
        return jax.checkpoint(layer, policy=kept)

    def named(carry: tuple[Any, ...], weights: Any) -> Any:
        return layer((checkpoint_name(carry[0], LAYER_INPUT), *carry[1:]), weights)

    moved = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(named, policy=moved)
