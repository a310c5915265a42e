"""A tokenizer must fit the embedding; the alphabet of a character tokenizer covers all data."""

import logging

import pytest

from rljax.data import (
    CharTokenizer,
    PromptFormat,
    alphabet,
    check_vocabulary,
    load_prompts,
    load_rows,
    unused_ids,
)
from rljax.errors import InputError

TRAIN = [{"question": "1+1=", "answer": "2", "source": "§"}]
TEST = [{"problem": "3×4=", "solution": "12"}]


class ChatTokenizer(CharTokenizer):
    """Ends turns with `end`."""

    def __init__(self, end, end_ids):
        super().__init__("abqxzjv<>|: \n")
        self.end_ids = end_ids
        self.end = end

    def chat(self, messages):
        return "".join(f"<{m['content']}{self.end}" for m in messages)


def test_an_alphabet_holds_prompts_and_answers_of_training_and_evaluation():
    assert alphabet([TRAIN]) == "+12="
    assert alphabet([TRAIN, TEST]) == "+1234=×"
    assert alphabet([TRAIN], PromptFormat(answer_column="source")) == "+1=§"


@pytest.mark.parametrize("template", ["none", "r1", "qwen-math"])
def test_every_prompt_and_answer_can_be_encoded_with_it(template):
    chosen = PromptFormat(template=template)
    tokenizer = CharTokenizer(alphabet([TRAIN, TEST], chosen))
    for prompt in [*load_prompts(TRAIN, tokenizer, chosen), *load_prompts(TEST, tokenizer, chosen)]:
        assert tokenizer.decode(tokenizer.encode(prompt.text)) == prompt.text
        tokenizer.encode(prompt.columns["answer"])


def test_the_alphabet_of_a_task_is_that_of_any_of_its_splits():
    splits = [load_rows("addition", split) for split in ("train", "validation", "test")]
    assert alphabet(splits) == alphabet(splits[:1]) == "+0123456789="


def test_an_unknown_character_is_refused_with_its_row_and_what_to_do():
    tokenizer = CharTokenizer(alphabet([TRAIN]))
    message = r"row 0 of .*: character '3' of '3×4=' is none of the 4 .*rljax.data.alphabet"
    with pytest.raises(InputError, match=message) as error:
        load_prompts(TEST, tokenizer)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_fits_is_accepted_in_silence(caplog):
    tokenizer = CharTokenizer("ab")
    assert check_vocabulary(tokenizer, 4) == 0
    assert unused_ids(tokenizer, 4).size == 0
    assert not caplog.records


def test_ids_beyond_the_embedding_are_refused():
    with pytest.raises(InputError, match="ids up to 3, the model's embedding 3 rows"):
        check_vocabulary(CharTokenizer("ab"), 3)
    tokenizer = CharTokenizer("ab")
    tokenizer.end_ids = (1, 9)
    with pytest.raises(InputError, match=r"end id 9 .* beyond the 4 ids .* never be sampled"):
        check_vocabulary(tokenizer, 4)


def test_a_padded_embedding_is_counted_and_warned_of(caplog):
    caplog.set_level(logging.WARNING, "rljax")
    tokenizer = CharTokenizer("ab")
    assert check_vocabulary(tokenizer, 8) == 4
    assert unused_ids(tokenizer, 8).tolist() == [4, 5, 6, 7]
    (message,) = caplog.messages
    assert "has 4 ids beyond the tokenizer's 4" in message


@pytest.mark.parametrize(
    ("end", "end_ids", "warns"),
    [
        (">", (1,), True),  # its id is 10
        (" \n>", (1,), True),  # white space is no end
        (">", (1, 10), False),
        ("", (1,), True),  # the next turn begins: nothing ends this one
    ],
)
def test_a_template_that_ends_turns_without_an_end_id_is_warned_of(end, end_ids, warns, caplog):
    caplog.set_level(logging.WARNING, "rljax")
    tokenizer = ChatTokenizer(end, end_ids)
    check_vocabulary(tokenizer, tokenizer.vocab_size, "none")
    assert not caplog.records
    check_vocabulary(tokenizer, tokenizer.vocab_size, "chat")
    assert ["template=chat ends turns with token" in m for m in caplog.messages] == [True] * warns


def test_a_template_for_single_turns_is_not_judged(caplog):
    tokenizer = CharTokenizer("ab")  # its chat refuses
    check_vocabulary(tokenizer, 4, "chat")
    assert not caplog.records
