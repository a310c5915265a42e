"""The words of code and documentation are those of docs/glossary.md."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[1]
TOPS = ("rljax", "kernels", "experiments", "docs", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".cpp", ".md", ".sh", ".yaml"}
REFUSED = {
    r"mend(s|ed|ing)?": "fix",
    r"whoever|nobody|somebody": "name the thing",
    r"put[ _]back": "preempted",
    r"hand[ _]?over": "sync weights",
    r"what (it says|stands)|as far as it is time": "say it plainly",
    r"asks? the policy": "samples",
    r"start policy": "reference policy",
    r"expert exchange": "expert dispatch",
    r"leave_word|goes_on": "report_crash, can_overlap",
}
"""Words that are not used, as patterns of whole words, and what to write."""


def found(text):
    """Line number, word and what to write, of every refused word in a text."""
    return [
        (number, match[0], instead)
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, instead in REFUSED.items()
        for match in re.finditer(rf"\b({pattern})\b", line, re.IGNORECASE)
    ]


def test_refused_words_are_found():
    text = "Mends it.\nWhoever asks\nrecommend, amended, nobody's"
    assert [(number, word) for number, word, _ in found(text)] == [
        (1, "Mends"),
        (2, "Whoever"),
        (3, "nobody"),
    ]


def test_code_and_documentation_use_the_glossary_s_words():
    complaints = []
    for top in TOPS:
        for file in [ROOT / top, *sorted((ROOT / top).rglob("*"))]:
            if not file.is_file() or file.suffix not in SUFFIXES or file.name == "glossary.md":
                continue
            where = file.relative_to(ROOT)
            complaints += [
                f"{where}:{number}: {word!r} -> {instead}"
                for number, word, instead in found(file.read_text(encoding="utf-8"))
            ]
    assert not complaints, "\n".join(complaints)
