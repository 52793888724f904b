"""`make bench`: tables of measured figures, their bounds, and the ratio of both (1.00 or less holds).

`python -m benchmarks PART…` runs some parts alone: weights, artifacts, start, promise, plan, recovery, serving; or one
of serving's: serving-tiny, serving-batches, serving-mixed, serving-binary, serving-overload, serving-rolling,
serving-soak.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from app import report_file
from app.comparison import compare
from app.report_text import render
from benchmarks.artifacts import measure_artifacts
from benchmarks.loading import make_files
from benchmarks.mixed import measure_mixed
from benchmarks.overload import measure_overload
from benchmarks.planning import measure_plan
from benchmarks.process import Sidecar, figure, inference, probing, resident_bytes_of, seconds_of
from benchmarks.promise import measure_promise
from benchmarks.recovery import measure_recovery
from benchmarks.rolling import measure_rolling
from benchmarks.serving import measure_batches, measure_binary, measure_tiny
from benchmarks.soak import measure_soak
from benchmarks.table import MIB, Row, run

BUCKETS = [(1, 32), (1, 128), (8, 32), (8, 128)]
BETWEEN = [(2, 48), (3, 77), (6, 100)]
WARM_STARTS = 5


def main() -> None:
    """Measure and print; exit code 1 when a bound does not hold."""
    held = [run(*PARTS[name]) for name in chosen(sys.argv[1:])]
    raise SystemExit(not all(held))


def chosen(names: Sequence[str]) -> list[str]:
    """Return the parts of these names, a name standing for its parts too; all of them where there is none."""
    if unknown := [name for name in names if not _parts(name)]:
        raise SystemExit(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [part for name in names for part in _parts(name)] or list(PARTS)


def _parts(name: str) -> list[str]:
    return [part for part in PARTS if part == name or part.startswith(f"{name}-")]


def measure_start(directory: Path) -> Iterator[Row]:
    """Yield every row; what it is compared with is measured between the same two starts."""
    web_s, torch_s = seconds_of("import fastapi, uvicorn"), seconds_of("import torch")
    torch_bytes = resident_bytes_of("import torch")
    store = directory / "store"
    with Sidecar(store) as sidecar:
        open_s = sidecar.wait("/healthz", 0.002)
        with probing(sidecar, "/healthz") as probes:
            cold_s = sidecar.wait()
        cold = sidecar.status()
        cold_bytes = sidecar.resident_bytes()
    yield Row("exec → first /healthz 200", open_s, 2.5 * web_s, "s", "2.5 × import fastapi, uvicorn")
    yield from _warm_rows(store, torch_s, torch_bytes)
    yield _cold_row(cold_s, cold)
    yield from _probe_rows(probes)
    yield _memory_row("host memory at ready, cold start", cold_bytes, torch_bytes, cold)
    reports = report_file.parse(cold, "the cold start"), report_file.read(Path(f"{store}.json"))
    print(render(reports[0]), render(reports[1]), compare(*reports), sep="\n\n", end="\n\n")


def _warm_rows(store: Path, torch_s: float, torch_bytes: int) -> Iterator[Row]:
    times, runs, firsts, sizes, report = [], [], [], [], {}
    for _ in range(WARM_STARTS):
        with Sidecar(store) as sidecar:
            times.append(sidecar.wait())
            report = sidecar.warm_status()
            runs.append(sum(bucket["steady_s"] for bucket in report["buckets"]) * 3)
            sizes.append(sidecar.resident_bytes())
            firsts.append(_first_requests(sidecar))
    bound = 1.5 * torch_s + 1.2 * statistics.median(runs)
    text = "1.5 × import torch + 1.2 × all warm-up runs at steady speed"
    yield Row("warm restart: exec → /readyz 200", statistics.median(times), bound, "s", text)
    yield _memory_row("host memory at ready, warm restart", statistics.median(sizes), torch_bytes, report)
    for shape in firsts[0]:
        first = statistics.median(row[shape][0] for row in firsts)
        steady = statistics.median(row[shape][1] for row in firsts)
        kind = "bucket" if shape in BUCKETS else "between buckets"
        what = f"first request after ready, {kind} {shape[0]}×{shape[1]}"
        yield Row(what, first * 1e3, 1.3 * steady * 1e3, "ms", "1.3 × median of the next 20")


def _first_requests(sidecar: Sidecar) -> dict[tuple[int, int], tuple[float, float]]:
    """Return per shape the seconds of its first request after ready and the median of the next 20."""
    ask = sidecar.asker()
    found = {}
    for shape in [*BUCKETS, *BETWEEN]:
        body = inference(*shape)
        first = ask(body)
        found[shape] = (first, statistics.median(ask(body) for _ in range(20)))
    return found


def _cold_row(cold_s: float, report: Any) -> Row:
    took = {stage["name"]: (stage["end_s"] or 0) - (stage["start_s"] or 0) for stage in report["stages"]}
    bound = 1.15 * max(took["build-artifact"], took["read-weights"]) + took["warm-buckets"] + took["prove-answers"]
    text = "1.15 × the longer of build and weights, + warm-up and proof"
    return Row("cold start: exec → /readyz 200", cold_s, bound, "s", text)


def _probe_rows(probes: list[tuple[int | None, float]]) -> Iterator[Row]:
    refused = sum(code != 200 for code, _ in probes)
    if refused:
        raise SystemExit(f"{refused} of {len(probes)} probes were not answered with 200 after the first that was")
    times = sorted(seconds for _, seconds in probes)
    p99 = times[int(0.99 * (len(times) - 1))]
    yield Row(f"/healthz during the cold start, p99 of {len(times)}", p99 * 1e3, 15, "ms", "15 ms; none refused")
    yield Row("/healthz during the cold start, worst", times[-1] * 1e3, 200, "ms", "200 ms")


def _memory_row(what: str, resident: float, torch_bytes: int, report: Any) -> Row:
    bound = 1.1 * (report["weights"]["bytes"] + torch_bytes)
    return Row(what, resident / MIB, bound / MIB, "MiB", "weights + a process that imported torch, + 10 %")


def measure_weights(directory: Path) -> Iterator[Row]:
    """Yield the rows of the loader; each figure is taken in a process of its own."""
    make_files(directory)
    cold = figure("benchmarks.loading", "cold", directory)
    yield Row("map, cold: 3 GiB resident and installed", cold["map_s"], cold["plain_s"], "s", "plain preadv, 4 threads")
    text = "plain preadv, 4 threads, / 0.85"
    yield Row("read, cold: 3 GiB in memory and installed", cold["read_s"], cold["plain_s"] / 0.85, "s", text)
    warm = figure("benchmarks.loading", "warm", directory)
    text = "0.25 × load_file + load_state_dict into a built model"
    yield Row("map, warm from an earlier start: 3 GiB", warm["again_s"], 0.25 * warm["library_s"], "s", text)
    yield Row("map, warm from others' reading: 3 GiB", warm["map_s"], 0.25 * warm["library_s"], "s", text)
    beyond = max(0.0, warm["map_s"] - warm["populate_s"])
    yield Row("… beyond populating alone", beyond * 1e3, 50, "ms", "50 ms")
    many = figure("benchmarks.loading", "many", directory)
    yield Row("10,000 small tensors in 40 shards, planned and installed", many["map_s"], 1.0, "s", "1 s")
    memory = figure("benchmarks.loading", "memory", directory)
    yield Row("map: peak anonymous memory beyond the process's own", memory["beyond_bytes"] / MIB, 64, "MiB", "64 MiB")
    stall = figure("benchmarks.loading", "stall", directory)
    for kind in ("warm", "cold"):
        what = f"map, {kind}: longest stall of another thread"
        text = f"20 ms; idle machine: {stall['idle_s'] * 1e3:.1f} ms"
        yield Row(what, stall[f"{kind}_s"] * 1e3, 20, "ms", text)


PARTS: dict[str, tuple[str, Callable[[Path], Iterator[Row]]]] = {
    "weights": ("Warmgate's loader on files of its own", measure_weights),
    "artifacts": ("Compile artifacts of all-MiniLM-L6-v2", measure_artifacts),
    "start": ("Warmgate on all-MiniLM-L6-v2", measure_start),
    "promise": ("The promise on all-MiniLM-L6-v2, after warm starts", measure_promise),
    "plan": ("The planner on all-MiniLM-L6-v2, from one cold and one warm report", measure_plan),
    "recovery": ("Recovery and scale-out of all-MiniLM-L6-v2, exec → /readyz 200", measure_recovery),
    "serving-tiny": ("What the server adds to a model that takes no time", measure_tiny),
    "serving-batches": ("Batching single sequences on all-MiniLM-L6-v2", measure_batches),
    "serving-mixed": ("Mixed lengths on all-MiniLM-L6-v2", measure_mixed),
    "serving-binary": ("Tensors raw and as JSON", measure_binary),
    "serving-overload": ("More requests to all-MiniLM-L6-v2 than it can serve", measure_overload),
    "serving-rolling": ("Rolling restarts of three processes under load", measure_rolling),
    "serving-soak": ("A long mixed load on all-MiniLM-L6-v2", measure_soak),
}

if __name__ == "__main__":
    main()
