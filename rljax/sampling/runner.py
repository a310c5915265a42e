"""What runs on the device: the weights, the page pool, and the programs that work on them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import models, processes
from rljax.models.config import ModelConfig
from rljax.sampling import decode, kernels
from rljax.sampling.adjustments import AdjustmentShape
from rljax.sampling.config import EngineConfig
from rljax.sampling.decode_inputs import fill_adjustments, fill_inputs
from rljax.sampling.decode_rows import DecodeRows, Shapes
from rljax.sampling.pool import Pool
from rljax.sampling.prefill import PrefillCall, PrefillShapes
from rljax.sampling.programs import Programs
from rljax.sampling.scheduler import PrefillRequest
from rljax.sampling.unstack import unstack_params, with_kernels
from rljax.sampling.weight_sync import WeightSync

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of decode steps that was sent to the device.

    Attributes:
      rows: Its rows.
      min_active: For each shard, with how few active rows it ends.
      version: The version of the weights that it draws with.
      output: What it draws, still on the device.
      carry: What its rows begin their next chunk with, still on the device.
    """

    rows: DecodeRows
    min_active: list[int]
    version: int
    output: decode.DecodeOutput
    carry: decode.DecodeCarry


class Runner:
    """Runs prefill, page copies and decode chunks on weights that are loaded.

    Attributes:
      sizes: Slots and pages of a shard.
      shapes: The shapes of decode chunks.
      prefill_shapes: Those of prefill calls.
      records: What responses carry.
      attention: How decode steps reach the pages.
      programs: The compiled programs.
      weights: Takes the trainer's weights over.
      params: The weights that are loaded; None: there are none.
      version: Their version.
      steps: How many decode steps were run, so far (summed over shards).
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, mesh: Mesh | None, rules: meshes.Rules
    ) -> None:
        path = kernels.choose(model, mesh, config)
        self.sizes = config.of_shard(meshes.batch_shards(mesh))
        self.records = config.records.fit(model)
        self.attention = path.attention
        self.shapes = Shapes(
            slots=self.sizes.slots,
            least_rows=config.programs.least_rows,
            share=config.programs.share if path.shares else 1,
            page_size=config.page_size,
            most_pages=self.sizes.most_pages,
            exact=path.exact,
        )
        self.prefill_shapes = PrefillShapes(
            self.sizes, config.programs.prefill_tokens, config.max_length
        )
        options = decode.DecodeOptions(
            config.programs.chunk, path.attention, **dataclasses.asdict(self.records)
        )
        self.programs = Programs(path, mesh, rules, self.sizes, options)
        self.weights = WeightSync(path.config, mesh, rules)
        self.params: models.Params | None = None
        self.version = -1
        self.steps = 0
        self._path = path
        self._vocab_size, self._stop_ids = model.vocab_size, config.stop_ids
        self._decode_params: models.Params | None = None
        self._pool: Pool | None = None
        self._compiled: set[tuple] = set()

    def load(self, params: models.Params, version: int) -> None:
        """Takes weights to run with; see `Engine.load`."""
        params = self.weights.adopt(params, version)
        unstacked = params
        if self._path.unstacked:
            unstacked = unstack_params(params, self._path.config)
        if self._path.native:
            unstacked = with_kernels(unstacked, self._path.config)
        self.programs.place_like(params)
        self.params, self._decode_params, self.version = params, unstacked, version

    def unload(self) -> None:
        """Gives the weights back."""
        self.params = self._decode_params = None

    def drop_pool(self) -> None:
        """Frees the pool; the next program gets an empty one."""
        self._pool = None

    def _ready_pool(self) -> Pool:
        if self._pool is None:
            self._pool = self.programs.make_pool()
        return self._pool

    def prefill(self, waiting: list[list[PrefillRequest]]) -> None:
        """Computes what waits on each shard, by as many calls as that takes."""
        while any(waiting):
            call = self.prefill_shapes.next_call(waiting)
            routing = self.run_prefill(call)
            if self.records.with_routing:
                call.keep_routing(processes.fetch(routing))
            waiting = call.left

    def run_prefill(self, call: PrefillCall) -> jax.Array | None:
        """One call; returns the routing of its tokens (None for a dense model)."""
        self._log_first("prefill of tokens", call.tokens.shape)
        arrays = (self.programs.put(x) for x in call.arrays())
        self._pool, routing = self.programs.prefill(self.params, self._ready_pool(), *arrays)
        return routing

    def _log_first(self, *shape: Any) -> None:
        """Logs that a program is compiled, which can take long, when its shape first comes up."""
        if shape not in self._compiled:
            self._compiled.add(shape)
            _log.info("compiling %s", " ".join(map(str, shape)))

    def score(self, prompt: np.ndarray) -> np.ndarray:
        """Log-probabilities of a prompt's tokens at temperature 1; 0 for the first."""
        width = self.prefill_shapes.score_width(len(prompt))
        tokens, segments = np.zeros((2, self.sizes.shards, width), np.int32)
        tokens[0, : len(prompt)], segments[0, : len(prompt)] = prompt, 1
        arrays = (self.programs.put(x) for x in (tokens, segments))
        return processes.fetch(self.programs.score(self.params, *arrays))[0, : len(prompt)]

    def copy_pages(self, of_shard: list[list[tuple[int, int]]]) -> None:
        """Copies pages (source, target) of each shard."""
        pairs = np.zeros((2, self.sizes.shards, self.sizes.slots), np.int32)
        pairs[1] = self.sizes.num_pages  # out of bounds: no copy
        for s, copies in enumerate(of_shard):
            for i, pair in enumerate(copies):
                pairs[:, s, i] = pair
        source, target = (self.programs.put(x.reshape(-1)) for x in pairs)
        self._pool = self.programs.copy_pages(self._ready_pool(), source, target)

    def send(
        self,
        rows: DecodeRows,
        min_active: list[int],
        adjust: AdjustmentShape | None = None,
        after: Chunk | None = None,
        least_columns: tuple[int, int] = (0, 0),
        filtered: bool = False,
    ) -> Chunk:
        """Sends a chunk of decode steps to the device, and waits for nothing.

        Args:
          rows: Its rows.
          min_active: For each shard, with how few active rows it ends.
          adjust: The shape of the call's adjustments; None: it has none.
          after: A chunk of the same rows that it follows, whose results the host has not read.
          least_columns: Its page tables have at least so many columns: of a row's own pages, and of
            those that rows share.
          filtered: Whether to cut distributions even where no row asks for it.
        """
        inputs: Any = fill_inputs(rows, self.shapes, self._stop_ids, min_active, least_columns)
        if adjust is not None:
            changes = fill_adjustments(rows, adjust, self._vocab_size)
            inputs = inputs.replace(adjustments=changes)
        filtered = filtered or any(q.sampling.filtered for _, _, q in rows)
        tables = inputs.tables
        self._log_first(
            "decode with pages", tables.own.shape, tables.shared.shape, filtered, adjust
        )
        inputs = jax.tree.map(self.programs.put, inputs)
        if after is not None:
            inputs = inputs.replace(carry=after.carry)
        self._pool, output, carry = self.programs.decode[filtered](
            self._decode_params, self._ready_pool(), inputs
        )
        return Chunk(rows, min_active, self.version, output, carry)

    def fetch(self, chunk: Chunk) -> decode.DecodeOutput:
        """What a chunk drew, once it has."""
        output = processes.fetch(chunk.output)
        self.steps += int(output.steps.sum())
        return output

    def lower_decode(self) -> jax.stages.Lowered:
        """The program of a decode chunk at full length, lowered from shapes alone."""
        columns = (self.sizes.most_pages, 0)
        rows = DecodeRows([[None] * self.sizes.slots] * self.sizes.shards, shared=False)
        inputs: Any = fill_inputs(
            rows, self.shapes, self._stop_ids, [0] * self.sizes.shards, columns
        )
        wanted = self.weights.wanted(self.programs.decode_config)
        return self.programs.lower(self.programs.decode[False], wanted, inputs)

    def lower_prefill(self, prompt_length: int) -> jax.stages.Lowered:
        """The program of the largest prefill call, lowered from shapes alone."""
        shapes = self.prefill_shapes.every(prompt_length, self.sizes.slots)
        call = self.prefill_shapes.blank(*max(shapes, key=lambda s: (s[0] * s[1], s[1])))
        wanted = self.weights.wanted(self.programs.config)
        return self.programs.lower(self.programs.prefill, wanted, *call.arrays())
