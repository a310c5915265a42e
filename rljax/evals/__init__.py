"""Held-out evaluation: avg@k, pass@k, maj@k, greedy."""

from rljax.evals.evaluate import WHOLE, AnswerParser, Evaluation, evaluate, sample, summarize
from rljax.evals.metrics import answering_rate, avg_at_k, maj_at_k, pass_at_k

__all__ = [
    "WHOLE",
    "AnswerParser",
    "Evaluation",
    "answering_rate",
    "avg_at_k",
    "evaluate",
    "maj_at_k",
    "pass_at_k",
    "sample",
    "summarize",
]
