"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt for transformers without torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax.errors import InputError, MissingDependencyError

# How llama.cpp's names for pre-tokenizers (tokenizer.ggml.pre) split text before the merges.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_CONTROL, _USER_DEFINED = 3, 4  # of gguf's token types


def read_gguf_tokenizer(path: Path) -> tuple[Any, list[int], bool]:
    """Reads the tokenizer of a GGUF file.

    Args:
      path: The file. Its tokenizer must be byte-level BPE ("gpt2") with a known way to split
        text: gpt-2, smollm, llama-bpe or qwen2.

    Returns:
      A transformers fast tokenizer, the end ids, and whether a sequence begins with the start
      token.

    Raises:
      MissingDependencyError: Where the package gguf is missing.
      InputError: Where the file is malformed, or its tokenizer is of another kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    fields = _read_fields(path)
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InputError(
            f"the tokenizer of {str(path)!r} is of the kind {kind!r}, only 'gpt2' (byte-level BPE) "
            "can be read from GGUF: give the model's Hugging Face folder"
        )
    split = fields.get("tokenizer.ggml.pre", "gpt-2")
    if split not in _PRE_TOKENIZERS:
        raise InputError(
            f"the tokenizer of {str(path)!r} splits text as {split!r}, known are "
            f"{', '.join(_PRE_TOKENIZERS)}: give the model's Hugging Face folder"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.normalizer = _normalizer(split)
    backend.pre_tokenizer = _PRE_TOKENIZERS[split]()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    types = fields.get("tokenizer.ggml.token_type", [])
    whole = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(whole)

    def special(name: str) -> int | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else int(index)

    names = {"bos": special("bos"), "eos": special("eos"), "pad": special("padding")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        **{f"{name}_token": tokens[i] for name, i in names.items() if i is not None},
    )
    ends = [special("eos"), special("eot"), special("eom")]
    if split == "qwen2":
        # Its generation_config.json lists two end tokens, of which a GGUF file names only one.
        ends.append(backend.token_to_id("<|endoftext|>"))
    end_ids = [i for i in ends if i is not None]
    return tokenizer, end_ids, bool(fields.get("tokenizer.ggml.add_bos_token", False))


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            f"reading {str(path)!r} needs the package gguf, which is not installed: "
            "run `pip install gguf`"
        ) from None
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader has no error class of its own
        raise InputError(
            f"{str(path)!r} is not a readable GGUF file ({' '.join(str(error).split())}): "
            "copy it again"
        ) from None
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }


def _regex(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _normalizer(split: str) -> Any:
    from tokenizers import normalizers

    return normalizers.NFC() if split == "qwen2" else None


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": lambda: _regex(_LLAMA3),
    "qwen2": lambda: _regex(_QWEN2),
}
