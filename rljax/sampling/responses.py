"""What comes out of the engine: responses, and how chunks of decode steps add up to them."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.errors import NonFiniteLogitsError
from rljax.sampling.decode import DecodeOutput
from rljax.sampling.scheduler import Group, Sequence
from rljax.sampling.stop_strings import Detokenize, StopStrings


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
      prompt_index: Place of its prompt in the call.
      sample_index: Which of the prompt's samples.
      tokens: int32 [n], the end token included.
      logp: float32 [n], log-probability of each token under the distribution it was drawn from
        (at temperature 0, where that is one token, under temperature 1), penalties and biases of
        the request included.
      finish_reason: `stop` (an end id or string) or `length`.
      truncated: Whether it was cut off by a length limit.
      version: int32 [n], the version of the weights that sampled each token.
      routing: int32 [prompt + n, layers, k], the experts that each token of prompt and response
        passed in the mixture layers; -1 for the last token, which the sampler never fed back.
        None unless requested.
      support: int32 [n, K], the ids that each token was drawn from, -1 where unset; nothing but
        -1 where it was drawn from the whole vocabulary. None unless requested.
      top_tokens: int32 [n, N], the likeliest tokens in each one's place, likeliest first. None
        unless requested.
      top_logp: float32 [n, N], their log-probabilities at the request's temperature (1 where it is
        0), before top-k, top-p and min-p. None unless requested.
      prompt_logp: float32 [prompt], log-probability of each of the prompt's tokens at temperature
        1, 0 for the first; by the weights that were loaded at the end. None unless requested.
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
    prompt_logp: np.ndarray | None = None


@dataclasses.dataclass
class Collector:
    """Adds what the chunks of a call drew to sequences, and makes responses of finished ones.

    Attributes:
      detokenize: Token ids to text; None where no request has stop strings.
      max_support: Entries of a token's `support`; 0: not recorded.
      routing_shape: Mixture layers and experts a token of `routing`; None: not recorded.
      texts: The text of each sequence that has stop strings.
    """

    detokenize: Detokenize | None
    max_support: int
    routing_shape: tuple[int, int] | None
    texts: dict[Sequence, StopStrings] = dataclasses.field(default_factory=dict)

    def add(self, q: Sequence, output: DecodeOutput, row: int, version: int) -> str | None:
        """Appends the tokens of one row to its sequence.

        Args:
          q: The sequence.
          output: What the chunk drew, on the host.
          row: The sequence's row in it.
          version: The version of the weights that drew it.

        Returns:
          Why the sequence is finished, or None if it is not.

        Raises:
          NonFiniteLogitsError: A log-probability is NaN.
        """
        n = int(output.count[row])
        logp = output.logp[row, :n]
        if np.isnan(logp).any():
            raise NonFiniteLogitsError(
                f"weights of version {version} gave NaN log-probabilities (prompt {q.group.index}, "
                f"sample {q.sample}); they hold NaN or infinity, or activations overflow: load "
                "finite weights"
            )
        q.tokens += output.tokens[row, :n].tolist()
        q.logp += logp.tolist()
        q.versions += [version] * n
        for name, x in output.records.items():
            q.records.setdefault(name, []).append(np.asarray(x[row, :n]))
        if self.max_support and "support" not in output.records:
            whole = np.full((n, self.max_support), -1, np.int32)
            q.records.setdefault("support", []).append(whole)
        if q.sampling.stop and self._cut_at_string(q, n):
            return "stop"
        if output.stopped[row]:
            return "stop"
        return "length" if len(q.tokens) >= q.limit else None

    def _cut_at_string(self, q: Sequence, new: int) -> bool:
        """Cuts a sequence at the first stop string that one of its new tokens completes."""
        if q not in self.texts:
            assert self.detokenize is not None
            self.texts[q] = StopStrings(q.sampling.stop, self.detokenize)
        text = self.texts[q]
        for end in range(len(q.tokens) - new + 1, len(q.tokens) + 1):
            place = text.add(q.tokens[end - 1])
            if place is not None and end >= q.sampling.min_tokens:
                if not q.sampling.include_stop_str:
                    end = text.tokens_before(place)
                del q.tokens[end:], q.logp[end:], q.versions[end:]
                return True
        return False

    def responses(self, group: Group) -> list[Response]:
        """The responses of a group whose sequences are all finished."""
        return [
            Response(
                prompt_index=group.index,
                sample_index=q.sample,
                tokens=np.asarray(q.tokens, np.int32),
                logp=np.asarray(q.logp, np.float32),
                finish_reason=str(q.finish_reason),
                truncated=q.finish_reason == "length",
                version=np.asarray(q.versions, np.int32),
                routing=self._routing(group, q),
                prompt_logp=group.prompt_logp if q.sampling.prompt_logprobs else None,
                **{
                    name: np.concatenate(parts)[: len(q.tokens)]
                    for name, parts in q.records.items()
                    if name != "routing"
                },
            )
            for q in group.members
        ]

    def _routing(self, group: Group, q: Sequence) -> np.ndarray | None:
        if self.routing_shape is None:
            return None
        parts = [p for p in (group.routing, *q.records["routing"]) if p is not None]
        found = np.concatenate([np.zeros((0, *self.routing_shape), np.int32), *parts])
        total = len(group.prompt) + len(q.tokens)
        out = np.full((total, *self.routing_shape), -1, np.int32)
        out[: total - 1] = found[: total - 1]
        return out
