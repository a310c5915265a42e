"""The sampling engine: continuous batching over a paged KV cache."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from rljax_kernels import cpu

from rljax import mesh as meshes
from rljax import models, processes
from rljax.errors import EngineStateError, InputError
from rljax.models.config import LatentAttention, ModelConfig
from rljax.sampling import cache, decode, layers, weight_sync
from rljax.sampling.rows import Rows, Shapes, arrange, bucket, buckets
from rljax.sampling.scheduler import Fill, Group, Shard
from rljax.sampling.scheduler import Sequence as Sample
from rljax.sampling.types import Response, SamplingParams

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of decode steps that was sent to the device.

    Attributes:
      rows: Its rows.
      enough: For each shard, with how few active rows it ends.
      drawn: What it drew, still on the device.
      rest: What its rows begin their next chunk with.
    """

    rows: Rows
    enough: list[int]
    drawn: decode.Drawn
    rest: decode.Rest


class Engine:
    """Generates responses with a model's own forward pass, in slots over a page pool.

    It holds a lease on the weights given to `load` until the next `load` or `unload`: whoever
    trains must not donate those buffers meanwhile. On a mesh, slots and pages are split over
    stage×data×fsdp×expert and each shard schedules for itself.

    A response depends on its prompt, its sampling parameters, the weights and the key (seed,
    prompt id, draw, sample id, position) alone: not on its slot, its neighbours or the order of
    requests. At equal compiled shapes that holds bit for bit; where shapes differ,
    log-probabilities differ by rounding.

    Attributes:
      version: Version of the weights that are loaded.
      num_preemptions: How many sequences were put back for want of pages, so far.
      prefix_hits: How many tokens of prompts were found in cached pages, so far.
      steps: How many decode steps were run, so far (summed over shards).
      moved: Bytes of weights that the last `load` laid out anew or brought from other devices.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        slots: int = 64,
        page_size: int = 16,
        num_pages: int | None = None,
        max_length: int = 1024,
        *,
        chunk: int = 32,
        prefill_tokens: int = 4096,
        stop_ids: int = 8,
        least_rows: int = 4,
        share: int = 8,
        gathered: bool | None = None,
        native: bool = False,
        with_routing: bool = False,
        max_support: int = 0,
        top_logprobs: int = 0,
        prefix_cache: bool = True,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        rules: meshes.Rules = meshes.ROLLOUT_RULES,
    ) -> None:
        """Plans the cache; nothing is compiled or allocated on the device yet.

        Args:
          config: The model.
          mesh: Where to run; None: the default device.
          slots: Sequences decoded at once, on all shards together.
          page_size: Tokens of a page.
          num_pages: Pages of the whole pool; None: enough that none is ever put back.
          max_length: Longest prompt plus response.
          chunk: Most decode steps between two looks of the host. A chunk ends earlier where the
            next fewer rows would do, or where waiting sequences can have an eighth of the slots.
            Unless pages are copied, the next one is sent before the host looks.
          prefill_tokens: Most tokens of one prefill call, padding counted.
          stop_ids: Most end ids of one request.
          least_rows: Decode steps run on as few rows as hold the active sequences, in powers of two
            from here up (of 1.5 with `native`); with `least_rows` equal to `slots` all have the
            same shape.
          share: So many samples of a prompt read its pages together, where that takes no more
            rows; 1: none do.
          gathered: Whether a chunk copies the active sequences' pages out of the pool and works
            on the copy, layer by layer, which CPUs are fast at; it takes as much memory as those
            pages, padded to the longest sequence. Else each step reads the pages themselves, in a
            loop over layers, and nothing is shared. None: on CPU only.
          native: Whether decode steps use the kernels of `rljax_kernels.cpu`, which a C++ compiler
            builds at first use: on one CPU in float32 up to twice as fast, with fewer programs to
            compile. Pages are then read where they are, but for latent attention's.
          with_routing: Whether responses carry the experts of every token.
          max_support: Requests with top-k, top-p or min-p draw from so many tokens at most, the
            likeliest of the kept set, and responses carry them, for the trainer to score under
            the same distribution; 0: sets have any size and are not returned.
          top_logprobs: Responses carry so many of the likeliest tokens in each one's place.
          prefix_cache: Whether full pages of prompts are kept while nobody needs their room, for
            later prompts that begin alike under the same weights. Prompts admitted at the same
            time do not find each other's.
          detokenize: Token ids to text; needed where stop strings are used.
          rules: How weights lie on the mesh: logical axis -> mesh axes. Experts may be split over
            any, other weights over `tensor`.

        Raises:
          ValueError: Slots or pages do not divide over the shards, a shard's pages cannot hold
            one sequence of `max_length`, `max_support` is negative, `top_logprobs` is negative
            or exceeds the vocabulary, kernels are wanted where they are of no use, or a rule
            splits what decoding needs whole.
          RuntimeError: The kernels cannot be built.
        """
        if native:
            _check_native(config, mesh)
            cpu.register()
            config = dataclasses.replace(config, expert_backend="native")
        self.config, self.mesh = config, mesh
        self.max_length, self.page_size, self.chunk = max_length, page_size, chunk
        self.with_routing = with_routing and config.top_k > 0
        self.max_support = min(max_support, config.vocab_size)
        self.top_logprobs = top_logprobs
        self.version = -1
        self.steps = 0
        self.moved = 0
        self._rules = rules
        self._detokenize = detokenize
        self._stop_ids = stop_ids
        self._prefill_tokens = prefill_tokens
        self._shards = meshes.batch_shards(mesh)
        most = -(-max_length // page_size)
        if slots % self._shards:
            raise InputError(
                f"slots={slots} do not divide over stage×data×fsdp×expert = {self._shards}; "
                "use a multiple"
            )
        if max_support < 0:
            raise InputError(f"max_support={max_support} must be 0 (off) or more")
        if not 0 <= top_logprobs <= config.vocab_size:
            raise InputError(
                f"top_logprobs={top_logprobs} must lie between 0 and the vocabulary's "
                f"{config.vocab_size}"
            )
        if mesh is not None:
            _check_rules(rules, mesh)
        self._slots, self._most_pages = slots // self._shards, most
        num_pages = (2 * most * slots) if num_pages is None else num_pages
        if num_pages % self._shards:
            raise InputError(
                f"num_pages={num_pages} do not divide over stage×data×fsdp×expert = "
                f"{self._shards}; use a multiple"
            )
        self._num_pages = num_pages // self._shards
        if self._num_pages < most + 1:
            raise InputError(
                f"num_pages={num_pages} gives a shard {self._num_pages} pages of {page_size}; one "
                f"sequence of max_length={max_length} needs {most + 1}"
            )
        if gathered is None:
            device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
            gathered = device.platform == "cpu"
        self._attention: decode.Attention = "copy" if gathered else "place"
        latent = any(isinstance(b.attention, LatentAttention) for b in config.layers)
        if native and not latent:
            self._attention = "native"
        self._native, self._apart = native, native or gathered
        self._shapes = Shapes(
            slots=self._slots,
            least_rows=least_rows,
            share=share if self._attention == "copy" else 1,
            page_size=page_size,
            most_pages=most,
            exact=self._attention == "native",
        )
        self._plan = [
            Shard(self._slots, self._num_pages, page_size, prefix_cache)
            for _ in range(self._shards)
        ]
        self._params: Any = None
        self._decode_params: Any = None
        self._pool: cache.Pool | None = None
        self._asked: dict[tuple[int, int], int] = {}
        self._groups: list[Group] | None = None  # of the call that is under way

    @property
    def num_preemptions(self) -> int:
        """How many sequences were put back for want of pages, so far."""
        return sum(s.num_preemptions for s in self._plan)

    @property
    def prefix_hits(self) -> int:
        """How many tokens of prompts were found in cached pages, so far."""
        return sum(s.prefix_hits for s in self._plan)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds, on all shards; those that are cached among them."""
        return sum(s.pages.num_free for s in self._plan)

    @property
    def cached_pages(self) -> int:
        """Pages that nobody holds and that contain prompts, on all shards."""
        return sum(s.pages.num_cached for s in self._plan)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, as new weights do."""
        for shard in self._plan:
            shard.pages.forget()

    def load(self, params: models.Params, version: int) -> None:
        """Takes weights to sample with, under a lease, and forgets what others left in the cache.

        Weights in the compute dtypes and the rollout layout are used as they are, the very same
        buffers; others are cast and laid out by one jitted function, and those of other devices
        are brought over piece by piece. Bytes and time are logged.

        Raises:
          ValueError: The parameters are not the model's, or the version falls.
        """
        models.check(params, self.config)
        if version < self.version:
            raise InputError(
                f"version {version} is older than the loaded {self.version}; versions only rise"
            )
        self._params = self._adopt(params, version)
        self._decode_params = self._params
        if self._apart:
            self._decode_params = layers.views(self._params, self.config)
        if self._native:
            self._decode_params = layers.native(self._decode_params, self.config)
        self.forget_prefixes()
        self.version = version

    def unload(self, keep_pool: bool = False) -> None:
        """Gives the weights back, and frees the KV pool unless it is to be kept."""
        self._params = self._decode_params = None
        if not keep_pool:
            self._pool = None
            self.forget_prefixes()

    def _wanted(self, config: ModelConfig) -> models.Params:
        """Shapes, dtypes and layout of the weights that the programs of a model take."""
        laid = models.abstract(config, mesh=self.mesh, rules=self._rules)
        cast = jax.eval_shape(lambda p: models.cast_for_compute(p, config), laid)
        return jax.tree.map(
            lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w.sharding), cast, laid
        )

    def _adopt(self, params: models.Params, version: int) -> models.Params:
        wanted, mesh = self._wanted(self.config), self.mesh

        def same(have: Any, want: Any) -> bool:
            if not isinstance(have, jax.Array) or have.dtype != want.dtype:
                return False
            return mesh is None or have.sharding.is_equivalent_to(want.sharding, have.ndim)

        def here(x: Any) -> bool:
            return mesh is None or (
                isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)
            )

        self.moved = 0
        if all(jax.tree.leaves(jax.tree.map(same, params, wanted))):
            return params
        started = time.perf_counter()
        near = all(map(here, jax.tree.leaves(params)))
        params = self._convert(params) if near else weight_sync.move(params, wanted)
        jax.block_until_ready(params)
        self.moved = sum(x.nbytes for x in jax.tree.leaves(params))
        _log.debug(
            "version %d: %d bytes of weights %s in %.3f s",
            version,
            self.moved,
            "laid out for sampling" if near else "brought from other devices",
            time.perf_counter() - started,
        )
        return params

    @functools.cached_property
    def _convert(self) -> Callable:
        """Casts weights and lays them out for rollouts; one program for all loads."""
        out = None
        if self.mesh is not None:
            out = models.shardings(self.config, self.mesh, self._rules)
        convert = jax.jit(lambda p: models.cast_for_compute(p, self.config), out_shardings=out)
        return processes.run_serially(convert)

    # The compiled programs, one for each shape bucket that comes up.

    def _over_shards(self, function: Callable, out_specs: Any, *in_specs: Any) -> Callable:
        """The function on each shard's own slots and pages; jitted, the pool donated."""
        out: Any = None
        if self.mesh is not None:
            # What comes back must lie as it did, or it cannot take the place of what was handed in.
            layout = cache.pool_sharding(self.config, self.mesh)
            out = jax.tree.map(
                lambda spec: layout if spec == _POOL else self._rows_layout,
                out_specs,
                is_leaf=lambda spec: isinstance(spec, P),
            )
        if self.mesh is not None and self._shards > 1:
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(meshes.AXES) - {"tensor"},  # which XLA splits
            )
        return processes.run_serially(
            jax.jit(function, donate_argnums=(in_specs.index(_POOL),), out_shardings=out)
        )

    def _held(self, config: ModelConfig) -> Any:
        """The specs of weights on a shard: whole, but for experts, which stay where they are."""
        if self.mesh is None:
            return P()

        def shards(part: meshes.Names) -> tuple[str, ...] | None:
            return tuple(axis for axis in meshes.axes_of([part]) if axis != "tensor") or None

        laid = models.shardings(config, self.mesh, self._rules)
        return jax.tree.map(lambda s: P(*map(shards, s.spec)), laid)

    @functools.cached_property
    def _prefill(self) -> Callable:
        function = functools.partial(decode.prefill, config=self.config)
        held = self._held(self.config)
        return self._over_shards(function, (_POOL, _ROWS), held, _POOL, *[_ROWS] * 4)

    @functools.cached_property
    def _copy(self) -> Callable:
        return self._over_shards(cache.copy_pages, _POOL, _POOL, _ROWS, _ROWS)

    @property
    def _decode_config(self) -> ModelConfig:
        return layers.apart(self.config) if self._apart else self.config

    @functools.cached_property
    def _decode(self) -> dict[bool, Callable]:
        return {
            filtered: self._over_shards(
                functools.partial(
                    decode.decode_chunk,
                    config=self._decode_config,
                    chunk=self.chunk,
                    filtered=filtered,
                    with_routing=self.with_routing,
                    attention=self._attention,
                    max_support=self.max_support,
                    top_logprobs=self.top_logprobs,
                ),
                (_POOL, _ROWS, _ROWS),
                self._held(self._decode_config),
                _POOL,
                _ROWS,
            )
            for filtered in (False, True)
        }

    def lower_decode(self) -> jax.stages.Lowered:
        """The program of a decode chunk at full length, lowered from shapes alone.

        Nothing is allocated, so that the mesh may be of described devices: for planning.
        """

        def laid_out(tree: Any, layout: Sharding | None) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree
            )

        pools = rows = None
        if self.mesh is not None:
            pools, rows = cache.pool_sharding(self.config, self.mesh), self._rows_layout
        pages = self._num_pages * self._shards
        pool = jax.eval_shape(lambda: cache.make_pool(self.config, pages, self.page_size))
        nobody = Rows([[None] * self._slots for _ in range(self._shards)], shared=False)
        slots = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype),
            self._blank_slots(nobody, self._most_pages, 0),
        )
        program: Any = self._decode[False]
        return program.lower(
            self._wanted(self._decode_config), laid_out(pool, pools), laid_out(slots, rows)
        )

    def _put(self, x: np.ndarray) -> jax.Array:
        """A host array [shards · n, ...] on its shards, laid out as the programs' results are."""
        return processes.put(x, self._rows_layout)

    @property
    def _rows_layout(self) -> Sharding:
        if self.mesh is None:
            # Where the weights are: an array bound to no device would compile programs of its own.
            return jax.tree.leaves(self._params)[0].sharding
        return NamedSharding(self.mesh, _ROWS)

    def _ready_pool(self) -> cache.Pool:
        if self._pool is None:
            make = functools.partial(
                cache.make_pool, self.config, self._num_pages * self._shards, self.page_size
            )
            out = self._rows_layout
            if self.mesh is not None:
                out = cache.pool_sharding(self.config, self.mesh)
            self._pool = jax.jit(make, out_shardings=out)()
        return self._pool

    # Requests.

    def generate(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        num_generations: int,
        sampling: SamplingParams | Sequence[SamplingParams],
        seed: int = 0,
        prompt_ids: Sequence[int] | None = None,
        draws: Sequence[int] | None = None,
    ) -> Iterator[list[Response]]:
        """Samples `num_generations` responses of each prompt.

        Args:
          prompts: Token ids of each.
          num_generations: Samples a prompt, G.
          sampling: One for all, one a prompt, or one a response (G for each prompt in turn).
          seed: Part of every random key.
          prompt_ids: Names of the prompts in their keys; by default their places.
          draws: How often each prompt was asked before; by default the engine's own count for
            this seed and prompt id.

        Yields:
          The G responses of a prompt, as soon as the last of them is finished.

        Raises:
          ValueError: A prompt is empty, too long, or has ids outside the vocabulary; or there
            are not as many sampling parameters, ids or draws as prompts.
          RuntimeError: No weights are loaded, or another call is not finished.
        """
        groups = self._requests(prompts, num_generations, sampling, seed, prompt_ids, draws)
        return self._run(groups)

    def cancel(self, prompt_index: int) -> bool:
        """Gives up a group of the `generate` that is under way: it is not yielded, its pages free.

        To be called between two of its groups, by the thread that iterates.

        Args:
          prompt_index: Place of its prompt in the call.

        Returns:
          Whether there was something to give up: False once it was yielded or cancelled.

        Raises:
          RuntimeError: No `generate` is under way.
          ValueError: It has no such prompt.
        """
        if self._groups is None:
            raise EngineStateError("no generate() is under way; cancel between two of its groups")
        if not 0 <= prompt_index < len(self._groups):
            raise InputError(
                f"prompt_index={prompt_index} is not one of the {len(self._groups)} prompts; "
                "count from 0"
            )
        group = self._groups[prompt_index]
        if group.over:
            return False
        group.over = True
        self._plan[prompt_index % self._shards].cancel(group)
        return True

    def page_tables(self) -> dict[tuple[int, int], list[int]]:
        """The pages of each sequence that is decoding now, by prompt_index and sample_index.

        A sequence's tokens lie in its pages in order. Pages are numbered on each shard; prompt i
        is on shard i modulo their number.
        """
        active = (sequence for shard in self._plan for sequence in shard.active)
        return {(q.group.index, q.sample): list(q.pages) for q in active}

    def _requests(
        self, prompts: Any, g: int, sampling: Any, seed: int, prompt_ids: Any, draws: Any
    ) -> list[Group]:
        if self._params is None:
            raise EngineStateError("the engine has no weights; call load(params, version) first")
        if g < 1:
            raise InputError(f"num_generations={g} must be at least 1")
        n = len(prompts)
        each = [sampling] * n if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) == n:
            each = [params for params in each for _ in range(g)]
        ids = list(range(n)) if prompt_ids is None else [int(i) for i in prompt_ids]
        if len(each) != n * g:
            raise InputError(
                f"{len(each)} sampling for {n} prompts of {g} responses; give one for all, one a "
                "prompt or one a response"
            )
        for name, values in (("prompt_ids", ids), ("draws", draws)):
            if values is not None and len(values) != n:
                raise InputError(f"{len(values)} {name} for {n} prompts; give one a prompt")
        if draws is None:
            draws = []
            for i in ids:
                draws.append(self._asked.get((seed, i), 0))
                self._asked[seed, i] = draws[-1] + 1
        groups = []
        for index, prompt in enumerate(prompts):
            tokens = np.asarray(prompt, np.int32)
            mine = each[index * g : (index + 1) * g]
            self._check(index, tokens, mine)
            key = (seed & 0x7FFFFFFF, ids[index] & 0x7FFFFFFF, int(draws[index]))
            group = Group(index, tokens, key)
            room = self.max_length - len(tokens)
            group.members = [
                Sample(index * g + k, group, k, params, min(params.max_tokens, room))
                for k, params in enumerate(mine)
            ]
            groups.append(group)
        return groups

    def _check(self, index: int, tokens: np.ndarray, each: list[SamplingParams]) -> None:
        if tokens.ndim != 1 or not len(tokens):
            raise InputError(
                f"prompt {index} is empty; give at least one token, such as the "
                "begin-of-sequence id"
            )
        if len(tokens) >= self.max_length:
            raise InputError(
                f"prompt {index} has {len(tokens)} tokens, which leaves no room in "
                f"max_length={self.max_length}; shorten it or raise max_length"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise InputError(
                f"prompt {index} holds token ids from {tokens.min()} to {tokens.max()}; the "
                f"vocabulary has {self.config.vocab_size}"
            )
        most = max(len(params.stop_token_ids) for params in each)
        if most > self._stop_ids:
            raise InputError(
                f"{most} stop_token_ids; the engine takes {self._stop_ids}: raise "
                "Engine(stop_ids=...)"
            )
        if any(params.stop for params in each) and self._detokenize is None:
            raise InputError("stop strings need Engine(..., detokenize=tokenizer.decode)")

    def _run(self, groups: list[Group]) -> Iterator[list[Response]]:
        if self._groups is not None:
            raise EngineStateError(
                "the engine is in the middle of another generate(); finish or "
                "close that iterator first"
            )
        self._groups = groups
        try:
            for i, group in enumerate(groups):
                shard = self._plan[i % self._shards]
                for member in group.members:
                    heapq.heappush(shard.waiting, member)
            chunk: _Chunk | None = None
            while any(s.active or s.waiting for s in self._plan):
                if chunk is None:
                    for shard in self._plan:
                        shard.grow(self.chunk)
                    self._admit()
                    rows = arrange([shard.active for shard in self._plan], self._shapes)
                    chunk = self._send(rows)
                # The device goes on with the same rows while the host looks at what they drew.
                following = self._send(chunk.rows, after=chunk) if self._goes_on(chunk) else None
                done = self._collect(chunk.rows, self._fetch(chunk))
                chunk = following
                for group in done:
                    if not group.over:
                        group.over = True
                        yield self._responses(group)
        finally:
            for shard in self._plan:
                shard.clear()
            self._groups = None

    # One round: admit, prefill, copy, decode, collect.

    def _admit(self) -> None:
        plans = [shard.admit(self.chunk) for shard in self._plan]
        fills = [fill for fill, _ in plans]
        while any(fills):
            fills = self._prefill_round(fills)
        for shard in self._plan:
            shard.remember()
        if any(copies for _, copies in plans):
            pairs = np.zeros((2, self._shards, self._slots), np.int32)
            pairs[1] = self._num_pages  # out of bounds: no copy
            for s, (_, copies) in enumerate(plans):
                for i, (source, target) in enumerate(copies):
                    pairs[:, s, i] = source, target
            self._pool = self._copy(
                self._ready_pool(), self._put(pairs[0].reshape(-1)), self._put(pairs[1].reshape(-1))
            )

    def _prefill_round(self, fills: list[list[Fill]]) -> list[list[Fill]]:
        """Runs one bucket of prefill rows; returns what is left."""
        longest = max(len(f.tokens) for part in fills for f in part)
        width = bucket(longest, _WIDTH, self._widest)
        rows = self._prefill_rows(max(len(part) for part in fills), width)
        batch = [part[:rows] for part in fills]
        ends = [f.start + min(len(f.tokens), width) for part in batch for f in part]
        columns = bucket(self._pages(max(ends)), self._pages(width), self._most_pages, _GROWTH)
        tokens = np.zeros((self._shards, rows, width), np.int32)
        start, count = (np.zeros((self._shards, rows), np.int32) for _ in range(2))
        table = np.zeros((self._shards, rows, columns), np.int32)
        rest: list[list[Fill]] = []
        for s, part in enumerate(batch):
            for r, fill in enumerate(part):
                piece = fill.tokens[:width]
                tokens[s, r, : len(piece)] = piece
                start[s, r], count[s, r] = fill.start, len(piece)
                used = fill.table[:columns]
                table[s, r, : len(used)] = used
            rest.append(fills[s][rows:])
        arrays = (x.reshape(-1, *x.shape[2:]) for x in (tokens, start, count, table))
        self._pool, routing = self._prefill(
            self._params, self._ready_pool(), *(self._put(x) for x in arrays)
        )
        if self.with_routing:
            chosen = processes.fetch(routing).reshape(self._shards, rows, width, *routing.shape[2:])
        for s, part in enumerate(batch):
            longer = []
            for r, fill in enumerate(part):
                n = int(count[s, r])
                if self.with_routing and isinstance(fill.owner, Group):
                    piece = chosen[s, r, :n]
                    old = fill.owner.routing if fill.start else None
                    fill.owner.routing = piece if old is None else np.concatenate([old, piece])
                if len(fill.tokens) > n:
                    longer.append(Fill(fill.tokens[n:], fill.start + n, fill.table, fill.owner))
            rest[s] = longer + rest[s]
        return rest

    @property
    def _widest(self) -> int:
        """Tokens of a prompt that one prefill call takes."""
        most = min(self._prefill_tokens // 8, self.max_length)
        return bucket(most, _WIDTH, 1 << most.bit_length())

    def _prefill_rows(self, n: int, width: int) -> int:
        """Rows of the next prefill call where n prompts of that width wait.

        Powers of four are few programs; what fills no more than half of one is split instead.
        """
        rows = bucket(n, _ROWS_LEAST, self._most_rows(width), _GROWTH)
        return rows // _GROWTH if 2 * n <= rows and rows > _ROWS_LEAST else rows

    def _most_rows(self, width: int) -> int:
        """Prompts of that width that one prefill call takes."""
        fits = max(self._prefill_tokens // width, 1)
        return min(1 << (fits.bit_length() - 1), bucket(self._slots, _ROWS_LEAST, 1 << 30))

    def _pages(self, tokens: int) -> int:
        return min(-(-tokens // self.page_size), self._most_pages)

    def warm_up(self, filtered: bool = False) -> int:
        """Compiles every shape that can come up, so that nothing is compiled later.

        Args:
          filtered: Whether requests with top-k, top-p or min-p will come.

        Returns:
          How many programs were run.

        Raises:
          RuntimeError: No weights are loaded.
        """
        if self._params is None:
            raise EngineStateError("the engine has no weights; call load(params, version) first")
        n = self._shards
        ran = 0
        for rows, pages, shared in self._shapes.every():
            nobody = Rows([[None] * rows for _ in range(n)], shared > 0)
            for kind in {False, filtered}:
                self._fetch(self._send(nobody, pages, shared, kind))
                ran += 1
        for width in buckets(_WIDTH, self._widest):
            most = self._most_rows(width)
            for rows in buckets(_ROWS_LEAST, most, _GROWTH):
                for columns in buckets(self._pages(width), self._most_pages, _GROWTH):
                    tokens = np.zeros((n * rows, width), np.int32)
                    none = np.zeros(n * rows, np.int32)
                    table = np.zeros((n * rows, columns), np.int32)
                    self._pool, _ = self._prefill(
                        self._params,
                        self._ready_pool(),
                        *(self._put(x) for x in (tokens, none, none, table)),
                    )
                    ran += 1
        nowhere = np.full(n * self._slots, self._num_pages, np.int32)
        self._pool = self._copy(
            self._ready_pool(), self._put(np.zeros_like(nowhere)), self._put(nowhere)
        )
        return ran + 1

    def _goes_on(self, chunk: _Chunk) -> bool:
        """Whether the next chunk may begin before the host has seen what this one drew.

        Not where pages are copied for each chunk; where sequences wait for room, stop strings are
        to be found or the device has not heard of a cancelled group; or where fewer rows would do,
        nothing is left to draw or pages run out. If so, its pages are reserved.
        """
        if self._attention == "copy" or any(shard.waiting for shard in self._plan):
            return False
        if any(q.sampling.stop or (q.group.over and not q.finish_reason) for *_, q in chunk.rows):
            return False
        left = [q.limit - len(q.tokens) for shard in self._plan for q in shard.active]
        return (
            max(left) > self.chunk
            and all(
                not enough or len(shard.active) > enough
                for shard, enough in zip(self._plan, chunk.enough, strict=True)
            )
            and all([shard.reserve(2 * self.chunk) for shard in self._plan])
        )

    def _send(
        self,
        rows: Rows,
        pages: int = 0,
        shared_pages: int = 0,
        filtered: bool = False,
        after: _Chunk | None = None,
    ) -> _Chunk:
        """Sends a chunk of decode steps to the device, and waits for nothing.

        Args:
          rows: Its rows.
          pages: Its page tables have at least so many columns.
          shared_pages: Those that rows share have at least so many.
          filtered: Whether to cut distributions even where no row asks for it.
          after: A chunk of the same rows that it follows, whose results the host has not seen.
        """
        full = {id(q): self._shared_pages(q) if rows.shared else 0 for _, _, q in rows}
        for _, _, q in rows:
            pages = max(pages, len(q.pages) - full[id(q)])
            shared_pages = max(shared_pages, full[id(q)])
            filtered |= q.sampling.filtered
        n, slots = self._shards, self._blank_slots(rows, pages, shared_pages)
        for s, row, q in rows:
            at, shared = (s, row), full[id(q)]
            params = q.sampling
            slots.token[at], slots.position[at], slots.active[at] = q.last_token, q.fed, True
            slots.remaining[at] = q.limit - len(q.tokens)
            slots.ids[at] = (*q.group.key, q.sample)
            slots.temperature[at], slots.top_p[at] = params.temperature, params.top_p
            slots.top_k[at], slots.min_p[at] = params.top_k, params.min_p
            slots.stop[s, row, : len(params.stop_token_ids)] = params.stop_token_ids
            slots.table[s, row, : len(q.pages) - shared] = q.pages[shared:]
            if rows.shared:
                slots.base[at] = shared * self.page_size
                slots.shared[s, row // self._shapes.share, :shared] = q.pages[:shared]
        flat = jax.tree.map(lambda x: self._put(x.reshape(n * x.shape[1], *x.shape[2:])), slots)
        if after is not None:
            flat = flat.replace(**vars(after.rest))
        self._pool, drawn, rest = self._decode[filtered](
            self._decode_params, self._ready_pool(), flat
        )
        return _Chunk(rows, slots.enough[:, 0].tolist(), drawn, rest)

    def _fetch(self, chunk: _Chunk) -> decode.Drawn:
        """What a chunk drew, once it has."""
        drawn = processes.fetch(chunk.drawn)
        self.steps += int(drawn.steps.sum())
        return drawn

    def _shared_pages(self, q: Sample) -> int:
        return (len(q.group.prompt) - 1) // self.page_size

    def _blank_slots(self, rows: Rows, pages: int, shared_pages: int) -> decode.Slots:
        """Slots of empty rows, as numpy arrays [shards, rows of a shard, ...]."""
        n, count = self._shards, len(rows.of_shard[0])
        blocks, columns = 1, 0
        if rows.shared:
            blocks = count // self._shapes.share
            columns = self._shapes.shared_pages(shared_pages)

        def full(value: int, *shape: int) -> np.ndarray:
            return np.full((n, *shape), value, np.int32)

        fields: dict[str, Any] = dict(
            token=full(0, count),
            position=full(0, count),
            active=np.zeros((n, count), bool),
            remaining=full(0, count),
            ids=full(0, count, 4),
            temperature=np.ones((n, count), np.float32),
            top_p=np.ones((n, count), np.float32),
            top_k=full(0, count),
            min_p=np.zeros((n, count), np.float32),
            stop=full(-1, count, self._stop_ids),
            enough=np.asarray([[self._enough(s, count)] for s in range(n)], np.int32),
            table=full(0, count, self._shapes.pages(pages, count)),
            base=full(0, count),
            shared=full(0, blocks, columns),
        )
        return decode.Slots(**fields)

    def _enough(self, shard: int, rows: int) -> int:
        """With so few sequences left on a shard, the host had better look again."""
        plan = self._plan[shard]
        active, fewer = len(plan.active), self._shapes.fewer(rows)
        # A shard that needs no more rows than those already waits for no other.
        smaller = fewer if active > fewer else 0
        room = active - max(self._slots // 8, 1) if plan.waiting else 0
        return max(smaller, room, 0)

    def _collect(self, rows: Rows, drawn: decode.Drawn) -> list[Group]:
        """Hands each sequence its tokens; returns the groups that are finished by it."""
        done = []
        for s, row, q in rows:
            if q.slot is None:  # finished or cancelled since the chunk was sent
                continue
            at = s * len(rows.of_shard[s]) + row
            n = int(drawn.count[at])
            q.tokens += drawn.tokens[at, :n].tolist()
            q.logp += drawn.logp[at, :n].tolist()
            q.versions += [self.version] * n
            for name, x in drawn.records.items():
                q.records.setdefault(name, []).append(np.asarray(x[at, :n]))
            if self.max_support and "support" not in drawn.records:
                whole = np.full((n, self.max_support), -1, np.int32)
                q.records.setdefault("support", []).append(whole)
            reason = None
            if drawn.stopped[at]:
                reason = "stop"
            elif len(q.tokens) >= q.limit:
                reason = "length"
            if q.sampling.stop and self._cut_at_string(q, n):
                reason = "stop"
            if reason is not None:
                self._plan[s].finish(q, reason)
                if all(m.finish_reason for m in q.group.members):
                    done.append(q.group)
        return done

    def _cut_at_string(self, q: Sample, new: int) -> bool:
        """Cuts a sequence after the token that completes a stop string, if one of the new does."""
        assert self._detokenize is not None
        for end in range(len(q.tokens) - new + 1, len(q.tokens) + 1):
            text = self._detokenize(q.tokens[:end])
            if any(stop in text for stop in q.sampling.stop):
                del q.tokens[end:], q.logp[end:], q.versions[end:]
                return True
        return False

    def _responses(self, group: Group) -> list[Response]:
        return [
            Response(
                prompt_index=group.index,
                sample_index=q.sample,
                tokens=np.asarray(q.tokens, np.int32),
                logp=np.asarray(q.logp, np.float32),
                finish_reason=str(q.finish_reason),
                truncated=q.finish_reason == "length",
                version=np.asarray(q.versions, np.int32),
                routing=self._routing(group, q) if self.with_routing else None,
                **{
                    name: np.concatenate(parts)[: len(q.tokens)]
                    for name, parts in q.records.items()
                    if name != "routing"
                },
            )
            for q in group.members
        ]

    def _routing(self, group: Group, q: Sample) -> np.ndarray:
        layers, k = len(self.config.mixture_layers), self.config.top_k
        parts = [p for p in (group.routing, *q.records["routing"]) if p is not None]
        found = np.concatenate([np.zeros((0, layers, k), np.int32), *parts])
        total = len(group.prompt) + len(q.tokens)
        out = np.full((total, layers, k), -1, np.int32)
        out[: total - 1] = found[: total - 1]
        return out


_WIDTH = 32  # least tokens of a prefill row
_ROWS_LEAST = 4  # least rows of a prefill call
_GROWTH = 4  # of the rows of a prefill call and of the pages that it may read

_POOL = P(None, meshes.BATCH_AXES)
_ROWS = P(meshes.BATCH_AXES)


def _check_native(config: ModelConfig, mesh: Mesh | None) -> None:
    """Refuses what the kernels for CPUs are not for."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    devices = 1 if mesh is None else mesh.size
    if (device.platform, devices, config.dtype) != ("cpu", 1, "float32"):
        raise InputError(
            f"native=True is for one cpu device in float32, got {devices} {device.platform} in "
            f"{config.dtype}; leave it off"
        )


def _check_rules(rules: meshes.Rules, mesh: Mesh) -> None:
    """Refuses rules that would have a decode step gather weights."""
    for logical, target in rules.items():
        free = ("tensor",) if logical != "experts" else tuple(set(meshes.AXES) - {"stage"})
        for axis in meshes.axes_of([target]):
            if axis not in free and mesh.shape.get(axis, 1) > 1:
                raise InputError(
                    f"rollout rule {logical}={axis}: while sampling experts are split over any "
                    f"axis but stage, other weights over tensor alone; take {axis} out"
                )


def generate(
    params: models.Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int] | np.ndarray],
    num_generations: int,
    sampling: SamplingParams,
    seed: int = 0,
    mesh: Mesh | None = None,
    **engine: Any,
) -> list[list[Response]]:
    """Samples once, with an engine made for it; the groups come in the prompts' order.

    Args:
      params: The weights.
      config: The model.
      prompts: Token ids of each.
      num_generations: Samples a prompt.
      sampling: How to draw.
      seed: Part of every random key.
      mesh: Where to run; None: the default device.
      **engine: Further arguments of `Engine`; `slots` and `max_length` fit the call by default.
    """
    longest = max((len(p) for p in prompts), default=1)
    engine.setdefault("max_length", longest + sampling.max_tokens)
    shards = meshes.batch_shards(mesh)
    engine.setdefault("slots", shards * bucket(len(prompts) * num_generations, 1, 64))
    runner = Engine(config, mesh, **engine)
    runner.load(params, version=0)
    groups = runner.generate(prompts, num_generations, sampling, seed)
    return sorted(groups, key=lambda g: g[0].prompt_index)
