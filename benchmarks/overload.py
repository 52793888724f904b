"""Five times as many requests as can be served: those let in are answered in time, the others are refused at once."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from app import configure
from benchmarks.client import Plan, Sample, bodies, quantile, send
from benchmarks.mixed import INFER, fine
from benchmarks.process import EXAMPLE, Sidecar, inference
from benchmarks.table import Row
from benchmarks.trend import memory_row, watching
from benchmarks.wrk import Body

# Long sequences: few enough requests a second that the client takes next to nothing of the server's processors.
LENGTH = 128
CAPACITY_S = 10
SECONDS = 30
TIMES = 5
REFUSED_S = 0.05
SAMPLE_S = 0.1


def measure_overload(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    with Sidecar(directory / "store", "compile.engine=aot") as sidecar:
        sidecar.wait()
        files = bodies(directory, iter([Body(inference(1, LENGTH))]))
        calm = send(Plan(sidecar.port, INFER, files, CAPACITY_S), directory / "plan")
        fine(calm)
        capacity = len(calm) / CAPACITY_S
        plan = Plan(sidecar.port, INFER, files, SECONDS, rate=TIMES * capacity)
        with watching(sidecar, SAMPLE_S) as memory:
            samples = send(plan, directory / "plan")
    yield from _rows(samples, capacity, configure.load(EXAMPLE).serving.timeout_s)
    yield memory_row("… memory", memory)


def _rows(samples: Sequence[Sample], capacity: float, timeout_s: float) -> Iterator[Row]:
    accepted = [sample.seconds for sample in samples if sample.status in (200, 504)]
    refused = [sample.seconds for sample in samples if sample.status == 503]
    late = sum(sample.status == 504 for sample in samples)
    lost = len(samples) - len(accepted) - len(refused)
    what = f"{TIMES} × {capacity:.0f} requests a second for {SECONDS} s: {len(accepted)} let in, p99"
    text = f"serving.timeout_s; {late} of them answered 504"
    yield Row(what, quantile(accepted, 0.99), timeout_s, "s", text)
    text = f"50 ms; p99 {quantile(refused, 0.99) * 1e3:.3g} ms"
    yield Row(f"… {len(refused)} refused with 503, worst", max(refused) * 1e3, REFUSED_S * 1e3, "ms", text)
    yield Row("… without an answer, or with another", lost, 0, "", "none")
