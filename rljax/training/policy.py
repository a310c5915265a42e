"""The policy: its model, tokenizer and placement, and where its first weights come from."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import models, processes
from rljax.config import Config
from rljax.data import CharTokenizer, Tokenizer, check_vocabulary, load_tokenizer, model_path
from rljax.errors import InputError
from rljax.models import ModelConfig, Params
from rljax.training.recomputation import choose_remat
from rljax.training.state import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """What is trained; its weights are in the run's state.

    Attributes:
      model: The model's configuration.
      tokenizer: Text to ids and back.
      mesh: The devices.
      rules: How weights are sharded over them during the update.
      lora: The adapters that are trained; None: the weights themselves.
      initial: Makes the first weights.
    """

    model: ModelConfig
    tokenizer: Tokenizer
    mesh: Mesh
    rules: meshes.Rules
    lora: models.Lora | None
    initial: Callable[[], Params]

    def weights(self, train: TrainState) -> Params:
        """The policy's weights, for the sampler, for scoring and for export; adapters merged."""
        return train.params if self.lora is None else self._merge(train)

    @functools.cached_property
    def _merge(self) -> Callable[[TrainState], Params]:
        return processes.run_serially(jax.jit(lambda train: train.weights(self.lora)))


def open_policy(config: Config, alphabet: Callable[[], str], mesh: Mesh | None = None) -> Policy:
    """The policy that a configuration names.

    Args:
      config: The configuration.
      alphabet: Gives the characters that the tokenizer of a model from random weights must know.
      mesh: The devices; None: the mesh that the configuration names.

    Raises:
      InputError: There is no such model, or a setting does not suit it.
    """
    mesh = meshes.from_flags(config.mesh.mesh) if mesh is None else mesh
    rules = meshes.read_rules(config.mesh.train_rules, meshes.TRAIN_RULES)
    settings, name = config.model, config.model.model
    if not name:
        raise InputError(
            "model is not set; give a Hugging Face folder, a .gguf file, smollm2 or one of "
            f"{', '.join(models.PRESETS)}"
        )
    path = model_path(name)
    if path.exists():
        _log.info("loading %s", path)
        tokenizer: Any = load_tokenizer(path)
        model, params = models.from_pretrained(
            path, jnp.float32, mesh, rules=rules, compute_dtype=settings.compute_dtype
        )
        check_vocabulary(tokenizer, model.vocab_size, config.data.template)
        # Rows that pad the embedding stand for no text, and are never sampled.
        model = dataclasses.replace(model, num_tokens=tokenizer.vocab_size, **_computation(config))
        model = dataclasses.replace(model, remat=choose_remat(config, model, mesh))

        def initial() -> Params:
            return params

    elif name in models.PRESETS:
        tokenizer = CharTokenizer(alphabet())
        model = dataclasses.replace(
            models.PRESETS[name](),
            vocab_size=tokenizer.vocab_size,
            dtype=settings.compute_dtype,
            **_computation(config),
        )
        model = dataclasses.replace(model, remat=choose_remat(config, model, mesh))

        def initial() -> Params:
            return models.init(jax.random.key(config.run.seed), model, mesh=mesh, rules=rules)

    else:
        raise InputError(
            f"model={name!r} is neither a folder or .gguf file nor one of smollm2, "
            f"{', '.join(models.PRESETS)}; check the path"
        )
    _check_balance(config, model)
    lora = None
    if settings.lora_rank:
        lora = models.Lora(settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    return Policy(model, tokenizer, mesh, rules, lora, initial)


def _computation(config: Config) -> dict[str, Any]:
    """Settings of the model that say how it is computed, not what."""
    mesh = config.mesh
    return {
        "attention_backend": mesh.attention_backend,
        "expert_dispatch": mesh.expert_dispatch,
        "expert_backend": mesh.expert_backend,
        "logprob_backend": mesh.logprob_backend,
        "pipeline_repeats": mesh.pipeline_repeats,
        "pipeline_rows": mesh.pipeline_rows,
    }


def _check_balance(config: Config, model: ModelConfig) -> None:
    """Refuses load balancing that the model has no part for."""
    coef, rate = config.terms.router_aux_loss_coef, config.update.router_bias_update_rate
    if coef is not None and not model.top_k:
        raise InputError(
            f"router_aux_loss_coef={coef}: the model has no experts to balance; leave it out"
        )
    kinds = [b.feed_forward for b in model.layers]
    if rate and not any(isinstance(c, models.Experts) and c.router.correction_bias for c in kinds):
        raise InputError(
            f"router_bias_update_rate={rate}: the model's routers have no correction bias (that of "
            "deepseek_v3 does); use router_aux_loss_coef"
        )
    if rate and config.model.lora_rank:
        raise InputError(
            f"router_bias_update_rate={rate} would move weights that lora_rank="
            f"{config.model.lora_rank} freezes; set one of them to 0"
        )


def load_teacher(config: Config, policy: Policy) -> tuple[ModelConfig, Params]:
    """The teacher of a distillation.

    Raises:
      InputError: It has another vocabulary than the policy.
    """
    model, params = models.from_pretrained(
        model_path(config.model.teacher),
        config.model.compute_dtype,
        policy.mesh,
        rules=policy.rules,
    )
    if model.vocab_size != policy.model.vocab_size:
        raise InputError(
            f"teacher={config.model.teacher!r} has a vocabulary of {model.vocab_size} tokens, the "
            f"policy one of {policy.model.vocab_size}; choose a teacher of the same family"
        )
    return model, params
