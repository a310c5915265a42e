"""What goes into the engine and what comes out."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
      max_tokens: Most tokens of a response, its end token included.
      temperature: Divides the logits; 0 is greedy.
      top_p: Keeps the smallest set of most likely tokens whose probability reaches this; 1: all.
      top_k: Keeps the k most likely tokens; 0: all.
      min_p: Keeps tokens at least this fraction as likely as the likeliest; 0: all.
      stop_token_ids: Ids that end a response; the end token is part of it.
      stop: Strings that end a response (needs `Engine(..., detokenize=...)`); the response is
        cut after the token that completes one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
        ):
            if not good:
                raise InputError(f"{name}={getattr(self, name)} must be {rule}")

    @property
    def filtered(self) -> bool:
        """Whether the distribution is cut to a subset of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
      prompt_index: Place of its prompt in the call.
      sample_index: Which of the prompt's samples.
      tokens: int32 [n], the end token included.
      logp: float32 [n], log-probability of each token under the distribution it was drawn from
        (at temperature 0, where that is one token, under temperature 1).
      finish_reason: `stop` (an end id or string) or `length`.
      truncated: Whether it was cut off by a length limit.
      version: int32 [n], the version of the weights that sampled each token.
      routing: int32 [prompt + n, layers, k], the experts that each token of prompt and response
        passed in the mixture layers; -1 for the last token, which the sampler never fed back.
        None unless asked for.
      support: int32 [n, K], the ids that each token was drawn from, -1 where unset; nothing but
        -1 where it was drawn from the whole vocabulary. None unless asked for.
      top_tokens: int32 [n, N], the likeliest tokens in each one's place, likeliest first. None
        unless asked for.
      top_logp: float32 [n, N], their log-probabilities at the request's temperature (1 where it is
        0), before top-k, top-p and min-p. None unless asked for.
    """

    prompt_index: int
    sample_index: int
    tokens: np.ndarray
    logp: np.ndarray
    finish_reason: str
    truncated: bool
    version: np.ndarray
    routing: np.ndarray | None = None
    support: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logp: np.ndarray | None = None
