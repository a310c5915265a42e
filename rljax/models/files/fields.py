"""Fields of a configuration file, none of which is ignored unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import InputError

# Fields that change no logit: ids and limits of generation, bookkeeping, training-time losses.
_INERT = frozenset(
    {
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)


class Fields:
    """Fields of a configuration file, each of which is read, known to be inert, off, or refused."""

    def __init__(self, values: Mapping[str, Any], where: str):
        """Takes the fields and what to call their file."""
        self._values = {k: v for k, v in values.items() if v is not None}
        self._nulls = values.keys() - self._values.keys()
        self._read: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def is_null(self, name: str) -> bool:
        """Whether a field is there and null, which may mean something else than its absence."""
        return name in self._nulls

    def assume(self, **values: Any) -> None:
        """Gives values to fields that are absent or null."""
        self._values = values | self._values

    def get(self, name: str, default: Any) -> Any:
        """A field, or its default where it is absent or null."""
        self._read.add(name)
        return self._values.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
          ValueError: It is absent and has no default, or is something else.
        """
        value = self.get(name, default)
        if value is None:
            raise InputError(f"{self.where} has no field {name!r}; the model cannot be built")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{self.where}: {name}={value!r} must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number.

        Raises:
          ValueError: It is something else.
        """
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{self.where}: {name}={value!r} must be a positive number")
        return float(value)

    def must(self, name: str, value: Any) -> None:
        """Refuses a field of any value but `value`, the only one that is supported.

        Raises:
          ValueError: It does.
        """
        got = self.get(name, value)
        if got != value:
            raise InputError(
                f"{self.where}: {name}={_short(got)} is not supported, only {_short(value)} is"
            )

    def close(self, inert: frozenset[str] | Sequence[str] = _INERT) -> None:
        """Refuses fields that were not read, unless they switch something off.

        Raises:
          ValueError: There is one.
        """
        for name, value in self._values.items():
            known = name in self._read or name in inert or name.startswith("_")
            if not known and value not in (False, "", [], {}):
                raise InputError(
                    f"{self.where}: field {name}={_short(value)} is not supported; if it changes "
                    "nothing in the model, take it out of the file"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
