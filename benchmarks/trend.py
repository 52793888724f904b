"""Whether memory grows: a line through what a process holds, and how sure its slope is."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

from benchmarks.process import Sidecar
from benchmarks.table import MIB, Row

# Neighbouring samples are not independent of each other, so a line goes through the means of this many equal spans.
SPANS = 20
# Student's t for 95 % on both sides and SPANS - 2 degrees of freedom.
T_95 = 2.101
# What the allocator takes to hold the first requests of each shape is no trend.
SETTLING = 0.2

Samples = Sequence[tuple[float, float]]


@contextlib.contextmanager
def watching(sidecar: Sidecar, every_s: float) -> Iterator[list[tuple[float, float]]]:
    """Note (seconds, resident bytes) while the block runs."""
    rows: list[tuple[float, float]] = []
    over = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not over.wait(every_s):
            rows.append((time.monotonic() - began, sidecar.resident_bytes()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()


def slope(samples: Samples) -> tuple[float, float]:
    """Return the slope of the line (units a second) and half the width of its 95 % confidence interval."""
    points = _means(samples)
    middle_x, middle_y = (statistics.fmean(one) for one in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    found = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread
    left = sum((y - middle_y - found * (x - middle_x)) ** 2 for x, y in points)
    return found, T_95 * math.sqrt(left / (SPANS - 2) / spread)


def _means(samples: Samples) -> list[tuple[float, float]]:
    """Return the mean time and value of each span; raises SystemExit for fewer samples than spans."""
    kept = samples[int(SETTLING * len(samples)) :]
    size = len(kept) // SPANS
    if not size:
        raise SystemExit(f"{len(samples)} samples of memory are too few for a trend: {SPANS} spans are needed")
    spans = [kept[number * size : (number + 1) * size] for number in range(SPANS)]
    return [(statistics.fmean(t for t, _ in span), statistics.fmean(v for _, v in span)) for span in spans]


def memory_row(what: str, samples: Samples) -> Row:
    """Return the row: what the slope is at least, with 95 % confidence, must not be more than nothing."""
    found, half = (value * 3600 / MIB for value in slope(samples))
    sizes = [size / MIB for _, size in _means(samples)]
    text = f"0; slope {found:.3g} ± {half:.2g}, {sizes[0]:.0f} to {sizes[-1]:.0f} MiB after settling"
    return Row(f"{what}: growth of resident memory, at least (95 %)", max(0.0, found - half), 0, "MiB/h", text)
