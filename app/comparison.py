"""Compare two starts: where the time to ready went, in words, and apart from it how fast the buckets run since."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.causes import STEADY, Fact, facts
from app.report_file import Stage, StartReport
from app.report_text import milliseconds

# A change of ready below both is noise; a stage is named from the same time on.
NOISE_S = 0.05
NOISE = 0.01
STEADY_CHANGE = 0.1
BETWEEN = "between stages"
# What is shorter is shown as 0.00 s.
SHOWN_S = 0.005

# A name, and seconds in the first and in the second start.
Pair = tuple[str, float | None, float | None]


@dataclass(frozen=True, slots=True)
class Change:
    """One stage in two starts; times in seconds, None where it did not run to its end.

    `later_s`: how much later ready came through it: the difference of what it took on the critical path of each.
    """

    stage: str
    one_s: float | None
    two_s: float | None
    critical: tuple[bool, bool]
    later_s: float

    @property
    def longer_s(self) -> float:
        """How much longer it took, wherever it ran."""
        return (self.two_s or 0.0) - (self.one_s or 0.0)


def compare(one: StartReport, two: StartReport) -> str:
    """Return two starts compared: preparation and steady speed apart, each with what has changed first."""
    known = facts(one, two)
    sections = [
        ["preparation (time to ready)", *_preparation(one, two, known)],
        _stage_table(one, two),
        ["steady speed", *_steady(one, two, known)],
        _bucket_table(one, two),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def document(one: StartReport, two: StartReport) -> dict[str, Any]:
    """Return the same as JSON has it; `later_s` is null unless both starts became ready."""
    known, ready = facts(one, two), (one.time_to_ready_s, two.time_to_ready_s)
    steady = {bucket.name: bucket.steady_s for bucket in one.buckets}
    return {
        "time_to_ready_s": list(ready),
        "later_s": None if ready[0] is None or ready[1] is None else ready[1] - ready[0],
        "stages": [
            {
                "name": row.stage,
                "seconds": [row.one_s, row.two_s],
                "critical": list(row.critical),
                "later_s": row.later_s,
                "because": [fact.text for fact in known if fact.fits(row.stage, row.later_s or row.longer_s)],
            }
            for row in changes(one, two)
        ],
        "buckets": [{"name": b.name, "steady_s": [steady.get(b.name), b.steady_s]} for b in two.buckets],
        "differences": [fact.text for fact in known],
    }


def changes(one: StartReport, two: StartReport) -> list[Change]:
    """Return every stage of both starts, and the time between them; what made ready later stands first.

    Where both became ready, `later_s` of all together is the difference of their times to ready.
    """
    mine, theirs = ({stage.name: stage for stage in report.stages} for report in (one, two))
    found = [_change(name, one, two, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])]
    if one.time_to_ready_s is not None and two.time_to_ready_s is not None:
        gaps = [
            ready - sum(stage.seconds or 0.0 for stage in stages.values() if stage.name in report.critical_path)
            for ready, stages, report in ((one.time_to_ready_s, mine, one), (two.time_to_ready_s, theirs, two))
        ]
        found.append(Change(BETWEEN, gaps[0], gaps[1], (True, True), gaps[1] - gaps[0]))
    return sorted(found, key=lambda change: -abs(change.later_s))


def _change(name: str, one: StartReport, two: StartReport, before: Stage | None, after: Stage | None) -> Change:
    critical = name in one.critical_path, name in two.critical_path
    seconds = [stage.seconds if stage else None for stage in (before, after)]
    on_path = [(took or 0.0) if counts else 0.0 for took, counts in zip(seconds, critical, strict=True)]
    return Change(name, seconds[0], seconds[1], critical, on_path[1] - on_path[0])


def _preparation(one: StartReport, two: StartReport, known: Sequence[Fact]) -> Iterator[str]:
    rows, because = changes(one, two), _Causes(known)
    if one.time_to_ready_s is None or two.time_to_ready_s is None:
        yield from _never_ready(one, two)
        yield from (f"  {_took(row)}{because(row.stage, row.longer_s)}" for row in rows if _differs(row))
    else:
        later_s = two.time_to_ready_s - one.time_to_ready_s
        yield _headline(one.time_to_ready_s, two.time_to_ready_s)
        named = [row for row in rows if abs(row.later_s) >= max(NOISE_S, NOISE * abs(later_s))]
        yield from (f"  {row.later_s:+7.2f} s  {_told(row)}{because(row.stage, row.later_s)}" for row in named)
        rest_s = later_s - sum(row.later_s for row in named)
        if abs(rest_s) >= NOISE_S:
            yield f"  {rest_s:+7.2f} s  all else together"
        beside = [row for row in rows if not any(row.critical) and _differs(row)]
        yield from (f"  beside the critical path: {_took(row)}{because(row.stage, row.longer_s)}" for row in beside)
    if rest := because.untold():
        yield f"  also different: {'; '.join(rest)}"


class _Causes:
    """The facts as they are told: each in full once, then by its first words."""

    def __init__(self, known: Sequence[Fact]) -> None:
        self._known = known
        self._told: set[Fact] = set()

    def __call__(self, name: str, longer_s: float) -> str:
        """Return in parentheses what explains that this took so much longer."""
        causes = [fact for fact in self._known if fact.fits(name, longer_s)]
        texts = [fact.text.partition(":")[0] if fact in self._told else fact.text for fact in causes]
        self._told.update(causes)
        return f" ({'; '.join(texts)})" if texts else ""

    def untold(self) -> list[str]:
        """Return the facts that explained nothing so far."""
        return [fact.text for fact in self._known if fact not in self._told]


def _headline(one_s: float, two_s: float) -> str:
    later = two_s - one_s
    told = f"{two_s:.2f} s instead of {one_s:.2f} s"
    if abs(later) < NOISE_S:
        return f"ready at the same time: {told}"
    return f"ready {abs(later):.2f} s {'later' if later > 0 else 'sooner'}: {told}"


def _never_ready(one: StartReport, two: StartReport) -> Iterator[str]:
    for word, report in (("first", one), ("second", two)):
        if report.time_to_ready_s is None:
            where = f" in {report.error.stage}" if report.error and report.error.stage else ""
            why = f": {report.error.message.splitlines()[0]}" if report.error and report.error.message else ""
            yield f"the {word} start was not ready, but {report.phase}{where}{why}"


def _told(change: Change) -> str:
    """Say so where the stage ran beside the critical path in one of the starts: its times do not explain all."""
    aside_s = change.one_s if not change.critical[0] else change.two_s if not change.critical[1] else None
    if (aside_s or 0.0) < NOISE_S:
        return _took(change)
    return f"{_took(change)}, {'on the critical path now' if change.critical[1] else 'off the critical path now'}"


def _took(change: Change) -> str:
    one, two = (("no end" if took is None else f"{took:.2f} s") for took in (change.one_s, change.two_s))
    return f"{change.stage} {two} instead of {one}"


def _differs(change: Change) -> bool:
    """Tell whether a stage took notably longer or shorter, or ended in one of the starts only."""
    if change.one_s is None or change.two_s is None:
        return change.one_s is not change.two_s
    return abs(change.longer_s) >= max(NOISE_S, STEADY_CHANGE * change.one_s)


def _steady(one: StartReport, two: StartReport, known: Sequence[Fact]) -> Iterator[str]:
    before = {bucket.name: bucket.steady_s for bucket in one.buckets}
    because = _Causes(known)
    changed = 0
    for bucket in two.buckets:
        old, new = before.get(bucket.name), bucket.steady_s
        if old and new and abs(new - old) > STEADY_CHANGE * old:
            changed += 1
            word = "slower" if new > old else "faster"
            share = abs(new - old) / old
            told = f"{milliseconds(new).strip()} instead of {milliseconds(old).strip()}"
            yield f"  {bucket.name} is {share:.0%} {word}: {told}{because(STEADY, new - old)}"
    if not changed:
        yield f"  no bucket changed by more than {STEADY_CHANGE:.0%}"


def _stage_table(one: StartReport, two: StartReport) -> list[str]:
    mine, theirs = ({stage.name: stage.seconds for stage in report.stages} for report in (one, two))
    rows = [
        ("ready", one.time_to_ready_s, two.time_to_ready_s),
        *((name, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])),
    ]
    return _table(rows, _seconds, SHOWN_S)


def _bucket_table(one: StartReport, two: StartReport) -> list[str]:
    mine, theirs = ({bucket.name: bucket.steady_s for bucket in report.buckets} for report in (one, two))
    names = dict.fromkeys([*mine, *theirs])
    return _table([(name, mine.get(name), theirs.get(name)) for name in names], milliseconds, 0.0) if names else []


def _table(rows: Sequence[Pair], text: Callable[[float | None], str], least: float) -> list[str]:
    """Return named pairs of seconds with their ratio, except where the first is below `least`: shown as nothing."""
    width = max(17, *(len(name) for name, _, _ in rows))
    lines = [f"{'':<{width}} {'first':>9} {'second':>9} {'ratio':>7}"]
    for name, one, two in rows:
        ratio = f"{two / one:6.2f}x" if one and two and one >= least else f"{'-':>7}"
        lines.append(f"{name:<{width}} {text(one)} {text(two)} {ratio}")
    return lines


def _seconds(seconds: float | None) -> str:
    return f"{'-':>9}" if seconds is None else f"{seconds:7.2f} s"
