"""How many responses check or revise their own reasoning, by the phrases in them."""

import re
from collections.abc import Sequence

# The keywords of Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783,
# appendix on self-reflection), and the most frequent phrases of later reasoning models.
PHRASES = (
    r"wait",
    r"hold on",
    r"on second thought",
    r"let(?:'|’)?s? (?:me |us )?(?:double[- ])?(?:check|verify)",
    r"double[- ]check(?:ing|ed)?",
    r"(?:check|verify|think|try) again",
    r"re[- ]?(?:check|think|assess|evaluate|examine|consider|analy[sz]e)(?:ing|ed)?",
    r"(?:made|is) a mistake",
    r"that(?:'|’)?s (?:not right|wrong)",
)
"""Regular expressions, matched as whole words in any case."""

_PATTERN = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)


def reflection_frac(texts: Sequence[str]) -> float:
    """Share of responses with a phrase of reflection: `completion/reflection_frac`.

    Args:
      texts: The responses.

    Returns:
      In [0, 1]; NaN where there are none.
    """
    if not texts:
        return float("nan")
    return sum(_PATTERN.search(text) is not None for text in texts) / len(texts)
