"""Properties of the source as a whole: what is installed, logged, printed and imported."""

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[1]
LIBRARY = [file for folder in ("rljax", "kernels") for file in (ROOT / folder).rglob("*.py")]


def test_every_folder_of_modules_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = [p for top in ("rljax", "kernels") for p in (ROOT / top).rglob("*.py")]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in modules}
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == {re.sub(r"^kernels\b", "rljax_kernels", x) for x in found}


def _trees():
    for file in LIBRARY:
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def test_the_library_never_imports_torch():
    for file, tree in _trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "torch" not in {name.split(".")[0] for name in names}, f"{file}:{node.lineno}"


def test_the_library_logs_and_never_prints():
    for file, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{file}:{node.lineno}"


def test_module_loggers_have_one_name():
    for file, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.Assign) and "getLogger(" in ast.unparse(node.value):
                assert ast.unparse(node) == "_log = logging.getLogger(__name__)", f"{file}"


_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")


def test_docstring_sections_are_indented_by_two_spaces():
    folders = ("rljax", "kernels", "experiments")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            lines = (ast.get_docstring(node) or "").splitlines()
            for head, line in itertools.pairwise(lines):
                if _SECTION.fullmatch(head):
                    where = f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                    assert re.match(r"  \S", line), f"{where}: {head} {line!r}"
