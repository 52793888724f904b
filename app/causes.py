"""What two start reports know of why they differ: each fact in words, and what it can explain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.report_file import Bucket, StartReport
from app.units import bytes_text

# Not a stage: how fast the buckets run once they are warm.
STEADY = "steady"
NAMED = 3
NOTHING = "nothing"
# From the fastest to the slowest.
FILE_CACHES = ("warm", "mixed", "cold")


@dataclass(frozen=True, slots=True)
class Fact:
    """One difference between two starts in words, and the stages (or the steady speed) that it can explain.

    `longer`: 1 where it can only make them take longer, -1 where only shorter, 0 where either.
    """

    text: str
    explains: frozenset[str]
    longer: int = 0

    def fits(self, name: str, later_s: float) -> bool:
        """It can explain that this stage took so much longer (negative: shorter)."""
        return name in self.explains and self.longer * later_s >= 0


def facts(one: StartReport, two: StartReport) -> tuple[Fact, ...]:
    """Return how the second start differs from the first, as far as the reports know."""
    sources = (_model, _code, _files, _weights, _buckets, _budgets, _machine)
    return tuple(
        Fact(text, frozenset(explains.split()), longer)
        for source in sources
        for text, explains, longer in source(one, two)
    )


Rows = Iterator[tuple[str, str, int]]


def _model(one: StartReport, two: StartReport) -> Rows:
    if one.model.name != two.model.name:
        yield f"model {two.model.name} instead of {one.model.name}", "", 0
    if one.model.version != two.model.version:
        yield f"model version {two.model.version} instead of {one.model.version}", "", 0


def _code(one: StartReport, two: StartReport) -> Rows:
    before, after = one.compile_cache, two.compile_cache
    explained = "build-artifact compute-reference build-skeleton bind-engine"
    if after == "cold" != before:
        yield f"code was compiled{_why_compiled(two)}", explained, 1
    elif before == "cold" != after:
        yield "code was restored" if after == "warm" else "no code was compiled", explained, -1
    elif before != after:
        yield f"compile cache {after} instead of {before}", explained, 0
    if one.artifacts.engine != two.artifacts.engine:
        engines = f"engine {two.artifacts.engine or 'none'} instead of {one.artifacts.engine or 'none'}"
        why = f": {two.artifacts.why}" if two.artifacts.why else ""
        yield engines + why, f"{explained} warm-buckets {STEADY}", 0


def _why_compiled(report: StartReport) -> str:
    """Return what kept stored code from being used: how it differed, else what the look-up said."""
    if report.artifacts.differences:
        return f": {listed(report.artifacts.differences)}"
    look_up = report.stage("find-artifact")
    return f": {look_up.detail}" if look_up and look_up.detail else ""


def _files(one: StartReport, two: StartReport) -> Rows:
    before, after = one.weights.cached_ratio, two.weights.cached_ratio
    if one.file_cache == two.file_cache:
        return
    words = f"files {two.file_cache or 'unknown'} instead of {one.file_cache or 'unknown'}"
    cached = "" if before is None or after is None else f", {after:.0%} cached instead of {before:.0%}"
    ranks = [FILE_CACHES.index(word) for word in (one.file_cache, two.file_cache) if word in FILE_CACHES]
    longer = 0 if len(ranks) < 2 else 1 if ranks[1] > ranks[0] else -1
    yield words + cached, "open-checkpoint read-weights install-weights", longer


def _weights(one: StartReport, two: StartReport) -> Rows:
    before, after = one.weights, two.weights
    if before.bytes != after.bytes:
        sizes = f"{bytes_text(after.bytes)} of weights instead of {bytes_text(before.bytes)}"
        explained = f"read-weights install-weights compute-reference warm-buckets {STEADY}"
        yield sizes, explained, 1 if after.bytes > before.bytes else -1
    elif before.fingerprint != after.fingerprint and before.fingerprint and after.fingerprint:
        yield "other weights", "compute-reference prove-answers", 0
    if before.mode != after.mode and before.mode and after.mode:
        yield f"weights by {after.mode} instead of {before.mode}", "read-weights install-weights", 0


def _buckets(one: StartReport, two: StartReport) -> Rows:
    explained = "warm-buckets prove-answers compute-reference"
    before, after = ({bucket.name: bucket for bucket in report.buckets} for report in (one, two))
    if more := [name for name in after if name not in before]:
        yield f"{_number(more)} more: {listed(more)}", explained, 1
    if fewer := [name for name in before if name not in after]:
        yield f"{_number(fewer)} fewer: {listed(fewer)}", explained, -1
    for name in after:
        if name in before and before[name].state != after[name].state:
            yield f"bucket {name} {_state(after[name])} instead of {before[name].state}", explained, 0


def _budgets(one: StartReport, two: StartReport) -> Rows:
    if one.budgets is None or two.budgets is None:
        return
    old, new = one.budgets.warmup, two.budgets.warmup
    if old.planned_s != new.planned_s:
        yield f"warmup.budget_s {new.planned_s:g} instead of {old.planned_s:g}", "warm-buckets", 0
    if old.planned_bytes != new.planned_bytes:
        planned = new.planned_bytes, old.planned_bytes
        limits = ["none" if limit is None else bytes_text(limit) for limit in planned]
        yield f"warmup.budget_bytes {' instead of '.join(limits)}", "warm-buckets", 0


def _machine(one: StartReport, two: StartReport) -> Rows:
    stages = [report.stage("import-runtime") for report in (one, two)]
    runtimes = [stage.detail if stage else "" for stage in stages]
    if runtimes[0] != runtimes[1] and all(runtimes):
        yield f"{runtimes[1]} instead of {runtimes[0]}", f"import-runtime warm-buckets {STEADY}", 0
    explained = f"import-runtime warm-buckets build-artifact compute-reference {STEADY}"
    if one.device.name != two.device.name:
        yield f"device {two.device.name or NOTHING} instead of {one.device.name or NOTHING}", explained, 0
    if one.device.fingerprint != two.device.fingerprint and one.device.fingerprint and two.device.fingerprint:
        yield _fingerprints(one.device.fingerprint, two.device.fingerprint), explained, 0


def _fingerprints(one: str, two: str) -> str:
    before, after = one.split(), two.split()
    added = [part for part in after if part not in before]
    lost = [part for part in before if part not in after]
    return f"device {listed(added) or NOTHING} instead of {listed(lost) or NOTHING}"


def _state(bucket: Bucket) -> str:
    return f"{bucket.state} ({bucket.why})" if bucket.why else bucket.state


def _number(names: Sequence[str]) -> str:
    return "1 bucket" if len(names) == 1 else f"{len(names)} buckets"


def listed(names: Sequence[str]) -> str:
    """Return the first of the names, and how many there are besides."""
    more = len(names) - NAMED
    return ", ".join([*names[:NAMED], *([f"{more} more"] if more > 0 else [])])
