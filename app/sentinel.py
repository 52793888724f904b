"""Counts compilations after ready: nothing may compile in a request, and if it happens it is seen."""

import logging
import sys
from collections.abc import Mapping

from app.errors import printable
from app.servable import Array

log = logging.getLogger("warmgate.sentinel")

_LONGEST_REASON = 200


class LateCompiles:
    """Graphs that Dynamo compiled since `arm` was called; Dynamo that was never imported has compiled none."""

    def __init__(self) -> None:
        self._before = 0
        self._noted = 0
        self._armed = False
        self._last = ""

    def arm(self) -> None:
        """Count from now on."""
        self._before = self._noted = graphs_traced()
        self._armed, self._last = True, ""

    @property
    def count(self) -> int:
        """Compilations since ready."""
        return graphs_traced() - self._before if self._armed else 0

    def note(self, arrays: Mapping[str, Array]) -> None:
        """Log what a run on these inputs has compiled, and why, with their shapes; call it after every run.

        The guard goes to the log alone: it may name a number that was computed from a request, and probes are public.
        """
        if self._armed and (now := graphs_traced()) != self._noted:
            count, self._noted = now - self._noted, now
            self._last = f"for {', '.join(f'{name} {list(array.shape)}' for name, array in arrays.items())}"
            log.warning("%d graph(s) compiled after ready %s: %s", count, self._last, _guard_that_failed())

    def why_not(self, policy: str) -> str | None:
        """Reason for the `late-compile` check."""
        if policy != "degrade" or not self.count:
            return None
        return f"{self.count} compilation(s) after ready{', the last ' if self._last else ''}{self._last}"


def graphs_traced() -> int:
    """Return how many graphs Dynamo has traced in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def _guard_that_failed() -> str:
    """Return Dynamo's reason for its last compilation: the guard that did not hold."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    try:
        metrics = dynamo.get_compilation_metrics()[-1]  # type: ignore[union-attr]
        reason = metrics.recompile_reason or "a frame that was never compiled before"
        return printable(f"{metrics.co_name}: {reason}".splitlines()[0][:_LONGEST_REASON])
    except (AttributeError, IndexError):
        return "this version of torch does not tell why"
