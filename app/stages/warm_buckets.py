"""Run every bucket on the thread that will serve, with inputs made the way requests make them."""

import statistics
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from app.buckets import Bucket, Coverage, Kind, Route
from app.errors import WarmupError
from app.graph import Lane, stage
from app.progress import Progress
from app.report import BucketReport
from app.samples import sample_inputs
from app.servable import Array
from app.serving.forward import Forward
from app.settings import Settings
from app.stages.bind_engine import BoundEngine
from app.weights import ResidentWeights


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """An engine that has run every bucket it promises; the answers are not compared with anything yet."""

    forward: Forward
    inputs: Mapping[str, Mapping[str, Array]]
    outputs: Mapping[str, Mapping[str, Array]]
    rows: tuple[BucketReport, ...]


@stage(Lane.DEVICE)
def warm_buckets(settings: Settings, engine: BoundEngine, resident: ResidentWeights, progress: Progress) -> WarmEngine:
    """Give the warm engine; raises WarmupError when a required bucket fails or the budget runs out before it.

    An optional bucket that fails is reported and not promised: its shapes fall under the policy for uncovered ones.
    """
    # A build may have taken minutes: a file that was truncated meanwhile would end the process without a word.
    resident.check_unchanged()
    buckets = engine.forward.coverage.buckets
    rows = {bucket.name: BucketReport(bucket.name, bucket.required) for bucket in buckets}
    inputs: dict[str, Mapping[str, Array]] = {}
    outputs: dict[str, Mapping[str, Array]] = {}
    progress.expect(len(buckets), "buckets")
    progress.show(tuple(rows.values()))
    until = time.monotonic() + settings.warmup.budget_s
    for bucket in buckets:
        inputs[bucket.name] = sample_inputs(engine.forward.inputs, dict(bucket.sizes), seed=bucket.name)
        try:
            _within(until, bucket, settings.warmup.budget_s)
            row, outputs[bucket.name] = _warm(
                engine.forward, bucket, inputs[bucket.name], settings.warmup.calls, progress
            )
        except Exception as error:
            if bucket.required:
                raise WarmupError(f"required bucket {bucket.name} could not be warmed: {error}") from error
            state = "skipped" if isinstance(error, BudgetSpentError) else "failed"
            row = replace(rows[bucket.name], state=state, why=str(error))
        rows[bucket.name] = row
        progress.show(tuple(rows.values()))
        progress.advance()
    if changed := engine.forward.engine.changed_buffers():
        raise WarmupError(f"the model's forward changes its own buffers ({', '.join(changed)}): answers would differ")
    progress.say("")
    return WarmEngine(_only(engine.forward, outputs.keys()), inputs, outputs, tuple(rows.values()))


class BudgetSpentError(WarmupError):
    """No time is left for a bucket."""


def _within(until: float, bucket: Bucket, budget_s: float) -> None:
    if time.monotonic() > until:
        raise BudgetSpentError(
            f"warmup.budget_s = {budget_s} was spent before bucket {bucket.name}; raise it or warm fewer"
        )


def _warm(
    forward: Forward, bucket: Bucket, arrays: Mapping[str, Array], calls: int, progress: Progress
) -> tuple[BucketReport, Mapping[str, Array]]:
    route = Route(Kind.EXACT, bucket, bucket.sizes)
    outputs: Mapping[str, Array] = {}
    seconds = []
    for run in range(calls):
        progress.say(f"{bucket.name}, run {run + 1} of {calls}")
        began = time.perf_counter()
        outputs = forward(arrays, route)
        seconds.append(time.perf_counter() - began)
    steady = statistics.median(seconds[2:] or seconds[1:])
    return BucketReport(bucket.name, bucket.required, "warm", seconds[0], seconds[1], steady), outputs


def _only(forward: Forward, warm: Container[str]) -> Forward:
    """Return the forward whose coverage promises the warm buckets alone."""
    old = forward.coverage
    kept = tuple(bucket for bucket in old.buckets if bucket.name in warm)
    if not kept:
        raise WarmupError("no bucket could be warmed, so ready would promise nothing; see the buckets in the report")
    coverage = Coverage(old.dimensions, kept, old.dynamic, old.policy)
    return Forward(forward.engine, coverage, forward.inputs, forward.outputs)
