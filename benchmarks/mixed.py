"""Requests of mixed lengths on the example: what is padding, how long each waits for others, and what probes feel."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.client import Plan, Sample, bodies, quantile, send
from benchmarks.process import Sidecar, inference, probing
from benchmarks.table import Row
from benchmarks.wrk import Body

LENGTHS = range(8, 257)
CLIENTS = 32
SECONDS = 20
INFER = "/v2/models/minilm/infer"
PROBES = ("/healthz", "/readyz")
POSITIONS = 'warmgate_positions_total{{held="{}"}}'


def measure_mixed(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    with Sidecar(directory / "store", "compile.engine=aot") as sidecar:
        sidecar.wait()
        files = bodies(directory, (Body(inference(1, length)) for length in LENGTHS))
        before = _positions(sidecar)
        plan = Plan(sidecar.port, INFER, files, SECONDS, CLIENTS)
        with probing(sidecar, PROBES[0]) as live, probing(sidecar, PROBES[1]) as ready:
            samples = send(plan, directory / "plan")
        requested, padding = (after - first for after, first in zip(_positions(sidecar), before, strict=True))
    fine(samples)
    load = f"{len(samples)} requests of {LENGTHS[0]} to {LENGTHS[-1]} tokens, concurrency {CLIENTS}"
    share = 100 * padding / (padding + requested)
    yield Row(f"{load}: padding", share, 15, "%", "15 % of computed tokens")
    yield from _waiting_rows(samples)
    for path, probes in zip(PROBES, (live, ready), strict=True):
        yield from _probe_rows(path, probes)


def _positions(sidecar: Sidecar) -> tuple[float, float]:
    return sidecar.metric(POSITIONS.format("request")), sidecar.metric(POSITIONS.format("padding"))


def fine(samples: Sequence[Sample]) -> None:
    """Raise SystemExit unless every request was answered with 200 and as the first of its body was."""
    bad = [sample for sample in samples if sample.status != 200 or sample.wrong]
    if bad or not samples:
        raise SystemExit(f"{len(bad)} of {len(samples)} requests went wrong, the first: {bad[:1]}")


def _waiting_rows(samples: Sequence[Sample]) -> Iterator[Row]:
    times = [sample.seconds / sample.compute_s for sample in samples if sample.compute_s]
    if len(times) < len(samples):
        raise SystemExit("the server does not tell what a request's batch took (Server-Timing)")
    yield Row("… a request beside its own batch's time, worst", max(times), 3, "×", "3 ×")
    yield Row("… p99", quantile(times, 0.99), None, "×", f"median {quantile(times, 0.5):.2f} ×")


def _probe_rows(path: str, probes: Sequence[tuple[int | None, float]]) -> Iterator[Row]:
    refused = sum(code != 200 for code, _ in probes)
    if refused:
        raise SystemExit(f"{refused} of {len(probes)} probes of {path} were not answered with 200")
    seconds = [taken for _, taken in probes]
    yield Row(f"{path} under that load, p99 of {len(seconds)}", quantile(seconds, 0.99) * 1e3, 20, "ms", "20 ms")
    yield Row("… worst", max(seconds) * 1e3, 200, "ms", "200 ms")
