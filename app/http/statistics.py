"""What load tools ask a server of this protocol: how many inferences, in how many runs, and where their time went."""

import time
from collections.abc import Callable
from typing import Any

from app.http.infer import Spent

Row = dict[str, Any]


class Statistics:
    """Counts since the start, told as the statistics extension of the protocol has them; for the event loop alone."""

    def __init__(self, runs: Callable[[], int]) -> None:
        """Make it; `runs`: how many batches have been run."""
        self._runs = runs
        self._items, self._last_ms = 0, 0
        self._success, self._fail = _Duration(), _Duration()
        self._parts = {name: _Duration() for name in ("queue", "compute_input", "compute_infer", "compute_output")}

    def note(self, status: int, total_s: float, spent: Spent | None) -> None:
        """Count one request that has ended."""
        if status != 200 or spent is None:
            self._fail.add(total_s)
            return
        self._last_ms = time.time_ns() // 1_000_000
        self._items += spent.items
        self._success.add(total_s)
        parts = (spent.queue_s, spent.decode_s, spent.compute_s, spent.encode_s)
        for part, seconds in zip(self._parts.values(), parts, strict=True):
            part.add(seconds)

    def document(self, model: str, version: str) -> Row:
        """Return the answer; what this server has none of (caches of answers) is counted as 0."""
        none = _Duration().row()
        parts = {name: part.row() for name, part in self._parts.items()}
        row = {
            "name": model,
            "version": version,
            "last_inference": self._last_ms,
            "inference_count": self._items,
            "execution_count": self._runs(),
            "inference_stats": {
                "success": self._success.row(),
                "fail": self._fail.row(),
                **parts,
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [],
        }
        return {"model_stats": [row]}


class _Duration:
    def __init__(self) -> None:
        self._count, self._seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        self._seconds += seconds

    def row(self) -> Row:
        return {"count": self._count, "ns": round(self._seconds * 1e9)}
