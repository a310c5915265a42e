"""Tokenizers: the protocol that the rest of the library uses, and its implementations."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rljax.errors import InputError, MissingDependencyError, MissingFileError


@runtime_checkable
class Tokenizer(Protocol):
    """What a tokenizer must provide.

    Attributes:
      vocab_size: One more than the largest id.
      pad_id: Fills rows up; may equal an end id, as masks are explicit everywhere.
      end_ids: The ids that end a response.
      bos_token: Text of the start token that a sequence begins with, "" if it begins with none.
    """

    vocab_size: int
    pad_id: int
    end_ids: tuple[int, ...]
    bos_token: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing added; special tokens in the text are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, end ids left out."""
        ...

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Renders messages ({"role", "content"}) and opens the assistant's turn."""
        ...


class CharTokenizer:
    """One id a character: 0 is padding, 1 ends a response, the alphabet follows in its order."""

    pad_id = 0
    end_ids: tuple[int, ...] = (1,)
    bos_token = ""

    def __init__(self, alphabet: str):
        """Args: alphabet: The characters, each once."""
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise InputError(
                f"alphabet={alphabet!r} is empty or repeats a character: give each character once"
            )
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self._ids = {character: i + 2 for i, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """The ids of a text; InputError on a character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"character {error.args[0]!r} of {_short(text)} is none of the "
                f"{len(self.alphabet)} that the character tokenizer knows ({self.alphabet!r}): "
                "remove it from the text, or make the tokenizer of data that contain it "
                "(rljax.data.alphabet)"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; padding and end ids are left out, unknown ids become "\ufffd"."""
        characters = ["", "", *self.alphabet]
        return "".join(characters[i] if i < self.vocab_size else "\ufffd" for i in ids)

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Refuses: a character tokenizer has no chat template."""
        raise InputError(
            "template='chat' needs a chat template and CharTokenizer has none: use template='none'"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


class PretrainedTokenizer:
    """A tokenizer of the transformers package behind the library's protocol.

    Text is encoded unchanged: no special token is added, but those written in it are
    recognised (templates write them).
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], bos_token: str):
        """Wraps a tokenizer.

        Args:
          tokenizer: A transformers tokenizer.
          end_ids: The ids that end a response, at least one.
          bos_token: Text of the start token, "" if sequences begin with none.
        """
        self._tokenizer = tokenizer
        self.end_ids = tuple(dict.fromkeys(int(i) for i in end_ids))
        self.bos_token = bos_token
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        pad_id = tokenizer.pad_token_id
        self.pad_id = self.end_ids[0] if pad_id is None else int(pad_id)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end ids are left out, other special tokens are kept."""
        kept = [int(i) for i in ids if i not in self.end_ids and i < self.vocab_size]
        return self._tokenizer.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Renders messages by the tokenizer's chat template and opens the assistant's turn.

        Raises:
          InputError: Where it has no chat template, or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise InputError(
                "template='chat' but the tokenizer has no chat template: use template='none' or "
                "'r1', as for a base model"
            )
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except ImportError:
            raise MissingDependencyError(
                "template='chat' needs jinja2, which is not installed: run `pip install jinja2`"
            ) from None
        except Exception as error:  # the template's own errors are of jinja2, loaded lazily
            raise InputError(
                f"template='chat': the tokenizer's template refused the messages "
                f"({' '.join(str(error).split())}): fix them or use another template"
            ) from None


def load_tokenizer(path: str | Path) -> PretrainedTokenizer:
    """Loads the tokenizer of a model on this machine; nothing is downloaded.

    Args:
      path: A Hugging Face model folder, or a .gguf file. A folder's end ids are all of
        `eos_token_id` in generation_config.json and config.json and the tokenizer's own; a
        GGUF file's are its end-of-sequence and end-of-turn ids.

    Returns:
      The tokenizer.

    Raises:
      MissingFileError: Where the path does not exist.
      InputError: Where it holds no tokenizer that can be read, or no end id is known.
    """
    path = Path(path)
    if not path.exists():
        raise MissingFileError(
            f"tokenizer {str(path)!r} does not exist: give a model folder or a .gguf file"
        )
    _import_transformers()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(
                f"tokenizer {str(path)!r} is a file of an unknown kind: give the model's folder, "
                "or a .gguf file"
            )
        from rljax.data.gguf_tokenizer import read_gguf_tokenizer

        tokenizer, end_ids, adds_bos = read_gguf_tokenizer(path)
    else:
        tokenizer = _load_folder(path)
        end_ids = _folder_end_ids(path, tokenizer)
        first = tokenizer.encode("a")[:1]
        adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    if not end_ids:
        raise InputError(
            f"tokenizer {str(path)!r} names no end token: set eos_token_id in "
            "generation_config.json"
        )
    return PretrainedTokenizer(tokenizer, end_ids, tokenizer.bos_token if adds_bos else "")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def _import_transformers() -> None:
    # It complains once about the absence of torch, which only its models need.
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )
    import transformers  # noqa: F401


def _load_folder(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model folder {str(path)!r} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}): "
            "copy the model's tokenizer files into it"
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise errors of many classes
        raise InputError(
            f"the tokenizer of model folder {str(path)!r} cannot be read "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): fix its files"
        ) from None


def _folder_end_ids(path: Path, tokenizer: Any) -> list[int]:
    ids: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            try:
                found = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                raise InputError(
                    f"{path / name} cannot be read as a JSON object: fix the file"
                ) from None
            ids.extend(found if isinstance(found, list) else [found])
    ids.append(tokenizer.eos_token_id)
    return [i for i in ids if i is not None]
