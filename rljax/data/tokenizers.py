"""Tokenizers: what the rest of the library asks of one, and those it knows."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """What the library asks of a tokenizer.

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
    end_ids = (1,)
    bos_token = ""

    def __init__(self, alphabet: str):
        """Args: alphabet: The characters, each once."""
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise ValueError(
                f"alphabet={alphabet!r} is empty or repeats a character: give each character once"
            )
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self._ids = {character: i + 2 for i, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """The ids of a text; ValueError on a character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(
                f"character {error.args[0]!r} of {text!r} is not in the alphabet "
                f"{self.alphabet!r}: add it there"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; padding and end ids are left out, unknown ids become "\ufffd"."""
        characters = ["", "", *self.alphabet]
        return "".join(characters[i] if i < self.vocab_size else "\ufffd" for i in ids)

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Refuses: a character tokenizer has no chat template."""
        raise ValueError(
            "template='chat' needs a chat template and CharTokenizer has none: use template='none'"
        )
