"""Print the shell commands that a README marks, so that CI runs exactly what a reader would.

A command is a fenced ```bash block right after an HTML comment `<!-- ci: MARK -->`.

Usage: readme_commands.py README.md MARK [--optional]
"""

import argparse
import pathlib
import re
import sys

_MARKED = re.compile(
    r"^<!--[ \t]*ci:[ \t]*(?P<mark>[\w-]+)[ \t]*-->[ \t]*\n(?:[ \t]*\n)*"
    r"^```bash[ \t]*\n(?P<commands>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!--\s*ci:\s*([^>]*?)\s*-->")
_MARKS = ("install", "test", "quickstart", "run")


def marked_commands(readme: str) -> dict[str, list[str]]:
    """The blocks of each mark, in order.

    Args:
        readme: The text of a README.

    Returns:
        Mark to its blocks of commands.

    Raises:
        ValueError: If a mark is unknown, stands before no bash block, or (all but 'run') twice.
    """
    found: dict[str, list[str]] = {}
    for match in _MARKED.finditer(readme):
        found.setdefault(match["mark"], []).append(match["commands"])
    comments = _COMMENT.findall(readme)
    for mark in comments:
        if mark not in _MARKS:
            raise ValueError(f"mark {mark!r} is not known; use one of {', '.join(_MARKS)}")
        if comments.count(mark) != len(found.get(mark, [])):
            raise ValueError(
                f"'<!-- ci: {mark} -->' stands {comments.count(mark)} times but before "
                f"{len(found.get(mark, []))} ```bash blocks; put it right above the block"
            )
        if mark != "run" and comments.count(mark) > 1:
            raise ValueError(f"mark {mark!r} stands {comments.count(mark)} times; use it once")
    return found


def main() -> int:
    """Print the commands of one mark; exit status 1 where there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=pathlib.Path)
    parser.add_argument("mark", choices=_MARKS)
    parser.add_argument("--optional", action="store_true", help="no block is fine")
    arguments = parser.parse_args()
    try:
        blocks = marked_commands(arguments.readme.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{arguments.readme}: {error}", file=sys.stderr)
        return 1
    if arguments.mark not in blocks and not arguments.optional:
        print(
            f"{arguments.readme}: no ```bash block after '<!-- ci: {arguments.mark} -->'; add it",
            file=sys.stderr,
        )
        return 1
    print("\n".join(blocks.get(arguments.mark, [])), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
