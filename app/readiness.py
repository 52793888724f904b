"""Readiness as a conjunction of named reasons, and the drain that ends it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.startup import Clock

Reason = Callable[[], str | None]


def _unknown() -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """One condition: `why_not` answers from the state of the thing itself, at once, with None or the reason."""

    name: str
    why_not: Reason
    progress: Callable[[], float | None] = _unknown


@dataclass(frozen=True, slots=True)
class Result:
    """What one check said."""

    name: str
    reason: str | None
    progress: float | None
    excluded: bool = False

    @property
    def ok(self) -> bool:
        """The condition holds."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks at one moment."""

    results: tuple[Result, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Every check that counts holds."""
        return all(result.ok or result.excluded for result in self.results)

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons against, by check."""
        return {r.name: r.reason for r in self.results if r.reason is not None and not r.excluded}


class Readiness:
    """A fixed, non-empty set of checks; nothing to check would mean nothing is known, not that all is well."""

    def __init__(self, *checks: Check) -> None:
        if not checks:
            raise ValueError("readiness needs at least one check: with none it would hold vacuously")
        self.checks = {check.name: check for check in checks}

    def verdict(self, exclude: Iterable[str] = ()) -> Verdict:
        """Ask every check once."""
        left_out = frozenset(exclude)
        results = tuple(
            Result(check.name, check.why_not(), check.progress(), check.name in left_out)
            for check in self.checks.values()
        )
        return Verdict(results, tuple(sorted(left_out - self.checks.keys())))


class Drain:
    """The way out: not begun, or begun at a moment with a reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began_s: float | None = None

    def begin(self) -> bool:
        """Start draining; answers whether this call was the first."""
        if self.began_s is not None:
            return False
        self.began_s = self._clock()
        return True

    @property
    def begun(self) -> bool:
        """The process is leaving."""
        return self.began_s is not None

    def why_not(self) -> str | None:
        """Reason for the `shutdown` check."""
        return None if self.began_s is None else f"draining for {self._clock() - self.began_s:.1f} s"
