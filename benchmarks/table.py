"""A table of measured figures and their bounds."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A figure and what it must not exceed; `bound` None: nothing is required, and the text says what it is beside."""

    what: str
    measured: float
    bound: float | None
    unit: str
    bound_text: str

    @property
    def holds(self) -> bool:
        return self.bound is None or self.measured <= self.bound

    def cells(self) -> tuple[str, ...]:
        """Return the row as it is shown; where the bound is nothing at all there is no ratio."""
        figures = ("" if value is None else f"{value:.3g} {self.unit}" for value in (self.measured, self.bound))
        ratio = f"{self.measured / self.bound:.2f}" if self.bound else ""
        return self.what, *figures, self.bound_text, ratio if self.holds else f"{ratio}  too much"


def run(title: str, measure: Callable[[Path], Iterator[Row]]) -> bool:
    """Measure one part, print its table, and return whether every bound holds."""
    directory = Path(tempfile.mkdtemp(prefix="warmgate-bench-"))
    try:
        rows = list(measure(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    table = Table("what", "measured", "bound", "is", "ratio", title=title)
    for row in rows:
        table.add_row(*row.cells())
    Console(width=150).print(table)
    return all(row.holds for row in rows)
