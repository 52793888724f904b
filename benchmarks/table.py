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
    """A figure and what it must not exceed."""

    what: str
    measured: float
    bound: float
    unit: str
    bound_text: str

    @property
    def ratio(self) -> float:
        return self.measured / self.bound


def run(title: str, measure: Callable[[Path], Iterator[Row]]) -> bool:
    """Measure one part, print its table, and return whether every bound holds."""
    directory = Path(tempfile.mkdtemp(prefix="warmgate-bench-"))
    try:
        rows = list(measure(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    table = Table("what", "measured", "bound", "is", "ratio", title=title)
    for row in rows:
        shown = (f"{value:.3g} {row.unit}" for value in (row.measured, row.bound))
        mark = "" if row.ratio <= 1 else "  too much"
        table.add_row(row.what, *shown, row.bound_text, f"{row.ratio:.2f}{mark}")
    Console(width=150).print(table)
    return all(row.ratio <= 1 for row in rows)
