"""The sizes of a training step: how many tokens are sampled, scored and trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

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
    """Tokens of the longest response."""
    mean_completion_length: int = 0
    """Tokens of a response on average; 0: as many as of the longest."""
    mini_batch_size: int = 1024
    """Responses of one optimizer step."""
    micro_batch_size: int = 1
    """Responses per device at a time; 0: all at once."""
    micro_batch_tokens: int = 0
    """Tokens of packed rows per device at a time, in scoring and updates; 0: rows are not packed,
    and each has max_prompt_length + max_completion_length tokens."""
    slots: int = 1024
    """Sequences decoded at once."""
    page_size: int = 128
    """Tokens of a page of the KV cache."""
    num_pages: int = 0
    """Pages of the KV cache; 0: enough for all slots at full length."""
    decode_chunk: int = 16
    """Decode steps per host synchronisation."""
    prefill_tokens: int = 4096
    """Tokens per device of a prefill call."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in _MAY_BE_0 else 1
            value = getattr(self, field.name)
            if value < least:
                raise InputError(f"{field.name}={value} must be at least {least}")
        if self.responses % self.mini_batch_size:
            raise InputError(
                f"mini_batch_size={self.mini_batch_size} must divide the {self.responses} "
                "responses of a step (prompts_per_step × num_generations)"
            )
        if self.mean_completion_length > self.max_completion_length:
            raise InputError(
                f"mean_completion_length={self.mean_completion_length} exceeds "
                f"max_completion_length={self.max_completion_length}; lower it"
            )

    @property
    def responses(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def mean_completion(self) -> int:
        """Tokens of a response on average."""
        return self.mean_completion_length or self.max_completion_length

    @property
    def mean_length(self) -> int:
        """Tokens of a prompt and its response on average; all prompts count as the longest."""
        return self.max_prompt_length + self.mean_completion

    @property
    def row_length(self) -> int:
        """Tokens of a row in scoring and updates."""
        return max(self.micro_batch_tokens, self.length) if self.micro_batch_tokens else self.length

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence in a row, padding included where rows are not packed."""
        return self.mean_length if self.micro_batch_tokens else self.length

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
        return self._parts(mesh, self.mini_batch_size)

    def score_parts(self, mesh: Mesh | AbstractMesh) -> int:
        """Micro-batches in which a rollout batch is scored.

        Raises:
          InputError: The responses do not divide.
        """
        return self._parts(mesh, self.responses)

    def _parts(self, mesh: Mesh | AbstractMesh, responses: int) -> int:
        shards = meshes.batch_shards(mesh)
        parts = count_micro_batches(responses, shards, self.micro_batch_size)
        if not self.micro_batch_tokens:
            return parts
        return -(-responses * self.mean_length // (shards * self.row_length))

    def rows(self, mesh: Mesh | AbstractMesh) -> int:
        """Rows of a micro-batch on each device."""
        if self.micro_batch_tokens:
            return 1
        return self.mini_batch_size // meshes.batch_shards(mesh) // self.parts(mesh)

    def tokens(self, mesh: Mesh | AbstractMesh) -> int:
        """Tokens of a micro-batch on each device; `context` splits its rows.

        Raises:
          InputError: The rows do not divide.
        """
        context = mesh.shape["context"]
        if self.row_length % context:
            raise InputError(
                f"rows of max_prompt_length + max_completion_length (packed: micro_batch_tokens) = "
                f"{self.row_length} tokens do not divide over context={context}; change one of them"
            )
        return self.rows(mesh) * self.row_length // context

    def scored(self, mesh: Mesh | AbstractMesh) -> int:
        """Tokens of a micro-batch for which a device computes logits.

        Prompt tokens need none, but are not separated where rows are packed or split along their
        length.
        """
        if self.micro_batch_tokens or mesh.shape["context"] > 1:
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


_MAY_BE_0 = ("mean_completion_length", "micro_batch_size", "micro_batch_tokens", "num_pages")


def abstract_batch(config: ModelConfig, work: Work, mesh: Mesh | AbstractMesh) -> Batch:
    """The shapes and dtypes of a rollout batch; packed, of the rows that it is scored in."""
    return _batch(config, _shape(work, mesh, work.score_parts(mesh)))


def abstract_rows(config: ModelConfig, work: Work, mesh: Mesh | AbstractMesh) -> Rows:
    """The shapes and dtypes of the rows of an optimizer step, as in training."""
    rows = _rows(config, _shape(work, mesh, work.parts(mesh)))
    if not work.micro_batch_tokens:
        return rows
    most = -(-work.row_length // work.mean_length) + 1
    return rows.replace(max_segments=1 << most.bit_length())


def _shape(work: Work, mesh: Mesh | AbstractMesh, parts: int) -> tuple[int, int]:
    """Rows and tokens of so many micro-batches."""
    return meshes.batch_shards(mesh) * parts * work.rows(mesh), work.row_length


@functools.cache
def _rows(config: ModelConfig, shape: tuple[int, int]) -> Rows:
    return jax.eval_shape(lambda batch: OBJECTIVE.prepare(batch)[0], _batch(config, shape))


@functools.cache
def _batch(config: ModelConfig, shape: tuple[int, int]) -> Batch:
    def make() -> Batch:
        whole, real = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        routing = jnp.zeros((*shape, len(config.mixture_layers), config.top_k), jnp.int32)
        return Batch(
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

    return jax.eval_shape(make)


def rows_bytes(config: ModelConfig, work: Work, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of the rows of an optimizer step, of all devices together."""
    return _bytes(abstract_rows(config, work, mesh))


def batch_bytes(config: ModelConfig, work: Work, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of what scoring reads of a rollout batch, of all devices together."""
    return _bytes(abstract_batch(config, work, mesh).replace(rollout_logp=None, old_logp=None))


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
