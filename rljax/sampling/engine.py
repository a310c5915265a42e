"""The sampling engine: continuous batching over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import models
from rljax.errors import EngineStateError, InputError
from rljax.models.config import ModelConfig
from rljax.sampling import requests, warm_up
from rljax.sampling.config import EngineConfig
from rljax.sampling.kernels import platform_of
from rljax.sampling.loop import DecodeLoop
from rljax.sampling.params import SamplingParams
from rljax.sampling.programs import check_rules
from rljax.sampling.responses import Collector, Response
from rljax.sampling.runner import Runner
from rljax.sampling.scheduler import Group, Shard
from rljax.sampling.stop_strings import Detokenize


class Engine:
    """Generates responses with a model's own forward pass, in slots over a page pool.

    It holds a lease on the weights given to `load` until the next `load` or `unload`: a trainer
    must not donate those buffers meanwhile. On a mesh, slots and pages are split over
    stage×data×fsdp×expert and each shard schedules for itself.

    A response depends on its prompt, its sampling parameters, the weights and the key (seed,
    prompt id, draw, sample id, position) alone: not on its slot, its neighbours or the order of
    requests. At equal compiled shapes that holds bit for bit; where shapes differ,
    log-probabilities differ by rounding.

    Attributes:
      config: The model.
      settings: The engine's settings.
      mesh: Where it runs; None: the default device.
      runner: What runs on the device.
      loop: The rounds of a call.
      version: Version of the weights that are loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        slots: int = 64,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_length: int = 1024,
        *,
        detokenize: Detokenize | None = None,
        rules: meshes.Rules = meshes.ROLLOUT_RULES,
        **options: Any,
    ) -> None:
        """Plans the cache; nothing is compiled or allocated on the device yet.

        Args:
          config: The model.
          mesh: Where to run; None: the default device.
          slots: Sequences decoded at once, on all shards together.
          page_size: Tokens of a page; None: 128 on TPU, where kernels need it, 16 elsewhere.
          num_pages: Pages of the whole pool; None: enough that no sequence is ever preempted.
          max_length: Longest prompt plus response.
          detokenize: Token ids to text; needed where stop strings are used.
          rules: How weights lie on the mesh: logical axis -> mesh axes. Experts may be split over
            any, other weights over `tensor`.
          **options: Further fields of `EngineConfig`, `ProgramConfig` and `RecordConfig`:
            stop_ids, prefix_cache; chunk, prefill_tokens, least_rows, share, gathered, kernels;
            with_routing, max_support, top_logprobs.

        Raises:
          InputError: An option is unknown or cannot be used, slots or pages do not divide over the
            shards, a shard's pages cannot hold one sequence of `max_length`, kernels are wanted
            where they are of no use, or a rule splits what decoding needs whole.
          MissingDependencyError: Kernels are wanted and cannot be built.
        """
        if page_size is None:
            page_size = 128 if platform_of(mesh) == "tpu" else 16
        self.settings = EngineConfig.from_options(
            slots=slots, page_size=page_size, num_pages=num_pages, max_length=max_length, **options
        )
        if mesh is not None:
            check_rules(rules, mesh)
        self.config, self.mesh = config, mesh
        self.runner = Runner(self.settings, config, mesh, rules)
        self.version = -1
        self._detokenize = detokenize
        sizes = self.runner.sizes
        self._shards = [
            Shard(sizes.slots, sizes.num_pages, page_size, self.settings.prefix_cache)
            for _ in range(sizes.shards)
        ]
        self.loop = DecodeLoop(self.runner, self._shards, self.settings.programs.chunk)
        self._limits = requests.RequestLimits(
            config.vocab_size, max_length, self.settings.stop_ids, detokenize is not None
        )
        self._draws = requests.DrawCounter()
        self._groups: list[Group] | None = None  # of the call that is under way

    @property
    def num_preemptions(self) -> int:
        """How many sequences were preempted for want of pages, so far."""
        return sum(s.num_preemptions for s in self._shards)

    @property
    def prefix_hits(self) -> int:
        """How many tokens of prompts were found in cached pages, so far."""
        return sum(s.prefix_hits for s in self._shards)

    @property
    def steps(self) -> int:
        """How many decode steps were run, so far (summed over shards)."""
        return self.runner.steps

    @property
    def moved(self) -> int:
        """Bytes of weights that the last `load` laid out anew or brought from other devices."""
        return self.runner.weights.moved

    @property
    def free_pages(self) -> int:
        """Pages that no page table holds, on all shards; those that are cached among them."""
        return sum(s.pages.num_free for s in self._shards)

    @property
    def cached_pages(self) -> int:
        """Pages that no page table holds and that contain prompts, on all shards."""
        return sum(s.pages.num_cached for s in self._shards)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, as new weights do."""
        for shard in self._shards:
            shard.pages.forget()

    def load(self, params: models.Params, version: int) -> None:
        """Takes weights to sample with, under a lease, and empties the prefix cache.

        Weights in the compute dtypes and the rollout layout are used as they are, the very same
        buffers; see `WeightSync.adopt`.

        Raises:
          InputError: The parameters are not the model's, or the version falls.
        """
        models.check(params, self.config)
        if version < self.version:
            raise InputError(
                f"version {version} is older than the loaded {self.version}; versions only rise"
            )
        self.runner.load(params, version)
        self.forget_prefixes()
        self.version = version

    def unload(self, keep_pool: bool = False) -> None:
        """Gives the weights back, and frees the KV pool unless it is to be kept."""
        self.runner.unload()
        if not keep_pool:
            self.runner.drop_pool()
            self.forget_prefixes()

    def lower_decode(self) -> jax.stages.Lowered:
        """The program of a decode chunk at full length, lowered from shapes alone.

        Nothing is allocated: the mesh may be of described devices.
        """
        return self.runner.lower_decode()

    def lower_prefill(self, prompt_length: int) -> jax.stages.Lowered:
        """The program of the largest prefill call, lowered from shapes alone.

        Args:
          prompt_length: Tokens of the longest prompt.
        """
        return self.runner.lower_prefill(prompt_length)

    def warm_up(
        self,
        filtered: bool = False,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_prompt_length: int | None = None,
        num_requests: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> int:
        """Compiles every shape that can come up, so that nothing is compiled later.

        What is known of the requests saves programs.

        Args:
          filtered: Whether requests with top-k, top-p or min-p will come, and others too.
          sampling: What requests will ask for, as in `generate`; None: any length up to
            `max_length`, and nothing that changes logits.
          max_prompt_length: Tokens of the longest prompt; None: `max_length`.
          num_requests: Most responses that a call will ask for; None: as many as there are slots.
          tell: Is given a line of progress every few seconds, as the log is at level INFO.

        Returns:
          How many programs were run.

        Raises:
          EngineStateError: No weights are loaded, or a call is under way.
        """
        self._check_ready()
        most = self.settings.max_length
        expected = warm_up.expect(
            self.runner, most, filtered, sampling, max_prompt_length, num_requests
        )
        try:
            return warm_up.warm_up(self.runner, expected, tell)
        except BaseException:
            self._recover()
            raise

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

        A call that is refused changes nothing; one whose iterator is never begun neither.

        Args:
          prompts: Token ids of each.
          num_generations: Samples a prompt, G.
          sampling: One for all, one a prompt, or one a response (G for each prompt in turn).
          seed: Part of every random key; any integer of 64 bits.
          prompt_ids: Names of the prompts in their keys, integers of 64 bits; by default their
            places.
          draws: How often each prompt was drawn before; by default the engine's own count for
            this seed and prompt id.

        Yields:
          The G responses of a prompt, as soon as the last of them is finished.

        Raises:
          InputError: A prompt is empty, too long, or has ids outside the vocabulary; a sampling
            parameter names such ids; or there are not as many sampling parameters, ids or draws as
            prompts.
          EngineStateError: No weights are loaded, or another call is not finished.
          NonFiniteLogitsError: While iterating: the weights give NaN.
        """
        self._check_ready()
        call = requests.check(
            self._limits, prompts, num_generations, sampling, seed, prompt_ids, draws
        )
        return self._run(call)

    def cancel(self, prompt_index: int) -> bool:
        """Gives up a group of the `generate` that is under way: it is not yielded, its pages free.

        To be called between two of its groups, by the thread that iterates.

        Args:
          prompt_index: Place of its prompt in the call.

        Returns:
          Whether there was something to give up: False once it was yielded or cancelled.

        Raises:
          EngineStateError: No `generate` is under way.
          InputError: It has no such prompt.
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
        self._shards[prompt_index % len(self._shards)].cancel(group)
        return True

    def page_tables(self) -> dict[tuple[int, int], list[int]]:
        """The pages of each sequence that is decoding now, by prompt_index and sample_index.

        Its tokens lie in them in order. Prompt i is on shard i modulo their number; each shard
        numbers its own pages.
        """
        active = (sequence for shard in self._shards for sequence in shard.active)
        return {(q.group.index, q.sample): list(q.pages) for q in active}

    def _check_ready(self) -> None:
        if self.runner.params is None:
            raise EngineStateError("the engine has no weights; call load(params, version) first")
        if self._groups is not None:
            raise EngineStateError(
                "the engine is in the middle of another generate(); finish or close that iterator "
                "first"
            )

    def _recover(self) -> None:
        """After a program that failed, which may have consumed the pool: begins with an empty one.

        What the scheduler and the prefix cache say of its pages holds no longer.
        """
        self.runner.drop_pool()
        for shard in self._shards:
            shard.reset()

    def _run(self, call: requests.Call) -> Iterator[list[Response]]:
        self._check_ready()
        self._draws.begin(call)
        self._groups = call.groups
        try:
            yield from self.loop.run(call.groups, self._collector())
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                self._recover()
            raise
        finally:
            for shard in self._shards:
                shard.clear()
            self._groups = None

    def _collector(self) -> Collector:
        records = self.runner.records
        routing = (len(self.config.mixture_layers), self.config.top_k)
        return Collector(
            self._detokenize, records.max_support, routing if records.with_routing else None
        )
