"""How a response is to be drawn: `SamplingParams`, which checks its own values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rljax.errors import InputError
from rljax.sampling.checks import integer, real

LEAST_TEMPERATURE = 0.01
"""The lowest temperature above 0: below it, rounding of the logits would decide."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
      max_tokens: Most tokens of a response, its end token included.
      temperature: Divides the logits; 0 is greedy, else at least 0.01.
      top_p: Keeps the smallest set of most likely tokens whose probability reaches this; 1: all.
      top_k: Keeps the k most likely tokens; 0: all.
      min_p: Keeps tokens at least this fraction as likely as the likeliest; 0: all.
      stop_token_ids: Ids that end a response; the end token is part of it.
      stop: Strings that end a response (needs `Engine(..., detokenize=...)`), or a single one; the
        response is cut after the token that completes one.
      seed: Takes the place of the call's seed in the random key, so that a request draws the same
        in every call; its `draw` then counts as 0 unless the call gives `draws`. None: the call's.
      ignore_eos: Whether `stop_token_ids` are drawn like any other token and end nothing.
      min_tokens: Until so many tokens are drawn, end ids cannot be drawn and stop strings are not
        looked for.
      include_stop_str: Whether the tokens that hold a stop string are part of the response; else it
        is cut before the first of them and may be empty.
      logit_bias: Added to the logits of these token ids, before the temperature; a mapping or pairs
        (id, bias).
      repetition_penalty: Divides positive logits, and multiplies negative ones, of all tokens in
        the prompt and in what was drawn (arXiv:1909.05858, section 4.1); 1: none.
      presence_penalty: Subtracted from the logits of all tokens that were drawn; 0: none.
      bad_words: Sequences of token ids that are never completed within a response.
      prompt_logprobs: Whether responses carry the log-probabilities of their prompt's tokens, which
        takes one more pass over the prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self._set("max_tokens", integer("max_tokens", self.max_tokens, 1))
        self._set("top_k", integer("top_k", self.top_k, 0))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, -(2**63), 2**63 - 1))
        for name in ("ignore_eos", "include_stop_str", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r} must be True or False")
        self._check_reals()
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("stop", _strings(self.stop))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words", _words(self.bad_words))

    def _check_reals(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            self._set(name, real(name, getattr(self, name)))
        for name, good, rule in (
            (
                "temperature",
                self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
                f"0 (greedy) or at least {LEAST_TEMPERATURE}",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1: none)"),
        ):
            if not good:
                raise InputError(f"{name}={getattr(self, name)} must be {rule}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that do end a response: none with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def filtered(self) -> bool:
        """Whether the distribution is cut to a subset of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def reshapes(self) -> tuple[str, ...]:
        """The parameters in use that change the distribution in ways the trainer cannot follow.

        The trainer scores under the same temperature and kept set; what is named here makes its
        log-probabilities differ from the sampler's, and is to be refused for training.
        """
        used = {
            "min_tokens": self.min_tokens > 0 and bool(self.end_ids),
            "logit_bias": bool(self.logit_bias),
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "bad_words": bool(self.bad_words),
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """All token ids that are named, by parameter; the vocabulary must hold them."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "bad_words": tuple(token for word in self.bad_words for token in word),
        }


def _items(name: str, value: Any, example: str) -> list[Any]:
    """The entries of a sequence, a set or an array; of a text only if it is empty."""
    if isinstance(value, str | bytes) and value:
        raise InputError(f"{name}={value!r} must be a sequence, such as {example}")
    try:
        return list(value)
    except TypeError:
        raise InputError(f"{name}={value!r} must be a sequence, such as {example}") from None


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, i, 0) for i in _items(name, value, "(2,)"))


def _strings(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _items("stop", value, "('</answer>',)")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop={value!r} must hold texts of at least one character")
    return tuple(texts)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else _items("logit_bias", value, "{5: -1}")
    found: dict[int, float] = {}
    for pair in pairs:
        try:
            token, bias = pair
        except (TypeError, ValueError):
            raise InputError(f"logit_bias={value!r} must hold pairs (token id, bias)") from None
        token = integer("logit_bias id", token, 0)
        if token in found:
            raise InputError(f"logit_bias names token {token} twice; give it once")
        found[token] = real("logit_bias", bias)
    return tuple(found.items())


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    words = _items("bad_words", value, "((5, 6), (7,))")
    found = tuple(_ids("bad_words", word) for word in words)
    if not all(found):
        raise InputError("bad_words holds an empty sequence; give each at least one token id")
    return found
