"""Model FLOPs utilisation: the operations a model needs, over what its devices can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljax.models import ModelConfig

# Dense bfloat16 matmul operations a second by `jax.Device.device_kind`; the vendors' data sheets
# (for NVIDIA half of the figure "with sparsity").
PEAK_FLOPS: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The peak of one device, in dense bfloat16 operations a second.

    Args:
      device_kind: `jax.devices()[0].device_kind`, such as "TPU v5 lite" or "NVIDIA H100 80GB
        HBM3". The longest name in `PEAK_FLOPS` that it begins with, as a whole word, counts.

    Returns:
      The peak; None where it is not in the table, as for CPUs.
    """
    kind = device_kind.replace("-", " ") + " "
    names = [name for name in PEAK_FLOPS if kind.startswith(name + " ")]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def model_flops_per_token(config: ModelConfig, context: float) -> float:
    """Operations of a forward pass for one token.

    Two for each weight that a token is multiplied by (of experts, those chosen; the embedding is
    looked up), and of attention the products of queries with keys and of weights with values, for
    a token that sees `context` keys (a window's at most). Norms, rotations and softmax are not
    counted. A forward and a backward pass cost three times as much (PaLM, Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).

    Args:
      config: The model.
      context: Keys a token sees on average: half the length of causal rows.

    Returns:
      Operations, a multiplication and an addition counting two.
    """
    from rljax import models

    weights = models.count_active(config)
    if not config.tie_embeddings:
        weights -= config.vocab_size * config.hidden_size
    total = 2.0 * weights
    for block in config.layers:
        a = block.attention
        if isinstance(a, models.LatentAttention):
            total += 2 * context * a.num_heads * (a.nope_dim + a.rope_dim + a.value_dim)
        else:
            seen = context if a.window is None else min(context, a.window)
            total += 4 * seen * a.num_heads * a.head_dim
    return total


def mfu(
    config: ModelConfig, tokens: float, context: float, seconds: float, devices: list[str]
) -> float | None:
    """Share of the devices' peak that the model's own work of some updates reaches.

    Recomputed activations and padding are no model work and are not counted.

    Args:
      config: The model.
      tokens: Tokens of prompts and responses that passed forward and backward.
      context: Keys a token sees on average; see `model_flops_per_token`.
      seconds: Time of the updates.
      devices: The kind of each device that took part.

    Returns:
      In [0, 1] as a rule; None where the peak of a device is not known (CPUs).
    """
    peaks = [peak for kind in devices if (peak := peak_flops(kind)) is not None]
    if len(peaks) < len(devices) or not peaks or seconds <= 0:
        return None
    return 3 * tokens * model_flops_per_token(config, context) / seconds / sum(peaks)
