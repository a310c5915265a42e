"""Print the shell commands that README and guides mark, so that CI runs what a reader would.

A command is a fenced ```bash or ```python block right after an HTML comment `<!-- ci: MARK -->`;
Python is printed as a command that runs it. The marks
install, test and quickstart are used once over all files; run, any number of times. A block that CI
cannot run says why: `<!-- ci: skip: REASON -->`.

Usage: readme_commands.py MARK README.md [docs/GUIDE.md ...]
"""

import argparse
import pathlib
import re
import sys

_MARKED = re.compile(
    r"^<!--[ \t]*ci:[ \t]*(?P<mark>[\w-]+)[ \t]*-->[ \t]*\n(?:[ \t]*\n)*"
    r"^```(?P<language>bash|python)[ \t]*\n(?P<commands>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!--\s*ci:\s*([^>]*?)\s*-->")
_MARKS = ("install", "test", "quickstart", "run")


def marked_commands(text: str) -> dict[str, list[str]]:
    """The blocks of each mark, in order.

    Args:
        text: The Markdown text of one file.

    Returns:
        Mark to its blocks of commands.

    Raises:
        ValueError: If a mark is unknown, is not right above a block, or is repeated
            (all but 'run').
    """
    found: dict[str, list[str]] = {}
    for match in _MARKED.finditer(text):
        commands = match["commands"]
        if match["language"] == "python":
            commands = f"python - <<'END_OF_PYTHON'\n{commands}END_OF_PYTHON\n"
        found.setdefault(match["mark"], []).append(commands)
    comments = [mark for mark in _COMMENT.findall(text) if not mark.startswith("skip: ")]
    for mark in comments:
        if mark not in _MARKS:
            raise ValueError(f"mark {mark!r} is not known; use one of {', '.join(_MARKS)}")
        if comments.count(mark) != len(found.get(mark, [])):
            raise ValueError(
                f"'<!-- ci: {mark} -->' occurs {comments.count(mark)} times but right above "
                f"{len(found.get(mark, []))} ```bash or ```python blocks; move it there"
            )
        if mark != "run" and comments.count(mark) > 1:
            raise ValueError(f"mark {mark!r} occurs {comments.count(mark)} times; use it once")
    return found


def collect(files: list[pathlib.Path], mark: str) -> list[str]:
    """The blocks of one mark in several files, in order.

    Args:
        files: Markdown files.
        mark: One of the marks.

    Returns:
        The blocks.

    Raises:
        ValueError: If a file is missing or marked wrongly, or the mark is nowhere, or (all but
            'run') in several files.
    """
    found = []
    for file in files:
        try:
            found += marked_commands(file.read_text(encoding="utf-8")).get(mark, [])
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None
    names = ", ".join(map(str, files))
    if not found:
        raise ValueError(f"{names}: no block of commands after '<!-- ci: {mark} -->'; add it")
    if mark != "run" and len(found) > 1:
        raise ValueError(f"{names}: mark {mark!r} occurs {len(found)} times; use it once")
    return found


def main() -> int:
    """Print the commands of one mark; exit status 1 where there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mark", choices=_MARKS)
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    try:
        blocks = collect(arguments.files, arguments.mark)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(blocks), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
