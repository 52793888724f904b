"""The start report as a document: critical path, text for people, comparison of two starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import SettingsError
from app.startup import StageView

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What warm-up and proof measured for one bucket; times in seconds.

    `state` is waiting, warm, failed or skipped; `proof` is golden, reference or none; `max_error` is the largest
    absolute difference from what it was compared with. `peak_bytes` and `kept_bytes`: host memory beyond what was
    resident before its first run, the most at any moment and what its last run left. `graphs`: traced for it by this
    process.
    """

    name: str
    required: bool
    state: str = "waiting"
    first_s: float | None = None
    second_s: float | None = None
    steady_s: float | None = None
    proof: str = "none"
    max_error: float | None = None
    graph: str = "none"
    why: str = ""
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    graphs: int = 0


def read(file: Path) -> dict[str, Any]:
    """Return the start report that a file holds; raises SettingsError where it holds none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file} cannot be read as a start report: {error}") from error
    if not isinstance(found, dict) or "stages" not in found:
        raise SettingsError(f"{file} is no start report: it has no stages; `curl …/status` or report.file writes one")
    return found


def critical_path(stages: Sequence[StageView]) -> tuple[str, ...]:
    """Return the chain of stages that decided when the last one ended.

    A stage was held up by whichever ended last: one that it needs, or the one before it on a lane that runs a single
    stage at a time.
    """
    ended = {one.name: one for one in stages if one.end_s is not None and one.start_s is not None}
    if not ended:
        return ()
    path = [max(ended.values(), key=lambda one: one.end_s or 0.0)]
    while held := _held_by(path[-1], {name: one for name, one in ended.items() if one not in path}):
        path.append(held)
    return tuple(one.name for one in reversed(path))


def _held_by(one: StageView, ended: Mapping[str, StageView]) -> StageView | None:
    start = one.start_s or 0.0
    earlier = [e for e in ended.values() if (e.end_s or 0.0) <= start and e.name != one.name]
    held = [e for e in earlier if e.name in one.needs or (e.lane == one.lane == "device")]
    return max(held, key=lambda e: e.end_s or 0.0, default=None)


def render(report: Report) -> str:
    """Return the report as text with one bar a stage on a common time axis."""
    end = report["time_to_ready_s"] or report["elapsed_s"]
    critical = set(report["critical_path"])
    lines = [
        f"{report['model']['name']} {report['model']['version']}: {report['phase']} after {end:.2f} s "
        f"(file cache {report['file_cache']}, compile cache {report['compile_cache']})",
        "",
    ]
    lines += [bar(stage, end, stage["name"] in critical) for stage in report["stages"]]
    lines += ["", "* on the critical path"]
    lines += _bucket_lines(report["buckets"])
    if report["error"]:
        lines += ["", f"error: {report['error']['message']}"]
    return "\n".join(lines)


def bar(stage: Mapping[str, Any], end: float, critical: bool, width: int = 40) -> str:
    """Return one stage as a line: name, bar on an axis of `end` seconds, how long it took, state."""
    start, stop = stage["start_s"], stage["end_s"]
    name = f"{'*' if critical else ' '} {stage['name']:<17}"
    if start is None:
        return f"{name} {'':{width}} {'':8} {stage['state']}"
    stop = end if stop is None else stop
    left = min(width - 1, int(start / end * width)) if end else 0
    long = max(1, round((stop - start) / end * width)) if end else 1
    drawn = (" " * left + "█" * long)[:width]
    detail = f", {stage['detail']}" if stage["detail"] else ""
    return f"{name} {drawn:<{width}} {stop - start:6.2f} s {stage['state']}{detail}"


def _bucket_lines(buckets: Sequence[Mapping[str, Any]]) -> list[str]:
    if not buckets:
        return []
    rows = [f"  {'bucket':<28} {'first':>9} {'second':>9} {'steady':>9}  proof"]
    for bucket in buckets:
        times = " ".join(_milliseconds(bucket[k]) for k in ("first_s", "second_s", "steady_s"))
        error = "" if bucket["max_error"] is None else f", off by {bucket['max_error']:.1e}"
        rows.append(f"  {bucket['name']:<28} {times}  {bucket['proof']}{error} ({bucket['state']})")
    return ["", *rows]


def _milliseconds(seconds: float | None) -> str:
    return f"{'-':>9}" if seconds is None else f"{seconds * 1e3:6.1f} ms"


def compare(one: Report, two: Report) -> str:
    """Return two starts side by side, stage by stage, with the ratio of the second to the first."""
    lines = [f"{'':<17} {'first':>9} {'second':>9} {'ratio':>7}"]
    lines.append(_pair("ready", one["time_to_ready_s"], two["time_to_ready_s"]))
    mine, theirs = ({s["name"]: _seconds(s) for s in report["stages"]} for report in (one, two))
    lines += [_pair(name, mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])]
    caches = [f"{r['file_cache']} files, {r['compile_cache']} code" for r in (one, two)]
    return "\n".join([*lines, "", f"caches: {caches[0]} → {caches[1]}"])


def _seconds(stage: Mapping[str, Any]) -> float | None:
    return None if stage["end_s"] is None or stage["start_s"] is None else stage["end_s"] - stage["start_s"]


def _pair(name: str, one: float | None, two: float | None) -> str:
    def text(value: float | None) -> str:
        return f"{'-':>9}" if value is None else f"{value:7.2f} s"

    ratio = f"{two / one:6.2f}x" if one and two else f"{'-':>7}"
    return f"{name:<17} {text(one)} {text(two)} {ratio}"
