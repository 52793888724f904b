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
    """A figure and what it must not exceed, or with `least` must reach.

    `bound` None: nothing is required, and the text says what it is beside.
    """

    what: str
    measured: float
    bound: float | None
    unit: str
    bound_text: str
    least: bool = False

    @property
    def holds(self) -> bool:
        if self.bound is None:
            return True
        return self.measured >= self.bound if self.least else self.measured <= self.bound

    @property
    def ratio(self) -> float | None:
        """1.00 or less where the bound holds, also for what must be reached; None where the bound is nothing at all."""
        return self.bound and (self.bound / (self.measured or 1e-9) if self.least else self.measured / self.bound)

    def cells(self) -> tuple[str, ...]:
        """Return the row as it is shown."""
        figures = ("" if value is None else f"{value:.3g} {self.unit}" for value in (self.measured, self.bound))
        ratio = f"{self.ratio:.2f}" if self.ratio else ""
        wrong = "too little" if self.least else "too much"
        return self.what, *figures, self.bound_text, ratio if self.holds else f"{ratio}  {wrong}"


def run(title: str, measure: Callable[[Path], Iterator[Row]]) -> bool:
    """Measure one part, print its table, and return whether every bound holds; else why it could not be measured."""
    directory = Path(tempfile.mkdtemp(prefix="warmgate-bench-"))
    try:
        rows = list(measure(directory))
    except SystemExit as error:
        print(f"{title}: not measured: {error}")
        return False
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    table = Table("what", "measured", "bound", "is", "ratio", title=title)
    for row in rows:
        table.add_row(*row.cells())
    Console(width=150).print(table)
    return all(row.holds for row in rows)
