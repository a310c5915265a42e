"""Compiles the real programs of training and sampling for devices that need not be there."""

from __future__ import annotations

import dataclasses
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.config import OptimizerSettings
from rljax.errors import InputError
from rljax.models import ModelConfig
from rljax.planning.collectives import Collective
from rljax.planning.hlo import read_collectives
from rljax.planning.tables import short, size
from rljax.planning.work import OBJECTIVE, Work, abstract_batch, abstract_rows
from rljax.sampling import Engine
from rljax.training import state as states
from rljax.training import update as updates
from rljax.training.optimizer import make_optimizer
from rljax.training.scoring import ScoreOptions, make_score


@dataclasses.dataclass(frozen=True)
class Compiled:
    """XLA's memory analysis of a program, per device, and its collectives.

    Attributes:
      name: `train`, `score`, `prefill` or `decode`.
      arguments: Bytes of the arguments.
      outputs: Bytes of the outputs.
      aliases: Bytes of outputs that are written into the buffers of donated arguments.
      temporaries: Bytes of other buffers while it runs.
      peak: The most bytes in use at once.
      largest: The largest temporary buffers: bytes, and the arrays that share the buffer.
      collectives: Its communication; `why` says how often and in which part of the model.
      seconds: The time of lowering and compiling.
      host_bytes: The most memory this process has used so far.
    """

    name: str
    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int
    largest: tuple[tuple[int, str], ...]
    collectives: tuple[Collective, ...]
    seconds: float
    host_bytes: int

    @property
    def total(self) -> int:
        """Bytes per device: arguments, temporaries, and outputs that are not aliases."""
        return self.arguments + self.temporaries + self.outputs - self.aliases


def compile_update(
    config: ModelConfig,
    mesh: Mesh,
    work: Work,
    rules: meshes.Rules = meshes.TRAIN_RULES,
    on_host: bool = False,
) -> Compiled:
    """Compiles the optimizer step of `rljax.training.update` (GSPO, AdamW) for a mesh.

    Args:
      config: The model.
      mesh: A mesh of this machine's devices or of described ones.
      work: The sizes of a step.
      rules: How weights are sharded: logical axis -> mesh axes.
      on_host: Whether the optimizer's moments are kept in the host's memory.

    Raises:
      InputError: It does not fit in a device's memory, or the batch does not divide.
    """
    optimizer = make_optimizer(OptimizerSettings(), updates=1000)
    update = updates.make_update(
        config,
        OBJECTIVE,
        optimizer,
        updates.UpdateOptions(
            temperature=1.0,
            max_scored_tokens=work.max_completion_length,
            parts=work.parts(mesh),
            replay=config.top_k > 0,
            on_host=on_host,
        ),
    )
    state = states.abstract(config, optimizer, OBJECTIVE, mesh, rules=rules, on_host=on_host)
    rows = _on_shards(abstract_rows(config, work, mesh), mesh)
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(update, donate_argnums=0).lower(state, rows)
    return _compile("train", lowered, mesh, started)


def compile_score(
    config: ModelConfig, mesh: Mesh, work: Work, rules: meshes.Rules = meshes.TRAIN_RULES
) -> Compiled:
    """Compiles the trainer's own pass over a rollout batch, `rljax.training.scoring`, for a mesh.

    Args:
      config: The model.
      mesh: A mesh of this machine's devices or of described ones.
      work: The sizes of a step.
      rules: How weights are sharded: logical axis -> mesh axes.

    Raises:
      InputError: As `compile_update`.
    """
    options = ScoreOptions(
        temperature=1.0,
        max_scored_tokens=work.max_completion_length,
        parts=work.score_parts(mesh),
        replay=config.top_k > 0,
    )
    score = make_score(config, options)
    params = models.abstract(config, mesh=mesh, rules=rules)
    batch = _on_shards(abstract_batch(config, work, mesh), mesh)
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda params, batch: score(params, batch)).lower(params, batch)
    return _compile("score", lowered, mesh, started)


def compile_prefill(
    config: ModelConfig, mesh: Mesh, work: Work, rules: meshes.Rules = meshes.ROLLOUT_RULES
) -> Compiled:
    """Compiles the sampler's largest prefill call for a mesh.

    Args:
      config: The model.
      mesh: A mesh of this machine's devices or of described ones.
      work: The sizes of a step.
      rules: How weights are sharded while sampling: logical axis -> mesh axes.

    Raises:
      InputError: As `compile_update`.
    """
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = _engine(config, mesh, work, rules).lower_prefill(work.max_prompt_length)
    return _compile("prefill", lowered, mesh, started)


def compile_decode(
    config: ModelConfig, mesh: Mesh, work: Work, rules: meshes.Rules = meshes.ROLLOUT_RULES
) -> Compiled:
    """Compiles a chunk of the sampler's decode steps for a mesh.

    Args:
      config: The model.
      mesh: A mesh of this machine's devices or of described ones.
      work: The sizes of a step.
      rules: How weights are sharded while sampling: logical axis -> mesh axes.

    Raises:
      InputError: As `compile_update`.
    """
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = _engine(config, mesh, work, rules).lower_decode()
    return _compile("decode", lowered, mesh, started)


def _engine(config: ModelConfig, mesh: Mesh, work: Work, rules: meshes.Rules) -> Engine:
    return Engine(
        config,
        mesh,
        slots=work.slots,
        page_size=work.page_size,
        num_pages=work.pages,
        max_length=work.length,
        chunk=work.decode_chunk,
        prefill_tokens=work.prefill_tokens,
        kernels="auto",
        with_routing=config.top_k > 0,
        rules=rules,
    )


def _on_shards(rows: Any, mesh: Mesh) -> Any:
    """Shapes of rows, laid out over a mesh."""
    sharding = meshes.batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), rows)


def _compile(name: str, lowered: jax.stages.Lowered, mesh: Mesh, started: float) -> Compiled:
    # `as_text` fails for programs for a thousand chips, so XLA's dump is read. A program from the
    # compilation cache writes no dump, and `as_text` is used.
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = ", ".join(f"{size(n)} {a}" for n, a in _largest(_dumped(folder, _REPORT), 2))
            raise InputError(
                f"the {name} program does not fit this mesh: {str(error).splitlines()[0]} The "
                f"largest buffers: {short(found)}; split the weights over more devices, or take "
                "fewer slots or shorter rows"
            ) from None
        seconds = time.perf_counter() - started
        text = _dumped(folder, "after_optimizations") or compiled.as_text() or ""
        report = _dumped(folder, _REPORT)
    memory = compiled.memory_analysis()
    assert memory is not None
    return Compiled(
        name=name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliases=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        largest=_largest(report),
        collectives=read_collectives(text, mesh.shape),
        seconds=seconds,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _dumped(folder: str, what: str) -> str:
    """The largest dump of a kind: that of the step, among those of small helper programs."""
    return max((p.read_text() for p in Path(folder).glob(f"*{what}.txt")), key=len, default="")


_REPORT = "memory-usage-report"
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BUFFER = re.compile(
    r"^ *\S+ *\( *\d+%\); *(?P<size>[\d.]+)(?P<unit>[KMG]?i?B?); *\d+; *\d+; *(?P<arrays>\S.*)$",
    re.MULTILINE,
)


def _largest(report: str, most: int = 5) -> tuple[tuple[int, str], ...]:
    """The largest buffers in XLA's memory usage report."""
    found = [
        (int(float(b["size"]) * _UNITS[b["unit"]]), b["arrays"]) for b in _BUFFER.finditer(report)
    ]
    return tuple(sorted(found, key=lambda buffer: -buffer[0])[:most])
