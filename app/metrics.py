"""Prometheus metrics read from the state at scrape time, so that they never disagree with /readyz and /status."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app import __version__
from app.artifacts import CACHES
from app.ledger import OBJECTS, WHOLES
from app.readiness import Readiness
from app.startup import State

PHASES = ("starting", "ready", "degraded", "draining", "failed")
ENGINES = ("aot", "jit", "eager")
LAYER_RESULTS = ("hit", "miss", "rejected", "bypass")
LAYERS = ("sealed-artifact", "aot-package", "jit-caches", *CACHES, "device-graph")
RUNS = ("first", "second", "steady")
UNKNOWN = float("nan")

Status = Callable[[], dict[str, Any]]


def registry() -> CollectorRegistry:
    """Return a registry of this process's own, with the process collector and without `_created` series."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    return made


class StateCollector(Collector):
    """Every gauge that tells the state of start-up and of the engine."""

    def __init__(
        self, status: Status, readiness: Readiness, lag_s: Callable[[], float], heartbeat: Callable[[], float]
    ) -> None:
        self._status, self._readiness, self._lag_s, self._heartbeat = status, readiness, lag_s, heartbeat

    def collect(self) -> Iterable[Metric]:
        """Yield every family; called by the registry at each scrape."""
        status = self._status()
        yield from _process(status)
        yield from _stages(status["stages"])
        yield _checks(self._readiness)
        yield from _weights(status)
        yield from _buckets(status["buckets"])
        yield _gauge("warmgate_event_loop_lag_seconds", "Delay of the event loop, last measured.", self._lag_s())
        yield _gauge(
            "warmgate_engine_heartbeat_timestamp_seconds", "When the device thread last showed life.", self._heartbeat()
        )


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _process(status: dict[str, Any]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "warmgate_info", "What is served.", labels=["version", "model", "model_version", "engine", "device"]
    )
    model, artifacts = status["model"], status["artifacts"]
    labels = [__version__, model["name"], model["version"], artifacts["engine"] or "", status["device"]["kind"] or ""]
    info.add_metric(labels, 1)
    yield info
    phase = GaugeMetricFamily("warmgate_phase", "The phase of the process, one of its values is 1.", labels=["phase"])
    for name in PHASES:
        phase.add_metric([name], float(status["phase"] == name))
    yield phase
    yield _gauge("warmgate_ready", "1 while every readiness check holds.", float(status["ready"]))
    if status["time_to_ready_s"] is not None:
        yield _gauge("warmgate_time_to_ready_seconds", "From process start to ready.", status["time_to_ready_s"])
    late = CounterMetricFamily("warmgate_late_compiles", "Compilations after ready.")
    late.add_metric([], status["late_compiles"])
    yield late


def _stages(stages: list[dict[str, Any]]) -> Iterator[Metric]:
    state = GaugeMetricFamily("warmgate_stage_state", "State of a stage, one is 1.", labels=["stage", "state"])
    duration = GaugeMetricFamily("warmgate_stage_duration_seconds", "How long a stage took.", labels=["stage"])
    ratio = GaugeMetricFamily("warmgate_stage_progress_ratio", "Share of a stage that is done.", labels=["stage"])
    for stage in stages:
        for name in State:
            state.add_metric([stage["name"], name], float(stage["state"] == name))
        ended = stage["end_s"] is not None and stage["start_s"] is not None
        duration.add_metric([stage["name"]], stage["end_s"] - stage["start_s"] if ended else UNKNOWN)
        finished = stage["state"] in ("done", "skipped")
        ratio.add_metric([stage["name"]], 1.0 if finished else _share(stage["done"], stage["total"]))
    yield from (state, duration, ratio)


def _share(done: int, total: int) -> float:
    return min(1.0, done / total) if total else 0.0


def _checks(readiness: Readiness) -> Metric:
    checks = GaugeMetricFamily("warmgate_check_ok", "1 while a readiness check holds.", labels=["check"])
    for result in readiness.verdict().results:
        checks.add_metric([result.name], float(result.ok))
    return checks


def _weights(status: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge("warmgate_weights_bytes", "Bytes of all tensors of the checkpoint.", status["weights"]["bytes"])
    read = CounterMetricFamily("warmgate_weights_read_bytes", "Bytes of the checkpoint read so far.")
    read.add_metric([], status["weights"]["bytes_read"])
    yield read
    memory = GaugeMetricFamily("warmgate_memory_bytes", "The memory ledger.", labels=["object", "kind"])
    rows = {row["name"]: row for row in status["memory"]}
    for name in (*OBJECTS, *WHOLES):
        for kind in ("planned", "measured", "peak"):
            value = rows.get(name, {}).get(f"{kind}_bytes")
            memory.add_metric([name, kind], UNKNOWN if value is None else value)
    yield memory
    device = GaugeMetricFamily("warmgate_device_memory_bytes", "Memory of the device.", labels=["kind"])
    for kind, value in status["device"]["memory"].items():
        device.add_metric([kind], value)
    yield device
    lookups = CounterMetricFamily("warmgate_artifact_lookups", "Look-ups by cache layer.", labels=["layer", "result"])
    found = {(layer["name"], layer["result"]): layer["count"] for layer in status["artifacts"]["layers"]}
    for layer in LAYERS:
        for result in LAYER_RESULTS:
            lookups.add_metric([layer, result], found.get((layer, result), 0))
    yield lookups


def _buckets(buckets: list[dict[str, Any]]) -> Iterator[Metric]:
    warm = GaugeMetricFamily("warmgate_bucket_warm", "1 once a bucket has been run and proven.", labels=["bucket"])
    seconds = GaugeMetricFamily(
        "warmgate_bucket_seconds", "Times of a bucket's warm-up runs.", labels=["bucket", "run"]
    )
    for bucket in buckets:
        proven = bucket["state"] == "warm" and bucket["proof"] != "none"
        warm.add_metric([bucket["name"]], float(proven))
        for run in RUNS:
            value = bucket[f"{run}_s"]
            seconds.add_metric([bucket["name"], run], UNKNOWN if value is None else value)
    yield from (warm, seconds)
