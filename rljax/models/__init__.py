"""Policies as pure functions: one declaration of the parameters, one forward pass."""

from rljax.models.balance import move_corrections, routed_load
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
from rljax.models.critic import abstract_critic, init_critic, token_values
from rljax.models.files.pretrained import from_pretrained, save_pretrained
from rljax.models.forward import hidden_states
from rljax.models.logprobs import Inputs, logits, score_tokens, token_logprobs
from rljax.models.lora import (
    Lora,
    abstract_adapters,
    adapter_shardings,
    init_adapters,
    merge_adapters,
)
from rljax.models.mixture import RouterInputs, RouterOutputs
from rljax.models.parameters import (
    Params,
    abstract,
    cast_for_compute,
    check,
    count,
    count_active,
    declare,
    init,
    names,
    path_name,
    shardings,
)
from rljax.models.presets import PRESETS, decoder

__all__ = [
    "PRESETS",
    "Attention",
    "Block",
    "Dense",
    "Experts",
    "Inputs",
    "LatentAttention",
    "Lora",
    "ModelConfig",
    "Params",
    "RopeScaling",
    "Router",
    "RouterInputs",
    "RouterOutputs",
    "Stack",
    "Yarn",
    "abstract",
    "abstract_adapters",
    "abstract_critic",
    "adapter_shardings",
    "cast_for_compute",
    "check",
    "count",
    "count_active",
    "declare",
    "decoder",
    "from_pretrained",
    "hidden_states",
    "init",
    "init_adapters",
    "init_critic",
    "logits",
    "merge_adapters",
    "move_corrections",
    "names",
    "path_name",
    "routed_load",
    "save_pretrained",
    "score_tokens",
    "shardings",
    "token_logprobs",
    "token_values",
]
