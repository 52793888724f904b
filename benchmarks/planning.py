"""The planner against the machine: what it says from one cold and one warm report, and the starts that follow."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from app import plan_file
from app.plan import Row as Choice
from app.plan import rows
from benchmarks.process import KUBELET_S, Sidecar
from benchmarks.table import Row

WITHIN = 0.10
HITS = 3


def measure_plan(directory: Path) -> Iterator[Row]:
    """Yield the rows: for each prediction, how far the next real start was from it."""
    cold, warm = (_report(directory / "store", directory / f"{name}.json") for name in ("cold", "warm"))
    choices = rows(plan_file.read([cold, warm]))
    every = max((choice.warmed for choice in choices), key=len)
    yield from _hit_rows(directory, _chosen(choices, "hit", every))
    yield from _hit_rows(directory, _chosen(choices, "hit", every[:1]))
    yield _row(_chosen(choices, "miss", every), [_ready_s(directory / "other", directory / "next.json")])


def _hit_rows(directory: Path, choice: Choice) -> Iterator[Row]:
    """Start with the buckets of the choice; the code is for the whole range, so fewer buckets find it, too."""
    buckets = [dict(part.split("=") for part in name.split(",")) for name in choice.warmed]
    listed = json.dumps([{name: int(size) for name, size in bucket.items()} for bucket in buckets])
    took = [
        _ready_s(directory / "store", directory / "next.json", f"warmup.buckets={listed}", cache="warm")
        for _ in range(HITS)
    ]
    yield _row(choice, took)


def _chosen(choices: Sequence[Choice], cache: str, warmed: tuple[str, ...]) -> Choice:
    return next(choice for choice in choices if choice.cache == cache and set(choice.warmed) == set(warmed))


def _row(choice: Choice, took: Sequence[float]) -> Row:
    next_s, *others = took
    off = abs(choice.ready_s - next_s) / next_s
    told = f"{next_s:.3g}" + "".join(f", later {seconds:.3g}" for seconds in others)
    what = f"{choice.cache}, {len(choice.warmed)} bucket(s): the prediction is off by"
    return Row(
        what, off, WITHIN, "", f"{WITHIN:.0%} of the next real start; {choice.ready_s:.3g} s said, {told} s took"
    )


def _report(store: Path, file: Path) -> Path:
    _ready_s(store, file)
    return file


def _ready_s(store: Path, file: Path, *assignments: str, cache: str | None = None) -> float:
    """Start once and return when it was ready by its own clock, as its report tells."""
    with Sidecar(store, *assignments, f"report.file={file}") as sidecar:
        sidecar.wait(every_s=KUBELET_S)
        report = sidecar.status()
    if cache is not None and report["compile_cache"] != cache:
        raise SystemExit(f"not a {cache} start: {report['artifacts']}")
    return float(report["time_to_ready_s"])
