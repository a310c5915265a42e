"""Imports between the modules go one way, and CONTRIBUTING's drawing is made from them."""

import ast

from experiments import draw_packages as packages

ORDER = (
    ("errors", "settings"),
    ("config", "packing"),
    ("batch",),
    ("presets",),
    ("processes",),
    ("mesh",),
    ("losses", "models"),
    ("sampling",),
    ("data", "rewards"),
    ("evals", "rollouts"),
    ("monitoring",),
    ("training",),
    ("planning",),
)
"""The parts of rljax. A part may import those of the lines before its own."""


def parse(sources):
    return {name: ast.parse(text) for name, text in sources.items()}


def test_modules_do_not_import_in_circles():
    assert packages.cycles(packages.graph(packages.uses(packages.read()))) == []


def test_packages_import_in_one_order():
    place = {name: i for i, names in enumerate(ORDER) for name in names}
    edges = packages.graph(packages.uses(packages.read()))
    named = {packages.package(module) for module in packages.read()} - {"rljax"}
    assert named <= set(place), "a new package needs a place in ORDER"
    wrong = {
        f"{user} imports {source}"
        for user, sources in edges.items()
        for source in sources
        if packages.package(user) != packages.package(source)
        and "rljax" not in (user, source)
        and place[packages.package(source)] >= place[packages.package(user)]
    }
    assert wrong == set()


def test_nothing_below_imports_what_is_run():
    for folder in ("kernels", "rljax"):
        for name, tree in packages.read(folder=folder).items():
            imported = {
                module.split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for module in (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                )
            }
            forbidden = {"experiments", "tests"} | ({"rljax"} if folder == "kernels" else set())
            assert not imported & forbidden, name
            relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
            assert not relative, f"{name}: relative imports are not counted; name the package"


def test_imports_count_wherever_they_are():
    modules = parse(
        {
            "rljax.a": "def f():\n    from rljax import b\n    return b.g",
            "rljax.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rljax.c",
            "rljax.c": "from rljax.a import f",
            "rljax.d": "from rljax.a import f",
        }
    )
    found = packages.graph(packages.uses(modules))
    assert found == {
        "rljax.a": {"rljax.b"},
        "rljax.b": {"rljax.c"},
        "rljax.c": {"rljax.a"},
        "rljax.d": {"rljax.a"},
    }
    assert packages.cycles(found) == [["rljax.a", "rljax.b", "rljax.c"]]


def test_arrows_bear_the_classes_that_are_used():
    modules = parse(
        {
            "rljax.batch": "class Batch: ...",
            "rljax.mesh.rules": "Rules = dict",
            "rljax.losses.named": "from rljax.batch import Batch, make\nfrom rljax import batch\n"
            "batch.Rows; batch.LIMIT; batch.make",
            "rljax.models": "from rljax.mesh import rules\nrules.Rules\nfrom rljax import errors",
        }
    )
    assert packages.mermaid(packages.uses(modules)).splitlines()[2:-1] == [
        '    batch -->|"Batch, Rows"| losses',
        '    mesh -->|"Rules"| models',
    ]


def test_contributing_shows_the_packages_as_they_are():
    text = (packages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.split(packages.BEGIN)[1].split(packages.END)[0].strip()
    assert drawn == packages.mermaid(packages.uses(packages.read())), (
        "run: python -m experiments.draw_packages --write CONTRIBUTING.md"
    )
