"""Tables as text and as HTML, and numbers with units."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """A titled table.

    Attributes:
      title: Its title.
      head: The names of its columns.
      body: Its rows, a cell for each column.
    """

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.body, strict=True)]
        lines = [self.head, ["-" * w for w in widths], *self.body]
        return "\n".join(
            [self.title]
            + [
                "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
                for line in lines
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(line("td", cells) for cells in self.body)
        return f"<h4>{html.escape(self.title)}</h4><table>{line('th', self.head)}{body}</table>"


class Tables:
    """An object that prints as tables: as text, and as HTML in a notebook."""

    def tables(self) -> list[Table]:
        """The tables, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())


def size(n: float) -> str:
    """Bytes, decimal: 7.86 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def count(n: float) -> str:
    """A number of parameters: 671B."""
    for unit in ("", "k", "M", "B"):
        if n < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}T"


def seconds(n: float) -> str:
    """A time: 12.3 ms."""
    for unit in ("s", "ms", "µs"):
        if n >= 0.9995 or unit == "µs":
            break
        n *= 1000
    return f"{n:.3g} {unit}"


def short(text: str, most: int = 90) -> str:
    """The beginning of a text that is longer."""
    return text if len(text) <= most else f"{text[:most]} …"
