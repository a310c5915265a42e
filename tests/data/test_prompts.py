"""The stream visits each prompt once an epoch and resumes exactly; bad data are refused early."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest

from rljax.data import CharTokenizer, PromptFormat, PromptStream, load_prompts
from rljax.errors import InputError

TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=? ")


def rows(*questions):
    return [{"question": q, "answer": q.upper(), "level": i} for i, q in enumerate(questions)]


SOURCE = rows("a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg")


def stream(source=SOURCE, *, seed=0, split="train", **options):
    return PromptStream(source, TOKENIZER, PromptFormat(**options), seed=seed, split=split)


def take(prompts, count):
    return [(p.id, p.draw) for p in (next(prompts) for _ in range(count))]


def test_a_prompt_carries_its_row():
    prompt = load_prompts(SOURCE, TOKENIZER)[2]
    assert (prompt.id, prompt.draw, prompt.text) == (2, 0, "ccc")
    np.testing.assert_array_equal(prompt.tokens, [4, 4, 4])
    assert prompt.tokens.dtype == np.int32
    assert prompt.columns == {"question": "ccc", "answer": "CCC", "level": 2}


@pytest.mark.smoke
def test_every_epoch_holds_each_prompt_once_in_an_order_of_its_own():
    seen = take(stream(seed=3), 21)
    epochs = [seen[i : i + 7] for i in (0, 7, 14)]
    for draw, epoch in enumerate(epochs):
        assert sorted(epoch) == [(i, draw) for i in range(7)]
    assert len({tuple(i for i, _ in epoch) for epoch in epochs}) == 3


def test_the_seed_alone_decides_the_order():
    assert take(stream(seed=3), 14) == take(stream(seed=3), 14) != take(stream(seed=4), 14)


@pytest.mark.smoke
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 14, 20])
def test_a_stream_resumes_at_the_very_next_prompt(position):
    unbroken = stream(seed=3)
    take(unbroken, position)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = stream(seed=3)
    take(resumed, 5)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert take(resumed, 15) == take(unbroken, 15)


def test_a_position_in_other_data_is_refused():
    state = stream().get_state()
    with pytest.raises(ValueError, match="the 6 prompts differ from those of the saved"):
        stream(SOURCE[:-1]).set_state(state)
    with pytest.raises(ValueError, match="seed=1 but the saved data position is of seed=0"):
        stream(seed=1).set_state(state)


def test_long_prompts_are_dropped_counted_and_told_once(caplog):
    caplog.set_level(logging.WARNING, "rljax")
    prompts = stream(max_prompt_length=5)
    assert len(prompts) == 5
    assert {i for i, _ in take(prompts, 20)} == {0, 1, 2, 3, 4}
    assert caplog.messages == [
        "the given list of rows: dropped 2 of 7 prompts, longer than max_prompt_length=5 tokens "
        "(the longest has 7)"
    ]


def test_ids_and_draws_do_not_depend_on_what_was_dropped():
    prompts = stream(rows("aaa", "b", "ccc", "d"), max_prompt_length=1)
    assert sorted(take(prompts, 4)) == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_too_long_error_refuses_the_first_long_prompt():
    with pytest.raises(ValueError, match=r"row 5 of the given .* is 6 tokens long, over max_"):
        stream(max_prompt_length=5, too_long="error")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "holds no rows: give it at least one"),
        (SOURCE, {"max_prompt_length": 0}, "max_prompt_length=0 is too small"),
        (rows("aaa", "bb"), {"max_prompt_length": 1}, "all 2 prompts .* shortest has 2 tokens"),
        (rows("a", ""), {}, "row 1 of the given list of rows renders to no tokens"),
        (rows("a", "B"), {}, "row 1 of the given list of rows: character 'B' of 'B' is none"),
        (SOURCE, {"template": "chatml"}, "template='chatml' is unknown: use one of none, chat"),
        (SOURCE, {"template": "chat"}, "CharTokenizer has none: use template='none'"),
        (SOURCE, {"too_long": "cut"}, "too_long='cut' is unknown: use 'drop' or 'error'"),
        (SOURCE, {"seed": -1}, "seed=-1 is negative"),
        ("addition", {"split": "dev"}, "split='dev' is unknown"),
        ("addition", {"split": None}, "split=None for the task 'addition'"),
    ],
)
def test_bad_data_and_options_are_refused_in_one_line(source, options, message):
    with pytest.raises(ValueError, match=message) as error:
        stream(source, **options)
    assert "\n" not in str(error.value)


class EchoTokenizer(CharTokenizer):
    def chat(self, messages):
        return "".join(f"{m['role']}: {m['content']} = " for m in messages)


ECHO = EchoTokenizer(TOKENIZER.alphabet + ":")


def test_rows_are_as_good_as_a_file_of_them(tmp_path):
    rows = [{"problem": "a", "Answer": 1.0}, {"problem": "b", "Answer": "2", "level": 3}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given, read = stream(rows), stream(path)
    assert given.get_state() == read.get_state()  # the digest included
    assert [p.columns for p in given.prompts] == [p.columns for p in read.prompts]
    assert given.prompts[0].columns["answer"] == "1"
    assert stream(row for row in rows).get_state() == given.get_state()
    assert rows[0] == {"problem": "a", "Answer": 1.0}  # the caller's rows are left alone


def test_rows_may_be_questions_alone_or_chat_messages():
    messages = [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]
    (plain,) = load_prompts(["abc"], ECHO)
    assert plain.text == "abc" and plain.columns == {"question": "abc"}
    chat = PromptFormat(template="chat")
    expected = "user: a = bot: b = "
    assert load_prompts([messages], ECHO, chat)[0].text == expected
    (named,) = load_prompts([{"prompt": messages, "answer": 4}], ECHO, chat)
    assert named.text == expected and named.columns["answer"] == "4"
    with pytest.raises(InputError, match="cannot render a list of chat messages: use template="):
        load_prompts([messages], ECHO)


@pytest.mark.parametrize("row", [3, "", [], None, ["a", "b"], ("q", 1)])
def test_what_is_no_row_is_refused_with_its_number(row):
    with pytest.raises(InputError, match=r"row 1 of the given list of rows is .*: give a dict"):
        load_prompts([{"question": "a"}, row], TOKENIZER)


def test_a_generated_task_streams_its_split():
    training = stream("addition", split="train")
    held_out = load_prompts("addition", TOKENIZER, split="test")
    assert len(training) == 9232 and len(held_out) == 512
    assert {p.text for p in training.prompts}.isdisjoint(p.text for p in held_out)
    assert {len(p.tokens) for p in held_out} == {6}


def test_importing_data_loads_no_transformers():
    code = "import sys, rljax.data; assert not {'transformers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
