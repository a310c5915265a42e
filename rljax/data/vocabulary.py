"""Checks at the start of a run: tokenizer against embedding, end of turn against end ids."""

import logging

import numpy as np
from jaxtyping import Int32

from rljax.data.tokenizers import Tokenizer
from rljax.errors import InputError

_log = logging.getLogger(__name__)

_MARK = "qxzjv"  # a reply whose end is found again in a rendered conversation


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, template: str = "none") -> int:
    """Compares a tokenizer with the embedding of a model, and warns of what will hurt a run.

    Warns where the embedding has more rows than the tokenizer has ids (padded embeddings): such ids
    can be sampled and trained on, and have no text that a reward function could see. Warns where
    a template ends turns by a token that is no end id: responses then go on after their end.

    Args:
      tokenizer: The tokenizer.
      vocab_size: Rows of the embedding.
      template: The name of the prompt template; "chat" and "qwen-math" end turns.

    Returns:
      How many ids of the embedding the tokenizer does not have; `unused_ids` lists them.

    Raises:
      InputError: An end id, or another id of the tokenizer, is beyond the embedding.
    """
    beyond = [i for i in tokenizer.end_ids if not 0 <= i < vocab_size]
    if beyond:
        raise InputError(
            f"end id {beyond[0]} of the tokenizer is beyond the {vocab_size} ids of the model's "
            "embedding and could never be sampled: use the model's own tokenizer, or set "
            "eos_token_id in its generation_config.json"
        )
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's embedding "
            f"{vocab_size} rows: use the model's own tokenizer, or resize the embedding"
        )
    unused = len(unused_ids(tokenizer, vocab_size))
    if unused:
        _log.warning(
            "the model's embedding has %d ids beyond the tokenizer's %d; they have no text, "
            "and a run does not sample them",
            unused,
            tokenizer.vocab_size,
        )
    end = end_of_turn(tokenizer, template)
    if end is not None and end not in tokenizer.end_ids:
        _log.warning(
            "template=%s ends turns with token %d (%r), which is not an end id (%s): responses go "
            "on after it; add it to eos_token_id in generation_config.json",
            template,
            end,
            tokenizer.decode([end]),
            ", ".join(map(str, tokenizer.end_ids)),
        )
    return unused


def unused_ids(tokenizer: Tokenizer, vocab_size: int) -> Int32[np.ndarray, " n"]:
    """The ids of an embedding that are beyond a tokenizer's, rising.

    Args:
      tokenizer: The tokenizer.
      vocab_size: Rows of the embedding.
    """
    return np.arange(tokenizer.vocab_size, vocab_size, dtype=np.int32)


def end_of_turn(tokenizer: Tokenizer, template: str) -> int | None:
    """The token with which a template ends the assistant's turn.

    Args:
      tokenizer: Renders and encodes.
      template: The name of a template.

    Returns:
      Its id; None where the template has no turns, or does not render earlier replies.
    """
    if template == "qwen-math":
        rest = "<|im_end|>"
    elif template == "chat":
        turns = [("user", "a"), ("assistant", _MARK), ("user", "b")]
        try:
            text = tokenizer.chat([{"role": role, "content": content} for role, content in turns])
        except InputError:  # a template for single turns
            return None
        rest = text.rpartition(_MARK)[2].lstrip() if _MARK in text else ""
    else:
        return None
    ids = tokenizer.encode(rest)
    return int(ids[0]) if ids else None
