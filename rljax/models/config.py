"""What a decoder is made of, layer by layer: frozen, hashable descriptions."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rljax_kernels.attention import OPERATION

from rljax.errors import InputError
from rljax.models.remat import Remat, read_remat


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings (Llama 3 report; transformers `llama3`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN stretching of rotary embeddings (Peng et al., 2023, arXiv:2309.00071).

    Attributes:
      factor: By how much the context is longer than the original one.
      original_max_position: The context of pre-training.
      beta_fast: Rotations over that context above which a frequency is left alone.
      beta_slow: Rotations below which it is divided by `factor`; between, a linear ramp.
      magnitude: Multiplies cosines and sines (the square root of the attention temperature).
      truncate: Whether the ramp's ends are rounded outwards to whole frequencies.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much YaRN scales queries and keys for a context `factor` longer (its eq. 22).

    `weight` multiplies the logarithm, as DeepSeek's `mscale` and `mscale_all_dim` do.
    """
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary embeddings.

    Attributes:
      num_heads: Query heads H.
      num_kv_heads: Key and value heads K; H is a multiple of K.
      head_dim: Size of a head.
      bias: Whether the q, k, v projections have biases (Qwen2).
      output_bias: Whether the output projection has one (gpt-oss).
      qk_norm: The RMSNorm that queries and keys pass before rotation: one for each head (`head`,
        Qwen3), or one over all heads together (`full`, OLMoE).
      sinks: Whether each head has a learned logit that takes part in the softmax and has no
        value (gpt-oss).
      rope_theta: Base of the rotary frequencies; None: queries and keys are not rotated (SmolLM3).
      rope_scaling: How the frequencies are stretched; None: not.
      window: How many positions back a query sees, its own included; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    sinks: bool = False
    rope_theta: float | None = 10_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}; grouped-query attention needs whole groups"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} is odd; rotary embeddings need pairs")
        if self.window is not None and self.window < 1:
            raise InputError(f"window={self.window} must be at least 1; None is full attention")


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are projected from one vector a token, the latent, beside one
    rotary key that all heads share.

    Attributes:
      num_heads: Heads H.
      q_rank: Size of the vector that queries are projected from; None: from the hidden state.
      kv_rank: Size of the latent.
      nope_dim: Part of a head's queries and keys that is not rotated.
      rope_dim: Part that is.
      value_dim: Size of a head's values.
      rope_theta: Base of the rotary frequencies.
      rope_scaling: How the frequencies are stretched; None: not.
      scale_weight: Weight of the context's stretching in the scale of scores (`mscale_all_dim`).
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    scale_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise InputError(f"rope_dim={self.rope_dim} is odd; rotary embeddings need pairs")
        if self.scale_weight and not isinstance(self.rope_scaling, Yarn):
            raise InputError(
                f"scale_weight={self.scale_weight} weighs a stretching by YaRN, got rope_scaling="
                f"{self.rope_scaling}; leave it at 0"
            )

    @property
    def scale(self) -> float:
        """What scores are multiplied by: 1/√(size of a query), and YaRN's magnitude squared."""
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        if isinstance(self.rope_scaling, Yarn):
            scale *= yarn_magnitude(self.rope_scaling.factor, self.scale_weight) ** 2
        return scale


@dataclasses.dataclass(frozen=True)
class Dense:
    """SwiGLU feed-forward of `intermediate_size`."""

    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class Router:
    """How a mixture's router, a matrix in float32, scores and chooses experts.

    Attributes:
      norm_topk_prob: Whether the chosen scores are divided by their sum.
      scoring: What makes scores of the router's logits: a softmax over the experts, or a sigmoid
        of each (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.1.2).
      groups: Number of groups of neighbouring experts.
      top_groups: How many groups a token may choose from: those whose two best experts add up to
        most.
      scale: Multiplies the weights of the chosen experts.
      correction_bias: Whether each expert has a number that is added to its score when experts
        are chosen and nowhere else; no gradient moves it, the experts' load does.
      bias: Whether the logits have a learned bias (gpt-oss).
    """

    norm_topk_prob: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    correction_bias: bool = False
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of SwiGLU experts behind a top-k router.

    Attributes:
      num_experts: Experts E.
      top_k: Experts chosen for each token.
      intermediate_size: Inner size of one expert.
      router: How they are chosen.
      bias: Whether the matrices inside the experts have biases (gpt-oss).
      activation: The experts' activation: SwiGLU (`silu`), or the one of gpt-oss, which clamps
        both its inputs (`clamped`).
      shared_size: Inner size of a SwiGLU expert that every token passes; 0: there is none.
      shared_gated: Whether each token weighs the shared expert by a sigmoid (Qwen2-MoE).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: Router = Router()
    bias: bool = False
    activation: Literal["silu", "clamped"] = "silu"
    shared_size: int = 0
    shared_gated: bool = False

    def __post_init__(self) -> None:
        if self.shared_gated and not self.shared_size:
            raise InputError("shared_gated=True needs a shared expert; give its shared_size")
        if not 1 <= self.top_k <= self.num_experts:
            raise InputError(
                f"top_k={self.top_k} must lie between 1 and num_experts={self.num_experts}"
            )
        groups, top_groups = self.router.groups, self.router.top_groups
        size, rest = divmod(self.num_experts, groups)
        if rest or size < 2 <= groups:
            raise InputError(
                f"groups={groups} must cut num_experts={self.num_experts} into equal groups "
                "of two or more"
            )
        if not self.top_k <= top_groups * size <= self.num_experts:
            raise InputError(
                f"top_groups={top_groups} of {groups} groups of {size} must hold "
                f"top_k={self.top_k} experts, and be no more than there are"
            )


@dataclasses.dataclass(frozen=True)
class Block:
    """One decoder layer: attention, then feed-forward, each added to the residual stream.

    Attributes:
      attention: The kind of attention.
      feed_forward: The kind of feed-forward.
      norms: Whether the norms of the two are applied to their inputs or to their outputs (OLMo 2).
    """

    attention: Attention | LatentAttention
    feed_forward: Dense | Experts
    norms: Literal["before", "after"] = "before"


@dataclasses.dataclass(frozen=True)
class Stack:
    """A pattern of blocks, repeated; equal layers are stacked and scanned over."""

    pattern: tuple[Block, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    Attributes:
      vocab_size: Rows of the embedding.
      hidden_size: Width of the residual stream.
      stacks: The layers, in order.
      norm_eps: Epsilon of every RMSNorm.
      tie_embeddings: Whether the output matrix is the embedding.
      dtype: Dtype of activations and matmul inputs; softmax, router and log-probabilities are
        float32 whatever it is.
      remat: What the backward pass recomputes, as `remat.Remat` says. True and False stand for
        `layer` and `none`.
      attention_backend: How attention is computed where no cache is kept, as for
        `rljax_kernels.attention`; `auto`: what is fastest on the devices for the rows at hand.
      expert_dispatch: How tokens meet experts on other devices (see `experts.parallel_experts`);
        None: the one that moves less.
      expert_backend: How rows are multiplied by their experts' matrices, as for
        `rljax_kernels.grouped_matmul`; `auto`: what is fastest on the devices.
      logprob_backend: How log-probabilities of tokens are computed from hidden states, as for
        `rljax_kernels.logprobs`; `auto`: what is fastest on the devices.
      pipeline_repeats: On a mesh with stages: how many pieces of its layers, not neighbours, each
        stage holds of a stack (see `pipeline`). More of them wait less and send more; from two on a
        piece is recomputed as a whole in the backward pass, whatever the value of `remat`.
      pipeline_rows: Rows that a device has of a micro-batch in the pipeline, as far as they divide;
        fewer of them wait less, and read the weights more often.
      family: The transformers `model_type` whose weight names it is saved under.
      max_positions: The longest sequence that it was made for (`max_position_embeddings`); longer
        ones are computed all the same.
      num_tokens: Ids from this one on have no token: rows that pad the embedding beyond the
        tokenizer. They are never predicted, in sampling and scoring alike. None: all ids have one.
    """

    vocab_size: int
    hidden_size: int
    stacks: tuple[Stack, ...]
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat | bool = "none"
    attention_backend: str = "auto"
    expert_dispatch: Literal["all_gather", "all_to_all"] | None = None
    expert_backend: Literal[
        "auto", "native", "blocks", "triton", "pallas", "megablox", "ragged"
    ] = "auto"
    logprob_backend: Literal["auto", "triton", "pallas", "chunked", "reference"] = "auto"
    pipeline_repeats: int = 1
    pipeline_rows: int = 1
    family: str = "qwen3"
    max_positions: int = 32_768
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", read_remat(self.remat))
        if self.num_tokens is not None and not 1 <= self.num_tokens <= self.vocab_size:
            raise InputError(
                f"num_tokens={self.num_tokens} must lie between 1 and vocab_size="
                f"{self.vocab_size}: further tokens have no embedding; use the model's tokenizer"
            )
        backends = ("auto", *(i.name for i in OPERATION.implementations))
        if self.attention_backend not in backends:
            raise InputError(
                f"attention_backend={self.attention_backend!r} is unknown; use one of "
                f"{', '.join(backends)}"
            )
        if self.expert_backend == "native" and self.dtype != "float32":
            raise InputError(
                f"expert_backend='native' computes in float32, got dtype={self.dtype!r}; "
                "use dtype='float32' or expert_backend='auto'"
            )

    @property
    def layers(self) -> tuple[Block, ...]:
        """Every layer's block, in order."""
        return tuple(b for s in self.stacks for _ in range(s.repeats) for b in s.pattern)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, in order: the layers of `Batch.routing`."""
        return tuple(i for i, b in enumerate(self.layers) if isinstance(b.feed_forward, Experts))

    @property
    def top_k(self) -> int:
        """Experts chosen for each token in a mixture layer; 0 for a dense model.

        Raises:
          ValueError: Mixture layers differ in it.
        """
        found = {b.feed_forward.top_k for b in self.layers if isinstance(b.feed_forward, Experts)}
        if len(found) > 1:
            raise InputError(f"mixture layers differ in top_k ({sorted(found)}); give all the same")
        return found.pop() if found else 0

    @property
    def num_experts(self) -> int:
        """Experts in a mixture layer (the most, where layers differ); 0 for a dense model."""
        return max(
            (
                b.feed_forward.num_experts
                for b in self.layers
                if isinstance(b.feed_forward, Experts)
            ),
            default=0,
        )
