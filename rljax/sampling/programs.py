"""The engine's compiled programs, and how their arrays lie on the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from rljax import mesh as meshes
from rljax import models, processes
from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.sampling import decode as steps
from rljax.sampling.config import ShardSizes
from rljax.sampling.kernels import DecodePath
from rljax.sampling.pool import Pool, copy_pages, make_pool, pool_sharding
from rljax.sampling.unstack import unstack_config

_POOL = P(None, meshes.BATCH_AXES)
_ROWS = P(meshes.BATCH_AXES)


class Programs:
    """Prefill, page copies and decode chunks; each is compiled once for each shape it is called at.

    On a mesh every shard runs them on its own slots and pages.

    Attributes:
      config: The model of prefill.
      decode_config: The model of decode steps, its layers unstacked where that is faster.
    """

    def __init__(
        self,
        path: DecodePath,
        mesh: Mesh | None,
        rules: meshes.Rules,
        sizes: ShardSizes,
        options: steps.DecodeOptions,
    ) -> None:
        self.config = path.config
        self.decode_config = unstack_config(path.config) if path.unstacked else path.config
        self._mesh, self._rules, self._sizes, self._options = mesh, rules, sizes, options
        self._opaque = path.opaque
        self._device: Sharding | None = None

    def place_like(self, params: models.Params) -> None:
        """Without a mesh, puts all arrays where these weights are.

        An array that is bound to no device would compile programs of its own.
        """
        self._device = jax.tree.leaves(params)[0].sharding

    @property
    def _rows_layout(self) -> Sharding | None:
        return self._device if self._mesh is None else NamedSharding(self._mesh, _ROWS)

    def put(self, x: np.ndarray) -> jax.Array:
        """A host array [shards · n, ...] on its shards, laid out as the programs' results are."""
        layout = self._rows_layout
        assert layout is not None, "place_like comes first"
        return processes.put(x, layout)

    def make_pool(self) -> Pool:
        """An empty pool; one program, however often it is called."""
        layout = self._rows_layout
        if self._mesh is not None:
            layout = pool_sharding(self.config, self._mesh)
        return _pool_program(self.config, self._pages, self._sizes.page_size, layout)()

    @property
    def _pages(self) -> int:
        return self._sizes.num_pages * self._sizes.shards

    @functools.cached_property
    def prefill(self) -> Callable:
        """`steps.prefill` of the model."""
        function = functools.partial(steps.prefill, config=self.config)
        held = self._held(self.config)
        return self._over_shards(function, (_POOL, _ROWS), held, _POOL, *[_ROWS] * 4)

    @functools.cached_property
    def copy_pages(self) -> Callable:
        """`pool.copy_pages`."""
        return self._over_shards(copy_pages, _POOL, _POOL, _ROWS, _ROWS)

    @functools.cached_property
    def decode(self) -> dict[bool, Callable]:
        """`steps.decode_chunk`, by whether any row cuts its distribution."""
        return {
            filtered: self._over_shards(
                functools.partial(
                    steps.decode_chunk,
                    config=self.decode_config,
                    options=self._options,
                    filtered=filtered,
                ),
                (_POOL, _ROWS, _ROWS),
                self._held(self.decode_config),
                _POOL,
                _ROWS,
            )
            for filtered in (False, True)
        }

    @functools.cached_property
    def score(self) -> Callable:
        """Log-probabilities [R, T] of tokens [R, T], of which those in segment 1 exist."""

        def score(params: models.Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
            return models.token_logprobs(params, self.config, tokens, None, segments)[0]

        program = processes.run_serially(jax.jit(score, out_shardings=self._rows_layout))
        if self._mesh is None:
            return program
        mesh = self._mesh

        def on_mesh(*arguments: Any) -> jax.Array:
            with jax.set_mesh(mesh):
                return program(*arguments)

        return on_mesh

    def lower(self, program: Any, wanted: models.Params, *inputs: Any) -> jax.stages.Lowered:
        """The program of prefill, or of a decode chunk, lowered from shapes alone.

        Args:
          program: `prefill` or one of `decode`.
          wanted: Shapes, dtypes and layout of the weights that it takes.
          *inputs: Rows of the shapes to lower for; their values do not matter.
        """

        def laid_out(tree: Any, layout: Sharding | None) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree
            )

        pools = rows = None
        if self._mesh is not None:
            pools, rows = pool_sharding(self.config, self._mesh), self._rows_layout
        make = functools.partial(make_pool, self.config, self._pages, self._sizes.page_size)
        pool = laid_out(jax.eval_shape(make), pools)
        return program.lower(wanted, pool, *(laid_out(x, rows) for x in inputs))

    def _over_shards(self, function: Callable, out_specs: Any, *in_specs: Any) -> Callable:
        """The function on each shard's own slots and pages; jitted, the pool donated."""
        out: Any = None
        if self._mesh is not None:
            # Results lie as the arguments did, or they could not take their place.
            layout = pool_sharding(self.config, self._mesh)
            out = jax.tree.map(
                lambda spec: layout if spec == _POOL else self._rows_layout,
                out_specs,
                is_leaf=lambda spec: isinstance(spec, P),
            )
        if self._mesh is not None and (self._sizes.shards > 1 or self._opaque):
            split_by_xla = {"tensor"} if self._mesh.shape["tensor"] > 1 else set()
            function = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(meshes.AXES) - split_by_xla,
            )
        return processes.run_serially(
            jax.jit(function, donate_argnums=(in_specs.index(_POOL),), out_shardings=out)
        )

    def _held(self, config: ModelConfig) -> Any:
        """The specs of weights on a shard: whole, but for experts, which stay where they are."""
        if self._mesh is None:
            return P()

        def shards(part: meshes.Names) -> tuple[str, ...] | None:
            return tuple(axis for axis in meshes.axes_of([part]) if axis != "tensor") or None

        laid = models.shardings(config, self._mesh, self._rules)
        return jax.tree.map(lambda s: P(*map(shards, s.spec)), laid)


@functools.lru_cache(maxsize=64)
def _pool_program(
    config: ModelConfig, num_pages: int, page_size: int, layout: Sharding | None
) -> Callable[[], Pool]:
    """One program for all pools of a shape: a jitted function made anew would be compiled anew."""
    make = functools.partial(make_pool, config, num_pages, page_size)
    return jax.jit(make, out_shardings=layout)


def check_rules(rules: meshes.Rules, mesh: Mesh) -> None:
    """Refuses rules that would have a decode step gather weights."""
    for logical, target in rules.items():
        free = ("tensor",) if logical != "experts" else tuple(set(meshes.AXES) - {"stage"})
        for axis in meshes.axes_of([target]):
            if axis not in free and mesh.shape.get(axis, 1) > 1:
                raise InputError(
                    f"rollout rule {logical}={axis}: while sampling experts are split over any "
                    f"axis but stage, other weights over tensor alone; take {axis} out"
                )
