"""Compiling before the first request what requests will need."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rljax.sampling.adjustments import AdjustmentShape
from rljax.sampling.decode_rows import DecodeRows
from rljax.sampling.params import SamplingParams
from rljax.sampling.runner import Runner

_log = logging.getLogger(__name__)
_TELL_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True)
class Expected:
    """What requests will be like.

    Attributes:
      filtered: Whether chunks with cut distributions come up, and chunks without.
      adjust: The shape of the call's adjustments; None: it has none.
      prompt: Tokens of the longest prompt.
      tokens: Tokens of the longest prompt and response.
      requests: Most responses that are wanted at once on a shard.
      scores: Whether prompts are scored.
    """

    filtered: tuple[bool, ...]
    adjust: AdjustmentShape | None
    prompt: int
    tokens: int
    requests: int
    scores: bool


def expect(
    runner: Runner,
    max_length: int,
    filtered: bool,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    max_prompt_length: int | None,
    num_requests: int | None,
) -> Expected:
    """What `Engine.warm_up` was told, in full."""
    each = [sampling] if isinstance(sampling, SamplingParams) else list(sampling or [])
    kinds = {params.filtered for params in each} or {False}
    # Where some rows are filtered and others not, chunks of either kind come up.
    kinds |= {True} if filtered else set()
    prompt = min(max_prompt_length or max_length, max_length)
    tokens = max_length
    if each:
        tokens = min(prompt + max(params.max_tokens for params in each), max_length)
    requests = min(num_requests or runner.sizes.slots, runner.sizes.slots)
    scores = any(params.prompt_logprobs for params in each)
    kind = AdjustmentShape.of(each)
    return Expected(tuple(sorted(kinds)), kind, prompt, tokens, requests, scores)


def warm_up(runner: Runner, expected: Expected, tell: Callable[[str], None] | None) -> int:
    """Runs every program once at every shape that the expected requests can need.

    Args:
      runner: The programs and the weights.
      expected: What requests will be like.
      tell: Is given a line every few seconds; None: only the log is.

    Returns:
      How many programs were run.
    """
    steps = [*_decode_steps(runner, expected), *_prefill_steps(runner, expected)]
    steps.append(lambda: runner.copy_pages([[] for _ in range(runner.sizes.shards)]))

    if expected.scores:
        widths = {runner.prefill_shapes.score_width(n + 1) for n in range(expected.prompt)}
        steps += [functools.partial(runner.score, np.zeros(width, np.int32)) for width in widths]

    def say(line: str) -> None:
        _log.info(line)
        if tell is not None:
            tell(line)

    say(f"compiling {len(steps)} programs of the sampler")
    started = last = time.perf_counter()
    for done, step in enumerate(steps):
        if time.perf_counter() - last >= _TELL_EVERY_S:
            last = time.perf_counter()
            say(f"compiled {done} of {len(steps)} programs of the sampler, {last - started:.0f} s")
        step()
    say(f"compiled {len(steps)} programs of the sampler in {time.perf_counter() - started:.1f} s")
    return len(steps)


def _decode_steps(runner: Runner, expected: Expected) -> Iterator[Callable[[], object]]:
    def run(rows: int, columns: tuple[int, int], filtered: bool) -> None:
        shards = runner.sizes.shards
        blank = DecodeRows([[None] * rows for _ in range(shards)], columns[1] > 0)
        runner.fetch(
            runner.send(
                blank,
                [0] * shards,
                expected.adjust,
                least_columns=columns,
                filtered=filtered,
            )
        )

    every = runner.shapes.every(expected.requests, expected.tokens, expected.prompt)
    for rows, own, shared in every:
        for filtered in expected.filtered:
            yield functools.partial(run, rows, (own, shared), filtered)


def _prefill_steps(runner: Runner, expected: Expected) -> Iterator[Callable[[], object]]:
    sizes = runner.sizes
    # Preempted sequences are prefilled with what they had drawn; where pages for all sequences and
    # their prompts are there, none is preempted.
    enough = 2 * sizes.pages(expected.tokens) * expected.requests
    longest = expected.prompt if sizes.num_pages >= enough else expected.tokens
    for shape in runner.prefill_shapes.every(longest, expected.requests):
        yield functools.partial(runner.run_prefill, runner.prefill_shapes.blank(*shape))
