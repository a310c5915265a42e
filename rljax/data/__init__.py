"""Prompts: sources, generated tasks, templates, tokenizers and the stream over them."""

from rljax.data.prompts import Prompt, PromptStream, load_prompts
from rljax.data.sources import load_rows
from rljax.data.tasks import TASKS, split_rows
from rljax.data.templates import TEMPLATES, render
from rljax.data.tokenizers import CharTokenizer, Tokenizer

__all__ = [
    "TASKS",
    "TEMPLATES",
    "CharTokenizer",
    "Prompt",
    "PromptStream",
    "Tokenizer",
    "load_prompts",
    "load_rows",
    "render",
    "split_rows",
]
