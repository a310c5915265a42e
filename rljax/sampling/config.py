"""The engine's settings, which check themselves."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from rljax_kernels.paged_attention import OPERATION

from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.sampling.checks import integer

PLAIN = ("blocked", "reference")
"""The implementations of `rljax_kernels.paged_attention` in plain JAX, the better one first."""

KERNELS = ("auto", "off", *(i.name for i in OPERATION.implementations))
"""What `kernels` may be."""


@dataclasses.dataclass(frozen=True)
class ProgramConfig:
    """How the engine's programs work; none of it changes what is drawn but for rounding.

    Attributes:
      chunk: Most decode steps per host synchronisation. A chunk ends earlier where the next fewer
        rows would do, or where waiting sequences can have an eighth of the slots. Unless pages are
        gathered, the next one is sent before the host has read its results.
      prefill_tokens: Most tokens of one prefill call, padding counted.
      least_rows: Decode steps run on as few rows as hold the active sequences, in powers of two
        from here up (of 1.5 with kernels); with `least_rows` equal to `slots` all have the same
        shape.
      share: So many samples of a prompt read its pages together, where that takes no more rows;
        1: none do.
      gathered: Whether a chunk gathers the active sequences' pages out of the pool and works on the
        copy, layer by layer, which CPUs are fast at; it takes as much memory as those pages, padded
        to the longest sequence. Else each step reads the pages themselves, in a loop over layers.
        None: on CPU only.
      kernels: What decode steps are computed by. `off`: XLA alone. `native`: the kernels of
        `rljax_kernels.cpu`, which a C++ compiler builds at first use: on one CPU in float32 up to
        twice as fast, with fewer programs to compile; pages are then read where they are, but for
        latent attention's. Other names: that implementation of `rljax_kernels.paged_attention`.
        What is named is refused where it is not possible. `auto`: `native` where that is possible
        and neither `gathered` nor the model's `expert_backend` asks for something else; on GPU and
        TPU the first implementation that computes what the model needs.
    """

    chunk: int = 32
    prefill_tokens: int = 4096
    least_rows: int = 4
    share: int = 8
    gathered: bool | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        for name in ("chunk", "prefill_tokens", "least_rows", "share"):
            integer(name, getattr(self, name), 1)
        if self.kernels not in KERNELS:
            raise InputError(f"kernels={self.kernels!r} must be one of {', '.join(KERNELS)}")


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """What responses carry besides tokens and log-probabilities.

    Attributes:
      with_routing: Whether they carry the experts of every token, where the model has any.
      max_support: Requests with top-k, top-p or min-p draw from so many tokens at most, the
        likeliest of the kept set, and responses carry them, for the trainer to score under the same
        distribution; 0: sets have any size and are not returned.
      top_logprobs: So many of the likeliest tokens in each one's place.
    """

    with_routing: bool = False
    max_support: int = 0
    top_logprobs: int = 0

    def fit(self, model: ModelConfig) -> RecordConfig:
        """What a model can give of it.

        Raises:
          InputError: `max_support` is negative, or `top_logprobs` is or exceeds the vocabulary.
        """
        if integer("max_support", self.max_support) < 0:
            raise InputError(f"max_support={self.max_support} must be 0 (off) or more")
        if not 0 <= integer("top_logprobs", self.top_logprobs) <= model.vocab_size:
            raise InputError(
                f"top_logprobs={self.top_logprobs} must lie between 0 and the vocabulary's "
                f"{model.vocab_size}"
            )
        return dataclasses.replace(
            self,
            with_routing=self.with_routing and model.top_k > 0,
            max_support=min(self.max_support, model.vocab_size),
        )


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The engine's settings.

    Attributes:
      slots: Sequences decoded at once, on all shards together.
      page_size: Tokens of a page.
      num_pages: Pages of the whole pool; None: enough that no sequence is ever preempted.
      max_length: Longest prompt plus response.
      stop_ids: Most end ids of one request.
      prefix_cache: Whether full pages of prompts are kept until their memory is needed, for later
        prompts that begin alike under the same weights. Prompts admitted at the same time do not
        find each other's.
      programs: How the engine's programs work.
      records: What responses carry besides tokens and log-probabilities.
    """

    slots: int = 64
    page_size: int = 16
    num_pages: int | None = None
    max_length: int = 1024
    stop_ids: int = 8
    prefix_cache: bool = True
    programs: ProgramConfig = ProgramConfig()
    records: RecordConfig = RecordConfig()

    def __post_init__(self) -> None:
        for name in ("slots", "page_size", "max_length"):
            integer(name, getattr(self, name), 1)
        integer("stop_ids", self.stop_ids, 0)
        if self.num_pages is not None:
            integer("num_pages", self.num_pages, 1)

    @staticmethod
    def from_options(**options: Any) -> EngineConfig:
        """A configuration from the fields of all three classes, by name.

        Raises:
          InputError: A name is unknown, or a value cannot be used.
        """
        parts: dict[Any, dict[str, Any]] = {EngineConfig: {}, ProgramConfig: {}, RecordConfig: {}}
        owners = {f.name: part for part in parts for f in dataclasses.fields(part)}
        del owners["programs"], owners["records"]
        for name, value in options.items():
            if name not in owners:
                near = difflib.get_close_matches(name, owners, 1)
                known = f"did you mean {near[0]}?" if near else f"known are {', '.join(owners)}"
                hint = "it is kernels='native' or 'off' now" if name == "native" else known
                raise InputError(f"option {name} of the engine is unknown; {hint}")
            parts[owners[name]][name] = value
        programs = ProgramConfig(**parts[ProgramConfig])
        records = RecordConfig(**parts[RecordConfig])
        return EngineConfig(programs=programs, records=records, **parts[EngineConfig])

    def of_shard(self, shards: int) -> ShardSizes:
        """The part of one of so many shards.

        Raises:
          InputError: Slots or pages do not divide over the shards, or a shard's pages cannot hold
            one sequence of `max_length`.
        """
        axes = "stage×data×fsdp×expert"
        if self.slots % shards:
            raise InputError(
                f"slots={self.slots} do not divide over {axes} = {shards}; use a multiple"
            )
        most = -(-self.max_length // self.page_size)
        num_pages = 2 * most * self.slots if self.num_pages is None else self.num_pages
        if num_pages % shards:
            raise InputError(
                f"num_pages={num_pages} do not divide over {axes} = {shards}; use a multiple"
            )
        pages = num_pages // shards
        if pages < most + 1:
            raise InputError(
                f"num_pages={num_pages} gives a shard {pages} pages of {self.page_size}; one "
                f"sequence of max_length={self.max_length} needs {most + 1}"
            )
        return ShardSizes(shards, self.slots // shards, pages, self.page_size, most)


@dataclasses.dataclass(frozen=True)
class ShardSizes:
    """Sizes of one shard.

    Attributes:
      shards: How many there are.
      slots: Sequences that one decodes at once.
      num_pages: Pages of one's pool.
      page_size: Tokens of a page.
      most_pages: Pages of the longest sequence.
    """

    shards: int
    slots: int
    num_pages: int
    page_size: int
    most_pages: int

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens, no more than the longest sequence has."""
        return min(-(-tokens // self.page_size), self.most_pages)
