"""Held-out evaluation: avg@k, pass@k, maj@k, greedy accuracy, and how often answers are given."""

from rljax.evals.evaluate import (
    WHOLE,
    AnswerParser,
    EvalTask,
    Evaluation,
    evaluate,
    sample,
    summarize,
)
from rljax.evals.metrics import answering_rate, avg_at_k, maj_at_k, pass_at_k
from rljax.evals.reflection import reflection_frac
from rljax.evals.seeds import seed_for_evaluation

__all__ = [
    "WHOLE",
    "AnswerParser",
    "EvalTask",
    "Evaluation",
    "answering_rate",
    "avg_at_k",
    "evaluate",
    "maj_at_k",
    "pass_at_k",
    "reflection_frac",
    "sample",
    "seed_for_evaluation",
    "summarize",
]
