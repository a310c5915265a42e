"""Requests of a `generate` call: checked, and made into groups with their random keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rljax.errors import InputError
from rljax.sampling.checks import integer
from rljax.sampling.params import SamplingParams
from rljax.sampling.scheduler import Group
from rljax.sampling.scheduler import Sequence as Sample

_INT64 = (-(2**63), 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What an engine can take.

    Attributes:
      vocab_size: Token ids are below it.
      max_length: Longest prompt plus response.
      stop_ids: Most end ids of one request.
      detokenizes: Whether there is a detokenizer, which stop strings need.
    """

    vocab_size: int
    max_length: int
    stop_ids: int
    detokenizes: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of `generate`; nothing of it has begun.

    Attributes:
      groups: A group for each prompt, its random keys without `draw`.
      prompt_ids: The prompts' names in their keys.
      seed: The call's.
      draws: How often each prompt was drawn before, if the caller says so.
    """

    groups: list[Group]
    prompt_ids: list[int]
    seed: int
    draws: list[int] | None


class DrawCounter:
    """How often each (seed, prompt id) was drawn, for callers that do not count themselves."""

    def __init__(self) -> None:
        self._draws: dict[tuple[int, int], int] = {}

    def begin(self, call: Call) -> None:
        """Completes the keys of a call that begins now, and counts it."""
        for i, (group, prompt_id) in enumerate(zip(call.groups, call.prompt_ids, strict=True)):
            if call.draws is None:
                draw = self._draws.get((call.seed, prompt_id), 0)
                self._draws[call.seed, prompt_id] = draw + 1
            else:
                draw = call.draws[i]
            for member in group.members:
                own = member.sampling.seed
                mine = draw if own is None or call.draws is not None else 0
                seed = call.seed if own is None else own
                member.key = (seed, prompt_id, mine, member.sample)


def check(
    limits: RequestLimits,
    prompts: Sequence[Any],
    num_generations: int,
    sampling: SamplingParams | Sequence[SamplingParams],
    seed: int,
    prompt_ids: Sequence[int] | None,
    draws: Sequence[int] | None,
) -> Call:
    """Checks the arguments of `generate`, which describes them.

    Raises:
      InputError: Something in them cannot be used.
    """
    g = integer("num_generations", num_generations, 1)
    n = len(prompts)
    each = list(sampling) if isinstance(sampling, Iterable) else [sampling] * n
    for params in each:
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling={params!r} must be SamplingParams, or a sequence of them")
    if len(each) == n:
        each = [params for params in each for _ in range(g)]
    if len(each) != n * g:
        raise InputError(
            f"{len(each)} sampling for {n} prompts of {g} responses; give one for all, one a "
            "prompt or one a response"
        )
    seed = integer("seed", seed, *_INT64)
    ids = list(range(n)) if prompt_ids is None else _integers("prompt_ids", prompt_ids, n)
    counts = None if draws is None else _integers("draws", draws, n)
    for params in dict.fromkeys(each):
        _check_sampling(limits, params)
    groups = []
    for index, prompt in enumerate(prompts):
        tokens = _tokens(limits, index, prompt)
        group = Group(index, tokens)
        most = limits.max_length - len(tokens)
        group.members = [
            Sample(index * g + k, group, (seed, ids[index], 0, k), p, min(p.max_tokens, most))
            for k, p in enumerate(each[index * g : (index + 1) * g])
        ]
        groups.append(group)
    return Call(groups, ids, seed, counts)


def _integers(name: str, values: Sequence[int], n: int) -> list[int]:
    if len(values) != n:
        raise InputError(f"{len(values)} {name} for {n} prompts; give one a prompt")
    return [integer(f"{name}[{i}]", value, *_INT64) for i, value in enumerate(values)]


def _check_sampling(limits: RequestLimits, params: SamplingParams) -> None:
    if len(params.stop_token_ids) > limits.stop_ids:
        raise InputError(
            f"{len(params.stop_token_ids)} stop_token_ids; the engine takes {limits.stop_ids}: "
            "raise Engine(stop_ids=...)"
        )
    for name, ids in params.token_ids.items():
        if max(ids, default=0) >= limits.vocab_size:
            raise InputError(
                f"{name} names token {max(ids)}, which the model's vocabulary of "
                f"{limits.vocab_size} ids cannot draw; give ids below it"
            )
    if params.stop and not limits.detokenizes:
        raise InputError("stop strings need Engine(..., detokenize=tokenizer.decode)")


def _tokens(limits: RequestLimits, index: int, prompt: Any) -> np.ndarray:
    try:
        tokens = np.asarray(prompt)
    except ValueError:
        raise InputError(f"prompt {index} is no sequence of token ids, but nested") from None
    if tokens.size and tokens.dtype.kind not in "iu":
        raise InputError(
            f"prompt {index} holds {tokens.dtype} values; give token ids, which are integers"
        )
    if tokens.ndim != 1 and tokens.size:
        raise InputError(
            f"prompt {index} has shape {tokens.shape}; give token ids in one dimension"
        )
    if not tokens.size:
        raise InputError(
            f"prompt {index} is empty; give at least one token, such as the begin-of-sequence id"
        )
    if len(tokens) >= limits.max_length:
        raise InputError(
            f"prompt {index} has {len(tokens)} tokens, which leaves none for a response within "
            f"max_length={limits.max_length}; shorten it or raise max_length"
        )
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise InputError(
            f"prompt {index} holds token ids from {tokens.min()} to {tokens.max()}; the "
            f"vocabulary has {limits.vocab_size}"
        )
    return tokens.astype(np.int32)
