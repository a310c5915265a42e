"""What is installed is what there is."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.smoke
def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"rljax_kernels"}
    for file in (ROOT / "rljax").rglob("__init__.py"):
        found.add(".".join(file.parent.relative_to(ROOT).parts))
    assert set(listed) == found


@pytest.mark.smoke
def test_the_library_never_imports_torch():
    for folder in ("rljax", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            lines = file.read_text().splitlines()
            assert not [x for x in lines if x.strip().startswith(("import torch", "from torch"))]
