"""Decoders of equal layers, and named configurations: small, of the benchmarks, and published.

Each takes the size of the vocabulary where it has none of its own. Published weights load with
`models.from_pretrained`, which finds the same configuration in their config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from rljax.models.config import (
    Attention,
    Block,
    Dense,
    Experts,
    LatentAttention,
    ModelConfig,
    RopeScaling,
    Router,
    Stack,
    Yarn,
)
from rljax.models.remat import Remat


class DecoderOptions(TypedDict, total=False):
    """Optional arguments of `decoder`, passed on to `Attention` and to `ModelConfig`."""

    num_kv_heads: int | None
    head_dim: int | None
    bias: bool
    qk_norm: Literal["head", "full"] | None
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None
    norm_eps: float
    tie_embeddings: bool
    dtype: Literal["float32", "bfloat16"]
    remat: Remat | bool
    family: str | None
    max_positions: int


def decoder(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    num_experts: int = 0,
    top_k: int = 2,
    norm_topk_prob: bool = True,
    **options: Unpack[DecoderOptions],
) -> ModelConfig:
    """A decoder whose layers are all equal: dense, or a mixture where `num_experts` > 0.

    Args:
      vocab_size: As in `ModelConfig`, and so `hidden_size`.
      hidden_size: Width of the residual stream.
      num_layers: Number of layers.
      num_heads: As in `Attention`.
      intermediate_size: Inner size of the feed-forward; of one expert in a mixture.
      num_experts: As in `Experts`; 0: the model is dense.
      top_k: As in `Experts`.
      norm_topk_prob: As in `Router`.
      **options: Further fields of `Attention` and `ModelConfig`. By default each head has keys and
        values of its own, heads share the width, queries and keys are normed by head, the
        embedding is tied, and the family is of the Qwen3 pair (`qwen3`, `qwen3_moe`).
    """
    given: dict[str, Any] = {"qk_norm": "head", "tie_embeddings": True, **options}
    given["num_kv_heads"] = given.get("num_kv_heads") or num_heads
    given["head_dim"] = given.get("head_dim") or hidden_size // num_heads
    given["family"] = given.get("family") or ("qwen3_moe" if num_experts else "qwen3")
    own = {f.name for f in dataclasses.fields(Attention)} & given.keys()
    attention = Attention(num_heads=num_heads, **{name: given.pop(name) for name in own})
    feed_forward = (
        Experts(num_experts, top_k, intermediate_size, Router(norm_topk_prob))
        if num_experts
        else Dense(intermediate_size)
    )
    stacks = (Stack((Block(attention, feed_forward),), num_layers),)
    return ModelConfig(vocab_size=vocab_size, hidden_size=hidden_size, stacks=stacks, **given)


def tiny_moe(vocab_size: int = 64) -> ModelConfig:
    """The embedded default: a mixture of about 0.2M parameters for a vocabulary of characters."""
    return decoder(
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=112,
        num_experts=4,
        top_k=2,
        max_positions=512,
    )


def speed_s() -> ModelConfig:
    """Configuration S of the benchmarks: a dense model of 29M parameters in the style of Qwen3."""
    return decoder(
        vocab_size=8192,
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
    )


def speed_m() -> ModelConfig:
    """Configuration M of the benchmarks: S with 8 experts of 512, two for each token."""
    return decoder(
        vocab_size=8192,
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=512,
        num_experts=8,
        top_k=2,
    )


def qwen2_5_7b() -> ModelConfig:
    """Qwen2.5-7B."""
    return _qwen2_5(3584, 28, 28, 4, 18_944)


def qwen2_5_32b() -> ModelConfig:
    """Qwen2.5-32B."""
    return _qwen2_5(5120, 64, 40, 8, 27_648, norm_eps=1e-5)


def qwen2_5_math_7b() -> ModelConfig:
    """Qwen2.5-Math-7B: the size of the 7B, with short rotary wavelengths and a context of 4096."""
    return _qwen2_5(3584, 28, 28, 4, 18_944, rope_theta=10_000.0, max_positions=4096)


def _qwen2_5(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    norm_eps: float = 1e-6,
    rope_theta: float = 1e6,
    max_positions: int = 131_072,
) -> ModelConfig:
    return decoder(
        vocab_size=152_064,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        bias=True,
        qk_norm=None,
        rope_theta=rope_theta,
        norm_eps=norm_eps,
        tie_embeddings=False,
        dtype="bfloat16",
        remat="layer",
        family="qwen2",
        max_positions=max_positions,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B: 128 experts, 8 for each token."""
    return decoder(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        rope_theta=1e6,
        tie_embeddings=False,
        dtype="bfloat16",
        remat="layer",
        max_positions=40_960,
    )


def llama_3_2_3b() -> ModelConfig:
    """Llama-3.2-3B."""
    return decoder(
        vocab_size=128_256,
        hidden_size=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=8192,
        qk_norm=None,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=32.0),
        norm_eps=1e-5,
        dtype="bfloat16",
        remat="layer",
        family="llama",
        max_positions=131_072,
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3: 671B parameters, 37B of them active; without its multi-token prediction."""
    return _deepseek_v3(num_layers=61, num_dense=3, num_heads=128, num_experts=256, size=2048)


def mixture_1_6t() -> ModelConfig:
    """A shape to plan with, not a released model: DeepSeek-V3's, grown to 1.6T parameters.

    About 48B of them are active. Both are near to what is published of DeepSeek-V4-Pro (1.6T and
    49B), whose layers are of another kind.
    """
    return _deepseek_v3(num_layers=63, num_dense=1, num_heads=96, num_experts=384, size=3072)


def _deepseek_v3(
    num_layers: int, num_dense: int, num_heads: int, num_experts: int, size: int
) -> ModelConfig:
    attention = LatentAttention(
        num_heads=num_heads,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope_scaling=Yarn(factor=40.0, original_max_position=4096),
        scale_weight=1.0,
    )
    mixture = Experts(
        num_experts=num_experts,
        top_k=8,
        intermediate_size=size,
        router=Router(scoring="sigmoid", groups=8, top_groups=4, scale=2.5, correction_bias=True),
        shared_size=size,
    )
    return ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        stacks=(
            Stack((Block(attention, Dense(18_432)),), num_dense),
            Stack((Block(attention, mixture),), num_layers - num_dense),
        ),
        dtype="bfloat16",
        remat="layer",
        family="deepseek_v3",
        max_positions=163_840,
    )


PRESETS: Mapping[str, Callable[[], ModelConfig]] = {
    "tiny-moe": tiny_moe,
    "speed-s": speed_s,
    "speed-m": speed_m,
    "qwen2.5-7b": qwen2_5_7b,
    "qwen2.5-32b": qwen2_5_32b,
    "qwen2.5-math-7b": qwen2_5_math_7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "llama-3.2-3b": llama_3_2_3b,
    "deepseek-v3": deepseek_v3,
    "mixture-1.6t": mixture_1_6t,
}
"""The names by which flags ask for a configuration."""
