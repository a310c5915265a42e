"""The sizes of a training step: how many tokens are sampled, scored and trained on."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from rljax import losses as L
from rljax import mesh as meshes
from rljax.batch import Batch, Rows
from rljax.errors import InputError
from rljax.models import ModelConfig
from rljax.models.pipeline import Schedule, schedule
from rljax.training.microbatches import count_micro_batches

OBJECTIVE = L.gspo()
"""The objective of plans. Others keep other per-token fields; the model's work is the same."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of a step; the names and their meaning are those of `rljax.config`."""

    prompts_per_step: int = 64
    """Prompts of a rollout batch."""
    num_generations: int = 16
    """Responses a prompt, G."""
    max_prompt_length: int = 512
    """Tokens of a prompt."""
    max_completion_length: int = 1536
    """Tokens of a response."""
    mini_batch_size: int = 1024
    """Responses of one optimizer step."""
    micro_batch_size: int = 1
    """Responses per device at a time; 0: all at once."""
    slots: int = 1024
    """Sequences decoded at once."""
    page_size: int = 64
    """Tokens of a page of the KV cache."""
    num_pages: int = 0
    """Pages of the KV cache; 0: enough for all slots at full length."""
    decode_chunk: int = 16
    """Decode steps per host synchronisation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("micro_batch_size", "num_pages") else 1
            value = getattr(self, field.name)
            if value < least:
                raise InputError(f"{field.name}={value} must be at least {least}")
        if self.responses % self.mini_batch_size:
            raise InputError(
                f"mini_batch_size={self.mini_batch_size} must divide the {self.responses} "
                "responses of a step (prompts_per_step × num_generations)"
            )

    @property
    def responses(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def length(self) -> int:
        """Tokens of a row: prompt and response."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def updates(self) -> int:
        """Optimizer steps of a rollout batch."""
        return self.responses // self.mini_batch_size

    @property
    def pages(self) -> int:
        """Pages of the KV cache; by default twice as many as fill all slots, as the engine has."""
        return self.num_pages or 2 * -(-self.length // self.page_size) * self.slots

    def parts(self, mesh: Mesh | AbstractMesh) -> int:
        """Micro-batches of an optimizer step on a mesh.

        Raises:
          InputError: The responses do not divide.
        """
        return count_micro_batches(
            self.mini_batch_size, meshes.batch_shards(mesh), self.micro_batch_size
        )

    def rows(self, mesh: Mesh | AbstractMesh) -> int:
        """Responses of a micro-batch on each device."""
        return self.mini_batch_size // meshes.batch_shards(mesh) // self.parts(mesh)

    def tokens(self, mesh: Mesh | AbstractMesh) -> int:
        """Tokens of a micro-batch on each device; `context` splits its rows.

        Raises:
          InputError: The rows do not divide.
        """
        context = mesh.shape["context"]
        if self.length % context:
            raise InputError(
                f"rows of max_prompt_length + max_completion_length = {self.length} tokens do not "
                f"divide over context={context}; change one of them"
            )
        return self.rows(mesh) * self.length // context

    def scored(self, mesh: Mesh | AbstractMesh) -> int:
        """Tokens of a micro-batch for which a device computes logits.

        Prompt tokens need none, but are not separated where rows are split along their length.
        """
        if mesh.shape["context"] > 1:
            return self.tokens(mesh)
        return self.rows(mesh) * self.max_completion_length

    def schedules(
        self, mesh: Mesh | AbstractMesh, config: ModelConfig
    ) -> tuple[Schedule | None, ...]:
        """The pipeline schedule of each stack of layers on a mesh; None: not pipelined."""
        stages, rows = mesh.shape["stage"], self.rows(mesh)
        return tuple(
            schedule(stack.repeats, stages, rows, config.pipeline_repeats, config.pipeline_rows)
            if 1 < stages <= stack.repeats
            else None
            for stack in config.stacks
        )


@functools.cache
def abstract_rows(config: ModelConfig, work: Work) -> Rows:
    """The shapes and dtypes of the rows of an optimizer step, as in training."""

    def prepare() -> Rows:
        shape = (work.mini_batch_size, work.length)
        whole, real = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        routing = jnp.zeros((*shape, len(config.mixture_layers), config.top_k), jnp.int32)
        batch = Batch(
            tokens=whole,
            mask=whole > 0,
            group=whole[:, 0],
            rewards=real[:, 0],
            positions=whole,
            segments=whole,
            rollout_logp=real,
            old_logp=real,
            routing=routing if config.top_k else None,
        )
        return OBJECTIVE.prepare(batch)[0]

    return jax.eval_shape(prepare)


def rows_bytes(config: ModelConfig, work: Work) -> int:
    """Bytes of the rows of an optimizer step, of all devices together."""
    leaves = jax.tree.leaves(abstract_rows(config, work))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
