"""Checks of a batch's values, on the host: under jit values cannot be judged.

They look at one number a response, so they cost nothing beside a training step.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.batch import Batch
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class ResponseValues:
    """What is checked, one entry a response; NumPy.

    Attributes:
      rewards: Shaped rewards, 0 where invalid.
      valid: Scored, with a finite reward.
      group: The batch's own group ids.
    """

    rewards: Float[np.ndarray, " B"]
    valid: Bool[np.ndarray, " B"]
    group: Int[np.ndarray, " B"]

    def refuse_single_responses(self, user: Any) -> None:
        """Refuses a prompt with one response, which has no group to compare with.

        Raises:
          ValueError: There is such a prompt, and its response is valid.
        """
        _, number, size = np.unique(self.group, return_inverse=True, return_counts=True)
        if ((size[number] == 1) & self.valid).any():
            raise InputError(
                f"{user!r} needs at least 2 responses a prompt, got a prompt with 1: "
                "raise num_generations"
            )

    def refuse_negative_rewards(self, user: Any) -> None:
        """Refuses rewards below 0.

        Raises:
          ValueError: The smallest one, and the fix.
        """
        rewards = self.rewards[self.valid]
        if (rewards < 0).any():
            raise InputError(
                f"{user!r} needs rewards of at least 0, got {float(rewards.min())}: "
                "shift the rewards or use group_normalize"
            )


def on_host(*values: Any) -> bool:
    """Whether all values are known to this process: neither traced nor on other hosts."""
    leaves = jax.tree.leaves(values)
    return not any(
        isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "is_fully_addressable", True)
        for leaf in leaves
    )


def of_batch(batch: Batch, shaping: tuple[Any, ...] = ()) -> ResponseValues:
    """The checked values of a batch, with its rewards shaped.

    Args:
      batch: The whole rollout batch; NumPy or JAX arrays on the host.
      shaping: The objective's reward shaping.

    Returns:
      The values.
    """
    rewards = np.asarray(batch.rewards, np.float32)
    valid = np.isfinite(rewards)
    if batch.scores is not None:
        valid &= np.isfinite(np.asarray(batch.scores, np.float32))
    if batch.valid is not None:
        valid &= np.asarray(batch.valid).astype(bool)
    rewards = np.where(valid, rewards, 0)
    for shape in shaping:
        rewards = np.where(valid, np.asarray(shape.response_rewards(rewards, batch)), 0)
    return ResponseValues(rewards, valid, np.asarray(batch.group))


def refuse_parted_groups(group: Int[np.ndarray, " B"], index: Int[np.ndarray, " n"]) -> None:
    """Refuses a mini-batch that has some but not all responses of a prompt.

    Args:
      group: The prompt of each response of the rollout batch; -1 for none.
      index: The mini-batch.

    Raises:
      ValueError: It parts a group.
    """
    group = np.asarray(group)
    chosen = np.zeros(len(group), bool)
    chosen[np.asarray(index)] = True
    parted = np.setdiff1d(np.intersect1d(group[chosen], group[~chosen]), [-1])
    if parted.size:
        raise InputError(
            f"prompt_mean needs whole groups in a mini-batch, got parts of {parted.size}: "
            "choose mini_batch_size as a multiple of num_generations"
        )
