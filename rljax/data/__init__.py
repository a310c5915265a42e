"""Prompts: sources, generated tasks, templates, tokenizers and the stream over them."""

from rljax.data.alphabet import alphabet
from rljax.data.packaged import find_smollm2, model_path
from rljax.data.prompts import Prompt, PromptFormat, PromptStream, load_prompts
from rljax.data.sources import load_rows
from rljax.data.tasks import TASKS, split_rows
from rljax.data.templates import TEMPLATES, render
from rljax.data.tokenizers import CharTokenizer, Tokenizer, load_tokenizer
from rljax.data.vocabulary import check_vocabulary, unused_ids

__all__ = [
    "TASKS",
    "TEMPLATES",
    "CharTokenizer",
    "Prompt",
    "PromptFormat",
    "PromptStream",
    "Tokenizer",
    "alphabet",
    "check_vocabulary",
    "find_smollm2",
    "load_prompts",
    "load_rows",
    "load_tokenizer",
    "model_path",
    "render",
    "split_rows",
    "unused_ids",
]
