"""The configuration of a run: its settings together, and what must hold between them."""

from __future__ import annotations

import dataclasses
from typing import Any

from rljax.errors import InputError
from rljax.settings import (
    DataSettings,
    EvalSettings,
    MeshSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    ProcessSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    SamplerSettings,
    SupervisedSettings,
    TermSettings,
    UpdateSettings,
)

__all__ = [
    "Config",
    "DataSettings",
    "EvalSettings",
    "MeshSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "ProcessSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "SamplerSettings",
    "SupervisedSettings",
    "TermSettings",
    "UpdateSettings",
]


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    rewards: RewardSettings = dataclasses.field(default_factory=RewardSettings)
    rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    sampler: SamplerSettings = dataclasses.field(default_factory=SamplerSettings)
    objective: ObjectiveSettings = dataclasses.field(default_factory=ObjectiveSettings)
    terms: TermSettings = dataclasses.field(default_factory=TermSettings)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    update: UpdateSettings = dataclasses.field(default_factory=UpdateSettings)
    supervised: SupervisedSettings = dataclasses.field(default_factory=SupervisedSettings)
    evals: EvalSettings = dataclasses.field(default_factory=EvalSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)
    processes: ProcessSettings = dataclasses.field(default_factory=ProcessSettings)

    @property
    def responses(self) -> int:
        """Responses of a rollout batch."""
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def mini_batch_size(self) -> int:
        """Responses of one optimizer step."""
        return self.update.mini_batch_size or self.responses

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps taken on one rollout batch."""
        return self.responses // self.mini_batch_size * self.update.num_iterations

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.steps * self.updates_per_step

    def flat(self) -> dict[str, Any]:
        """Every setting by its flag's name; no two parts share one."""
        parts = (getattr(self, part.name) for part in dataclasses.fields(self))
        return {name: value for part in parts for name, value in vars(part).items()}

    def check(self) -> None:
        """Refuses values that cannot work together.

        Raises:
          InputError: One line: the field, its value, the fix.
        """
        self._check_ranges()
        self._check_objective()
        self._check_batches()

    def _check_ranges(self) -> None:
        values = self.flat()
        for name in _AT_LEAST_ONE:
            if values[name] < 1:
                raise InputError(f"{name}={values[name]} must be at least 1")
        r = self.rollout
        if r.temperature <= 0:
            raise InputError(f"temperature={r.temperature} cannot be trained with; use above 0")
        if r.max_staleness < 0:
            raise InputError(f"max_staleness={r.max_staleness} must be 0 or more policy versions")
        for name in ("mini_batch_size", "micro_batch_size"):
            if values[name] < 0:
                raise InputError(f"{name}={values[name]} must be 0 (all) or more responses")
        if self.sampler.page_size < 0:
            raise InputError(
                f"page_size={self.sampler.page_size} must be 0 (what suits the devices) or more "
                "tokens"
            )
        if self.update.micro_batch_tokens < 0:
            raise InputError(
                f"micro_batch_tokens={self.update.micro_batch_tokens} must be 0 (as many as "
                "micro_batch_size responses have at most) or more tokens"
            )

    def _check_objective(self) -> None:
        objective = self.objective.objective
        alone = ("ppo", "reinforce_plus_plus", "distillation")
        if self.rollout.num_generations < 2 and ":" not in objective and objective not in alone:
            raise InputError(
                f"num_generations={self.rollout.num_generations}: a group baseline needs at least 2"
            )
        if objective == "distillation" and not self.model.teacher:
            raise InputError("objective=distillation needs a teacher: give teacher a model")
        if "reference" in self.mesh.host_memory and self.model.lora_rank:
            raise InputError(
                "host_memory=reference with lora_rank: the adapters' base weights are the "
                "reference, and must be on the devices; leave it out"
            )

    def _check_batches(self) -> None:
        mini, group = self.mini_batch_size, self.rollout.num_generations
        if self.responses % mini or mini % group:
            raise InputError(
                f"mini_batch_size={mini} must divide the {self.responses} responses of a "
                f"step and hold whole groups of num_generations={group}"
            )
        if self.optimizer.warmup_steps > self.updates:
            raise InputError(
                f"warmup_steps={self.optimizer.warmup_steps} exceed the {self.updates} updates of "
                "the run; lower them or raise steps"
            )


_AT_LEAST_ONE = (
    "pipeline_repeats", "pipeline_rows", "max_support", "prompts_per_step", "num_generations",
    "max_completion_length", "max_prompt_length", "num_iterations", "steps", "save_every",
    "max_oversampling", "slots", "decode_chunk",
)  # fmt: skip
