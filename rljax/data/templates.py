"""Prompt templates: from a question to the text that the policy continues."""

from collections.abc import Callable, Sequence
from typing import Any

from rljax.data.tokenizers import Tokenizer
from rljax.errors import InputError

Message = dict[str, Any]
Question = str | Sequence[Message]

# The format of the DeepSeek-R1-Zero paper (arXiv:2501.12948, table 1): a plain dialogue for base
# models, with reasoning and answer in separate tags.
_R1 = (
    "This is a conversation between User and Assistant. User asks a question and Assistant solves "
    "it. Assistant thinks the problem through first and only then gives the answer. The thinking "
    "is written between <think> and </think>, the answer between <answer> and </answer>, like "
    "this: <think> the thinking </think> <answer> the answer </answer>\n"
    "User: {question}\n"
    "Assistant:"
)

# The prompt Qwen2.5-Math models were trained and evaluated with (arXiv:2409.12122).
_QWEN_MATH = (
    "<|im_start|>system\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def none(question: Question, tokenizer: Tokenizer) -> str:
    """The question as it is, after the start token where the tokenizer has one."""
    return tokenizer.bos_token + _plain(question, "none")


def chat(question: Question, tokenizer: Tokenizer) -> str:
    """The tokenizer's own chat template, opened for the assistant's turn."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return tokenizer.chat(messages)


def r1(question: Question, tokenizer: Tokenizer) -> str:
    """A dialogue for base models with <think> and <answer> tags (DeepSeek-R1-Zero)."""
    return tokenizer.bos_token + _R1.format(question=_plain(question, "r1"))


def qwen_math(question: Question, tokenizer: Tokenizer) -> str:
    r"""ChatML with the system message that requests steps and a \boxed{} answer (Qwen2.5-Math)."""
    return tokenizer.bos_token + _QWEN_MATH.format(question=_plain(question, "qwen-math"))


TEMPLATES: dict[str, Callable[[Question, Tokenizer], str]] = {
    "none": none,
    "chat": chat,
    "r1": r1,
    "qwen-math": qwen_math,
}


def render(template: str, question: Question, tokenizer: Tokenizer) -> str:
    """Renders a question as the text the policy continues.

    Args:
      template: A name in `TEMPLATES`: "none", "chat", "r1" or "qwen-math".
      question: The question, or chat messages ({"role", "content"}) for the template "chat".
      tokenizer: Has the chat template and the start token.

    Returns:
      The text, special tokens included: encode it without adding any.

    Raises:
      InputError: On an unknown template, or where the tokenizer has no chat template.
    """
    if template not in TEMPLATES:
        raise InputError(f"template={template!r} is unknown: use one of {', '.join(TEMPLATES)}")
    return TEMPLATES[template](question, tokenizer)


def _plain(question: Question, template: str) -> str:
    if not isinstance(question, str):
        raise InputError(
            f"template={template!r} cannot render a list of chat messages: use template='chat', or "
            "a question column of plain text"
        )
    return question
