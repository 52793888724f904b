"""The start report for people: one bar a stage, what ready waited for, weights, budgets, buckets, coverage."""

from collections.abc import Sequence

from app.report_file import Bucket, Budgets, Deciding, Served, Stage, StartReport, Weights
from app.units import bytes_text

WIDTH = 40
# What took less, and could gain less, is not worth a line.
SMALLEST_S = 0.01
NAMED = 5


def render(report: StartReport) -> str:
    """Return the report as text with one bar a stage on a common time axis."""
    end = report.elapsed_s if report.time_to_ready_s is None else report.time_to_ready_s
    head = (
        f"{report.model.name} {report.model.version}: {report.phase} after {end:.2f} s "
        f"(file cache {report.file_cache or 'unknown'}, compile cache {report.compile_cache})"
    )
    sections = [
        [head],
        [_stage_line(stage, end, stage.name in report.critical_path) for stage in report.stages],
        _gain_lines(report.critical),
        [*_weights_lines(report.weights), *_code_lines(report), *_budget_lines(report.budgets)],
        _bucket_lines(report.buckets),
        _coverage_lines(report.coverage, report.uncovered_policy),
        [f"error: {report.error.message}"] if report.error else [],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _stage_line(stage: Stage, end: float, critical: bool) -> str:
    name = f"{'*' if critical else ' '} {stage.name}"
    if stage.start_s is None:
        return f"{name:<19} {'':{WIDTH}} {'':8} {stage.state}"
    detail = f", {stage.detail}" if stage.detail else ""
    return f"{bar(name, stage.start_s, end if stage.end_s is None else stage.end_s, end)} {stage.state}{detail}"


def bar(name: str, start_s: float, end_s: float, axis_s: float) -> str:
    """Return a name, a bar on an axis of so many seconds, and how long it took."""
    took_s = max(0.0, end_s - start_s)
    left = min(WIDTH - 1, int(_cells(start_s, axis_s)))
    long = max(1, round(_cells(took_s, axis_s)))
    drawn = (" " * left + "█" * long)[:WIDTH]
    return f"{name:<19} {drawn:<{WIDTH}} {took_s:6.2f} s"


def _cells(seconds: float, end: float) -> float:
    return min(1.0, seconds / end) * WIDTH if end else 0.0


def _gain_lines(critical: Sequence[Deciding]) -> list[str]:
    """Tell, the most worth first, how much sooner ready could have come."""
    known = [(one, one.at_most_sooner_s) for one in critical if one.at_most_sooner_s is not None]
    shown = sorted((row for row in known if row[0].seconds >= SMALLEST_S), key=lambda row: -row[1])
    if not shown:
        return ["* on the critical path"]
    rows = [f"  {one.stage:<17} {gain:6.2f} s (it took {one.seconds:.2f} s)" for one, gain in shown]
    return ["* on the critical path; had such a stage taken no time, ready would have come sooner by", *rows]


def _weights_lines(weights: Weights) -> list[str]:
    if not weights.bytes_per_s:
        return []
    speed = f"weights: {bytes_text(weights.bytes)} by {weights.mode}, {_rate(weights.bytes_per_s)}"
    if weights.disk_bytes_per_s is not None and weights.disk_ratio is not None:
        speed += f"; from the disk {weights.disk_ratio:.0%} of its best, {_rate(weights.disk_bytes_per_s)}"
    if weights.cached_ratio is not None:
        speed += f"; {weights.cached_ratio:.0%} was in the file cache before"
    return [speed, *(f"  {note}" for note in weights.notes)]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_text(round(bytes_per_s))}/s"


def _code_lines(report: StartReport) -> list[str]:
    code = report.artifacts
    if not code.engine:
        return []
    told = [f"code: engine {code.engine}, {code.outcome}", *([code.why] if code.why else [])]
    differences = [f"  {difference}" for difference in code.differences[:NAMED]]
    more = len(code.differences) - NAMED
    return ["; ".join(told), *differences, *([f"  {more} more differences"] if more > 0 else [])]


def _budget_lines(budgets: Budgets | None) -> list[str]:
    if budgets is None:
        return []
    warmup, staging = budgets.warmup, budgets.staging
    used_s = "nothing yet" if warmup.used_s is None else f"{warmup.used_s:.2f} s"
    limited = "" if warmup.planned_bytes is None else f" of {bytes_text(warmup.planned_bytes)}"
    bucket = "" if warmup.used_bytes is None else f", {bytes_text(warmup.used_bytes)}{limited} for a bucket"
    used = "nothing yet" if staging.used_bytes is None else bytes_text(staging.used_bytes)
    planned = bytes_text(staging.planned_bytes)
    return [f"budgets: warm-up used {used_s} of {warmup.planned_s:g} s{bucket}; staging {used} of {planned}"]


def _bucket_lines(buckets: Sequence[Bucket]) -> list[str]:
    if not buckets:
        return []
    rows = [f"  {'bucket':<28} {'first':>9} {'second':>9} {'steady':>9}  proof"]
    for bucket in buckets:
        times = " ".join(milliseconds(seconds) for seconds in (bucket.first_s, bucket.second_s, bucket.steady_s))
        error = "" if bucket.max_error is None else f", off by {bucket.max_error:.1e}"
        state = f"{bucket.state}: {bucket.why}" if bucket.why else bucket.state
        rows.append(f"  {bucket.name:<28} {times}  {bucket.proof}{error} ({state})")
    return rows


def _coverage_lines(coverage: Sequence[Served], policy: str) -> list[str]:
    rows = [
        f"  {row.shapes:<40} {row.served}, {row.by}{row.engine and f', {row.engine}'}"
        for row in coverage
        if row.served != "exact"
    ]
    return [f"  other shapes (uncovered: {policy})", *rows] if rows else []


def milliseconds(seconds: float | None) -> str:
    """Return a short time in nine columns."""
    return f"{'-':>9}" if seconds is None else f"{seconds * 1e3:6.1f} ms"
