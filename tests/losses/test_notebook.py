"""The notebook runs, cell by cell, in this process."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "losses.ipynb"


def test_notebook_runs():
    nbformat = pytest.importorskip("nbformat")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    pytest.importorskip("IPython")
    import matplotlib.pyplot as plt

    namespace = {"__name__": "notebook"}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{NOTEBOOK.name}:{cell.id}", "exec"), namespace)
            plt.close("all")
