"""Templates turn a question into the text the policy continues."""

import pytest

from rljax.data import TEMPLATES, CharTokenizer, render


class Chatty(CharTokenizer):
    """A tokenizer with a start token and a chat template."""

    bos_token = "<s>"

    def chat(self, messages):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


TOKENIZER = Chatty("ab")
QUESTION = "What is {3} + 4?"  # braces must pass unharmed


def test_none_is_the_question_after_the_start_token():
    assert render("none", QUESTION, TOKENIZER) == "<s>" + QUESTION
    assert render("none", QUESTION, CharTokenizer("ab")) == QUESTION


def test_chat_is_the_tokenizers_own():
    assert render("chat", QUESTION, TOKENIZER) == f"[user]{QUESTION}[assistant]"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert render("chat", messages, TOKENIZER) == "[system]s[user]u[assistant]"


def test_r1_is_a_dialogue_with_tags():
    text = render("r1", QUESTION, TOKENIZER)
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in text
    assert text.startswith("<s>") and text.endswith(f"User: {QUESTION}\nAssistant:")


def test_qwen_math_is_chatml_that_asks_for_a_box():
    assert render("qwen-math", QUESTION, CharTokenizer("ab")) == (
        "<|im_start|>system\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_misuse_is_refused_in_one_line():
    known = ", ".join(TEMPLATES)
    with pytest.raises(ValueError, match=f"template='llama' is unknown: use one of {known}"):
        render("llama", QUESTION, TOKENIZER)
    with pytest.raises(ValueError, match="template='none' cannot render a list of chat messages"):
        render("none", [{"role": "user", "content": "u"}], TOKENIZER)
