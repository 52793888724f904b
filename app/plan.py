"""The planner: ready time and first-request times for each choice of buckets to warm (pure arithmetic).

A start is stages in time, as in a start report: each begins `delay_s` after the last of those that it needs. A choice
of buckets changes how long two of them take, warm-buckets and prove-answers; everything else stays as it was given or
measured, and the graph is replayed. A first request takes the steady time of its bucket where that was warmed, and
`uncovered_extra_s` more where it was not. All times are in seconds.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.buckets import Bucket, Coverage, Dimension, Route, Sizes

WARM, PROVE = "warm-buckets", "prove-answers"
# Up to so many buckets every subset is a row: 16 rows can be read. Beyond, only the beginnings of the proposed order.
ALL_SUBSETS = 4
# What is shown, and what counts as equal: sums of floats differ in their last digits by the order of their terms.
DIGITS = 6


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """What a bucket costs: its runs before ready and their proof, a run once warm, the extra of a run that is not."""

    name: str
    warm_s: float
    steady_s: float
    uncovered_extra_s: float
    proof_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """By how much warming it can delay ready."""
        return self.warm_s + self.proof_s


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage; `delay_s` from the end of the last stage that it needs, or of nothing, to its own start."""

    name: str
    needs: tuple[str, ...]
    duration_s: float
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """One kind of start; stages stand in an order in which they could run one after another.

    `cache` is hit or miss; `tail_s` is what passes between the end of the last stage and ready.
    """

    cache: str
    stages: tuple[StageTimes, ...]
    buckets: tuple[BucketTimes, ...]
    tail_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is planned: starts with the same buckets, and the share of the covered requests that each bucket has.

    `uncovered_share` is the share of all requests that no bucket covers, None where the requests are not known.
    """

    starts: tuple[Start, ...]
    shares: Mapping[str, float]
    notes: tuple[str, ...] = ()
    uncovered_share: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A stage on the time axis; zero is the start of the process."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One choice of buckets; `beaten_by` is another choice for the same start that is nowhere worse."""

    cache: str
    warmed: tuple[str, ...]
    ready_s: float
    first_request_s: Mapping[str, float]
    expected_first_request_s: float
    worst_first_request_s: float
    beaten_by: tuple[str, ...] = ()

    @property
    def why_not(self) -> str:
        """Why nobody should choose it; empty where somebody may."""
        if not self.warmed:
            return "for comparison: ready needs a warmed bucket"
        if not self.beaten_by:
            return ""
        return f"{' + '.join(self.beaten_by)} is ready no later, its first requests no slower"

    @property
    def merits(self) -> tuple[float, float, float]:
        """What choices are compared by; less is better."""
        return self.ready_s, self.expected_first_request_s, self.worst_first_request_s


def given_start(cache: str, weights_s: float, code_s: float, overlap: bool, buckets: Sequence[BucketTimes]) -> Start:
    """Return a start of given times.

    With overlap the code is built beside the reading; what is restored comes after it, on one disk and one device.
    """
    code = "build" if cache == "miss" else "restore"
    stages = (
        StageTimes("weights", (), weights_s),
        StageTimes(code, () if overlap and cache == "miss" else ("weights",), code_s),
        StageTimes(WARM, ("weights", code), 0.0),
    )
    return Start(cache, stages, tuple(buckets))


def replay(start: Start, warmed: Sequence[str]) -> tuple[Placed, ...]:
    """Return when each stage begins and ends if just these buckets are warmed."""
    names = frozenset(warmed)
    chosen = [bucket for bucket in start.buckets if bucket.name in names]
    changed = {
        WARM: math.fsum(bucket.warm_s for bucket in chosen),
        PROVE: math.fsum(bucket.proof_s for bucket in chosen),
    }
    placed: dict[str, Placed] = {}
    for one in start.stages:
        began = max((placed[name].end_s for name in one.needs), default=0.0) + one.delay_s
        placed[one.name] = Placed(one.name, began, began + changed.get(one.name, one.duration_s))
    return tuple(placed.values())


def ready_s(start: Start, warmed: Sequence[str]) -> float:
    """Return when the server is ready if just these buckets are warmed."""
    return max(one.end_s for one in replay(start, warmed)) + start.tail_s


def gains(plan: Plan) -> dict[str, float]:
    """Return the proposed order of warming, with what a second of warm-up takes off the expected first request.

    share * extra / cost, over all planned starts; the greatest first, and equal ones as they were given.
    """
    found = {}
    for name, share in plan.shares.items():
        buckets = [bucket for start in plan.starts for bucket in start.buckets if bucket.name == name]
        saved = share * math.fsum(bucket.uncovered_extra_s for bucket in buckets)
        cost = math.fsum(bucket.cost_s for bucket in buckets)
        found[name] = saved / cost if cost else math.inf if saved else 0.0
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def choices(order: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the choices worth showing, nothing warmed first and everything last."""
    for size in range(len(order) + 1):
        if len(order) <= ALL_SUBSETS:
            yield from itertools.combinations(order, size)
        else:
            yield tuple(order[:size])


def rows(plan: Plan) -> tuple[Row, ...]:
    """Return every choice for every start, each judged against the others of its start."""
    order = tuple(gains(plan))
    found: list[Row] = []
    for start in plan.starts:
        mine = [_row(start, warmed, plan.shares) for warmed in choices(order)]
        found += [replace(row, beaten_by=_beaten_by(row, mine)) for row in mine]
    return tuple(found)


def _row(start: Start, warmed: tuple[str, ...], shares: Mapping[str, float]) -> Row:
    names = frozenset(warmed)
    first = {b.name: b.steady_s + (0.0 if b.name in names else b.uncovered_extra_s) for b in start.buckets}
    return Row(
        start.cache,
        warmed,
        round(ready_s(start, warmed), DIGITS),
        {name: round(seconds, DIGITS) for name, seconds in first.items()},
        round(math.fsum(shares[name] * seconds for name, seconds in first.items()), DIGITS),
        round(max(first.values()), DIGITS),
    )


def _beaten_by(row: Row, others: Sequence[Row]) -> tuple[str, ...]:
    better = [
        other
        for other in others
        if other.warmed
        and other.merits != row.merits
        and all(theirs <= mine for theirs, mine in zip(other.merits, row.merits, strict=True))
    ]
    return min(better, key=lambda other: other.merits).warmed if better else ()


def attribute(names: Sequence[str], requests: Sequence[tuple[str, Sizes, int]]) -> tuple[dict[str, float], float]:
    """Return the share of the covered requests that each bucket has, and the share of all that none covers.

    `requests` are the path and the sizes of each, with its count. Each goes to the smallest bucket that holds it, as in
    the server. Raises ValueError where a name is no bucket's, the buckets of a path have different dimensions, or none
    covers anything.
    """
    buckets = {Bucket.named(name): name for name in names}
    coverages = {path: _coverage(path, list(buckets)) for path, _, _ in requests}
    counts = dict.fromkeys(names, 0)
    for path, sizes, count in requests:
        route = coverages[path].route(sizes)
        if isinstance(route, Route) and route.bucket:
            counts[buckets[route.bucket]] += count
    covered, total = sum(counts.values()), sum(count for _, _, count in requests)
    if not covered:
        raise ValueError("no bucket covers any of the requests")
    return {name: count / covered for name, count in counts.items()}, 1 - covered / total


def _coverage(path: str, buckets: Sequence[Bucket]) -> Coverage:
    """Return the coverage of a path; what its whole range is does not matter here."""
    own = tuple(bucket for bucket in buckets if bucket.path == path)
    dimensions = {tuple(dimension for dimension, _ in bucket.sizes) for bucket in own}
    if len(dimensions) > 1:
        raise ValueError("the buckets have different dimensions")
    ranges = tuple(Dimension(name, 1, sys.maxsize, ()) for names in dimensions for name in names)
    return Coverage(ranges, own, dynamic=True, policy="pad", path=path)


def document(plan: Plan) -> dict[str, Any]:
    """Return the answer as JSON has it."""
    return {
        "rows": [
            {
                "cache": row.cache,
                "warmed": list(row.warmed),
                "ready_s": row.ready_s,
                "first_request_s": dict(row.first_request_s),
                "expected_first_request_s": row.expected_first_request_s,
                "worst_first_request_s": row.worst_first_request_s,
                "advised": not row.why_not,
                "why": row.why_not,
            }
            for row in rows(plan)
        ],
        "order": list(gains(plan)),
        "shares": {name: round(share, DIGITS) for name, share in plan.shares.items()},
        "uncovered_share": plan.uncovered_share,
        "notes": list(plan.notes),
    }
