"""What is counted about requests; every series exists from the first scrape."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CODES = ("200", "400", "401", "404", "405", "413", "415", "500", "501", "503", "504")
PARTS = ("total", "queue", "compute", "codec")
REASONS = ("not_ready", "queue_full", "deadline", "draining", "too_large", "disconnected", "uncovered")
POLICIES = ("pad", "reject", "eager")
HELD = ("request", "padding")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class RequestMetrics:
    """Counters, histograms and gauges of the inference route."""

    def __init__(self, registry: CollectorRegistry, buckets: Iterable[str]) -> None:
        self.requests = Counter("warmgate_requests", "Inference requests by status.", ["code"], registry=registry)
        self.rejected = Counter("warmgate_rejected", "Requests not run, by reason.", ["reason"], registry=registry)
        self.uncovered = Counter(
            "warmgate_uncovered_requests",
            "Requests whose shape no warmed code covers as it is.",
            ["policy"],
            registry=registry,
        )
        self.duration = Histogram(
            "warmgate_request_duration_seconds",
            "Time of a request by part.",
            ["part"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "warmgate_batch_size", "Requests run together.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.padding = Gauge("warmgate_padding_ratio", "Share of padding in the last run.", registry=registry)
        self.positions = Counter(
            "warmgate_positions",
            "Places of tensors (product of the symbolic dimensions) that were computed, by what they held.",
            ["held"],
            registry=registry,
        )
        self.queue_items = Gauge("warmgate_queue_items", "Requests waiting for the device or on it.", registry=registry)
        self.queue_bytes = Gauge("warmgate_queue_bytes", "Bytes of inputs waiting for the device.", registry=registry)
        self.inflight = Gauge("warmgate_inflight_requests", "Requests received and not answered.", registry=registry)
        self.first_request = Gauge(
            "warmgate_first_request_seconds", "Compute time of a bucket's first request.", ["bucket"], registry=registry
        )
        self.first: dict[str, float | None] = dict.fromkeys(buckets)
        self._touch()

    def _touch(self) -> None:
        for code in CODES:
            self.requests.labels(code)
        for part in PARTS:
            self.duration.labels(part)
        for reason in REASONS:
            self.rejected.labels(reason)
        for policy in POLICIES:
            self.uncovered.labels(policy)
        for held in HELD:
            self.positions.labels(held)
        for bucket in self.first:
            self.first_request.labels(bucket).set(float("nan"))

    def runs(self) -> int:
        """Return how many batches have been run."""
        return int(next(s.value for m in self.batch_size.collect() for s in m.samples if s.name.endswith("_count")))

    def note_first(self, bucket: str, seconds: float) -> None:
        """Keep the compute time of the first real request of a bucket."""
        if self.first.get(bucket, 0.0) is None:
            self.first[bucket] = seconds
            self.first_request.labels(bucket).set(seconds)
