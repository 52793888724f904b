"""The gate in front of inference: closed until start-up has finished, closed again once draining is over."""

from collections.abc import Callable
from dataclasses import dataclass

from app.servable import Rejected, Servable
from app.startup import StageView


@dataclass(frozen=True, slots=True)
class Gate:
    """Lets a request through to the servable, or says why not; requests are never parked.

    `missing`: stages that have not finished. `engine_down`, `closed`: reason or None.
    """

    servable: Callable[[], Servable | None]
    missing: Callable[[], tuple[StageView, ...]]
    engine_down: Callable[[], str | None]
    closed: Callable[[], str | None]

    def why_not(self) -> tuple[str, str] | None:
        """Return the metric's label and the reason in words, or None when the gate is open."""
        if reason := self.closed():
            return "draining", reason
        if missing := self.missing():
            first = next((view for view in missing if view.state in {"failed", "running"}), missing[0])
            return "not_ready", f"starting: {first.name} {first.reason}"
        if reason := self.engine_down():
            return "not_ready", f"engine: {reason}"
        return None if self.servable() else ("not_ready", "starting")

    def enter(self) -> Servable:
        """Return the servable; raises Rejected (503) with the reason."""
        if refused := self.why_not():
            raise Rejected(503, refused[1], refused[0])
        servable = self.servable()
        if servable is None:
            raise Rejected(503, "starting", "not_ready")
        return servable
