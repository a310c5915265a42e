"""The packages of rljax and what flows between them, drawn from the imports.

    python -m experiments.draw_packages                          # prints Mermaid text
    python -m experiments.draw_packages --write CONTRIBUTING.md  # writes it between the markers

All import statements count, wherever they are: inside functions and under TYPE_CHECKING too. The
one reference that is not a statement is `rljax.mesh.describe` and `draw`, which look up their
implementations in planning by name.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
MOST_NAMES = 4
NOT_DRAWN = ("rljax", "errors", "settings", "config")  # which every package uses
"""The most names on one arrow."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One module's use of another one.

    Attributes:
      user: The module that imports.
      source: The module that it imports from.
      name: What it uses of it; empty for the import of the module itself.
    """

    user: str
    source: str
    name: str


def read(root: pathlib.Path = ROOT, folder: str = "rljax") -> dict[str, ast.Module]:
    """The parsed modules of a folder, by their import names; a package by its `__init__`."""
    modules = {}
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def uses(modules: Mapping[str, ast.Module]) -> Iterator[Use]:
    """Every use of a module by another one: its import statements, and attributes of modules.

    Args:
      modules: Module name -> its parsed source.
    """
    for user, tree in modules.items():
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in modules:
                        aliases[alias.asname or alias.name] = whole
                        yield Use(user, whole, "")
                    elif node.module in modules:
                        yield Use(user, str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                yield from (Use(user, a.name, "") for a in node.names if a.name in modules)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                source = aliases.get(node.value.id)
                if source and f"{source}.{node.attr}" not in modules:
                    yield Use(user, source, node.attr)


def graph(found: Iterable[Use]) -> dict[str, set[str]]:
    """Module -> the other modules that it imports."""
    edges: dict[str, set[str]] = collections.defaultdict(set)
    for use in found:
        if use.user != use.source:
            edges[use.user].add(use.source)
    return dict(edges)


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, by any number of steps."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges.get(module, ())
        reached[start] = seen
    groups = {
        tuple(sorted(m for m in reached[start] if start in reached.get(m, ())))
        for start in edges
        if start in reached[start]
    }
    return [list(group) for group in sorted(groups)]


def package(module: str) -> str:
    """The part of rljax that a module belongs to: `rljax.data.prompts` -> `data`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def mermaid(found: Iterable[Use]) -> str:
    """The packages as a Mermaid flow chart.

    An arrow from one package to another says that the second uses classes of the first, and which;
    of many the most used. Not drawn: errors, settings and config, which all packages use, and
    packages of which only functions are used.
    """
    classes: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for use in found:
        source, user = package(use.source), package(use.user)
        is_class = use.name[:1].isupper() and not use.name.isupper()
        if is_class and source not in (user, *NOT_DRAWN) and user != "rljax":
            classes[source, user][use.name] += 1
    lines = ["```mermaid", "flowchart LR"]
    for (source, user), names in sorted(classes.items()):
        most = sorted(sorted(names), key=lambda name: -names[name])[:MOST_NAMES]
        label = ", ".join(sorted(most)) + (", …" if len(names) > MOST_NAMES else "")
        lines.append(f'    {source} -->|"{label}"| {user}')
    return "\n".join([*lines, "```"])


def main() -> int:
    """Prints the drawing, or writes it between the markers of a file."""
    parser = argparse.ArgumentParser(
        "python -m experiments.draw_packages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="the file to update")
    path = parser.parse_args().write
    drawing = mermaid(uses(read()))
    if path is None:
        print(drawing)
        return 0
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        print(f"error: {path} must hold the lines {BEGIN} and {END} once", file=sys.stderr)
        return 1
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{drawing}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
