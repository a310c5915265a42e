"""Every notebook runs from its first cell to its last."""

import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    # As a reader runs it: with the devices that it asks for itself, not the tests' eight.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    client.execute(env=environment)
