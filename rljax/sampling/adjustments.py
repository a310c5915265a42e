"""Changes to the logits before the temperature: end ids, biases, penalties, forbidden sequences.

Programs are compiled with them only where a call uses them (`AdjustmentShape`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.sampling.params import SamplingParams

_FORBIDDEN = -1e30  # a logit; -inf would give NaN where all tokens are forbidden


@struct.dataclass
class Penalties:
    """Penalties of the tokens that were seen.

    Attributes:
      prompt: bool [R, V], which tokens the prompt holds.
      drawn: bool [R, V], which were drawn before this chunk.
      repetition: float32 [R].
      presence: float32 [R].
    """

    prompt: Bool[Array, "R V"]
    drawn: Bool[Array, "R V"]
    repetition: Float[Array, " R"]
    presence: Float[Array, " R"]


@struct.dataclass
class BadWords:
    """Sequences of tokens that must not be completed.

    Attributes:
      words: int32 [R, W, L], each at the end of its L entries; -1 before its start, or everywhere.
      history: int32 [R, L], the last tokens drawn before this chunk; -1 before the first.
    """

    words: Int[Array, "R W L"]
    history: Int[Array, "R L"]


@struct.dataclass
class Adjustments:
    """What a chunk of decode steps changes in the logits of its rows.

    Attributes:
      min_left: int32 [R], so many tokens of this chunk may not be end ids.
      bias_ids: int32 [R, K], -1 where unset.
      bias: float32 [R, K].
      penalties: None where no row has any.
      bad_words: None where no row has any.
    """

    min_left: Int[Array, " R"]
    bias_ids: Int[Array, "R K"]
    bias: Float[Array, "R K"]
    penalties: Penalties | None
    bad_words: BadWords | None


@dataclasses.dataclass(frozen=True)
class AdjustmentShape:
    """The static shape of the adjustments of all chunks of a call.

    Attributes:
      biases: Entries K of `bias_ids`.
      penalties: Whether there are any.
      words: Forbidden sequences W of a row.
      word_length: Tokens L of the longest.
    """

    biases: int = 0
    penalties: bool = False
    words: int = 0
    word_length: int = 0

    @staticmethod
    def of(each: Iterable[SamplingParams]) -> AdjustmentShape | None:
        """The shape that holds what these requests use, in powers of two; None: nothing."""
        used = [params for params in each if params.reshapes]
        if not used:
            return None
        return AdjustmentShape(
            biases=_power(max(len(p.logit_bias) for p in used)),
            penalties=any({"repetition_penalty", "presence_penalty"} & {*p.reshapes} for p in used),
            words=_power(max(len(p.bad_words) for p in used)),
            word_length=_power(max((len(w) for p in used for w in p.bad_words), default=0)),
        )

    def blank(self, rows: int, vocab_size: int) -> Adjustments:
        """Adjustments of so many rows that change nothing, as numpy arrays."""

        def full(value: float, *shape: int, dtype: Any = np.float32) -> Any:
            return np.full((rows, *shape), value, dtype)

        penalties = bad_words = None
        if self.penalties:
            penalties = Penalties(
                prompt=full(False, vocab_size, dtype=bool),
                drawn=full(False, vocab_size, dtype=bool),
                repetition=full(1),
                presence=full(0),
            )
        if self.words:
            bad_words = BadWords(
                words=full(-1, self.words, self.word_length, dtype=np.int32),
                history=full(-1, self.word_length, dtype=np.int32),
            )
        return Adjustments(
            min_left=full(0, dtype=np.int32),
            bias_ids=full(-1, self.biases, dtype=np.int32),
            bias=full(0, self.biases),
            penalties=penalties,
            bad_words=bad_words,
        )


def fill(
    blank: Any, row: int, params: SamplingParams, prompt: np.ndarray, drawn: Sequence[int]
) -> None:
    """Writes one request into its row of blank adjustments, in place.

    Args:
      blank: `Adjustments` from `AdjustmentShape.blank`.
      row: The row.
      params: What the request asks for.
      prompt: Its prompt's tokens.
      drawn: What it has drawn so far.
    """
    blank.min_left[row] = max(params.min_tokens - len(drawn), 0)
    for i, (token, bias) in enumerate(params.logit_bias):
        blank.bias_ids[row, i], blank.bias[row, i] = token, bias
    if blank.penalties is not None:
        blank.penalties.prompt[row, prompt] = True
        blank.penalties.drawn[row, np.asarray(drawn, int)] = True
        blank.penalties.repetition[row] = params.repetition_penalty
        blank.penalties.presence[row] = params.presence_penalty
    if blank.bad_words is not None and params.bad_words:
        for i, word in enumerate(params.bad_words):
            blank.bad_words.words[row, i, -len(word) :] = word
        last = drawn[-blank.bad_words.history.shape[1] :]
        if last:
            blank.bad_words.history[row, -len(last) :] = last


def adjust(
    logits: Float[Array, "R V"],
    adjustments: Adjustments,
    stop: Int[Array, "R K"],
    drawn: Int[Array, "R C"],
    count: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """Applies biases, then penalties, then what is forbidden.

    Args:
      logits: float32, not yet divided by the temperature.
      adjustments: What to change.
      stop: End ids, -1 where unset.
      drawn: What this chunk has drawn so far.
      count: How much of it each row has.
    """
    vocab = logits.shape[1]
    rows = jnp.arange(logits.shape[0])[:, None]
    place = jnp.where(adjustments.bias_ids < 0, vocab, adjustments.bias_ids)  # dropped
    logits = logits.at[rows, place].add(adjustments.bias, mode="drop")
    if adjustments.penalties is not None:
        p = adjustments.penalties
        new = jnp.where(jnp.arange(drawn.shape[1]) < count[:, None], drawn, vocab)
        out = p.drawn.at[rows, new].set(True, mode="drop")
        factor = jnp.where(p.prompt | out, p.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = logits - jnp.where(out, p.presence[:, None], 0.0)
    early = (stop >= 0) & (count < adjustments.min_left)[:, None]
    forbidden = jnp.where(early, stop, vocab)
    if adjustments.bad_words is not None:
        completing = _completing(adjustments.bad_words, drawn, count)
        forbidden = jnp.concatenate([forbidden, jnp.where(completing < 0, vocab, completing)], 1)
    return logits.at[rows, forbidden].set(_FORBIDDEN, mode="drop")


def _completing(bad: BadWords, drawn: Array, count: Array) -> Int[Array, "R W"]:
    """The token that would complete each forbidden sequence now; -1 where none would."""
    length = bad.history.shape[1]
    whole = jnp.concatenate([bad.history, drawn], axis=1)
    # The last length - 1 tokens before the one that is drawn now.
    last = jnp.take_along_axis(whole, count[:, None] + jnp.arange(1, length), axis=1)
    start, end = bad.words[:, :, :-1], bad.words[:, :, -1]
    begun = jnp.all((start < 0) | (start == last[:, None]), axis=2)
    return jnp.where(begun, end, -1)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
