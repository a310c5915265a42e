"""Rows sorted by group through functions with one set of matrices a group: dropless mixtures."""

from rljax_kernels.grouped_matmul.grouped import (
    Backend,
    Dot,
    RowLayout,
    Stage,
    choose_backend,
    grouped,
    grouped_matmul,
    reference,
    row_layout,
)

__all__ = [
    "Backend",
    "Dot",
    "RowLayout",
    "Stage",
    "choose_backend",
    "grouped",
    "grouped_matmul",
    "reference",
    "row_layout",
]
