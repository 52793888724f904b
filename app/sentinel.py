"""Counts compilations after ready: nothing may compile in a request, and if it happens it is seen."""

import sys


class LateCompiles:
    """Graphs that Dynamo compiled since `arm` was called; Dynamo that was never imported has compiled none."""

    def __init__(self) -> None:
        self._before = 0
        self._armed = False

    def arm(self) -> None:
        """Count from now on."""
        self._before, self._armed = _graphs(), True

    @property
    def count(self) -> int:
        """Compilations since ready."""
        return _graphs() - self._before if self._armed else 0

    def why_not(self, policy: str) -> str | None:
        """Reason for the `late-compile` check."""
        return f"{self.count} compilation(s) after ready" if policy == "degrade" and self.count else None


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0
