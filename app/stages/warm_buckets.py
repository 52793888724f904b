"""Run every bucket on the thread that will serve, with inputs made the way requests make them."""

import statistics
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from app.buckets import Bucket, Route
from app.budget import Budget, BudgetSpentError, DoesNotFitError
from app.errors import ResourceError, WarmgateError, WarmupError
from app.footprint import measured
from app.graph import Lane, stage
from app.progress import Progress
from app.report import BucketReport
from app.sampling import sampler
from app.sentinel import graphs_traced
from app.servable import Array
from app.serving.forward import Forward
from app.settings import Settings
from app.stages.bind_engine import BoundEngine
from app.traces import Traces
from app.weights import ResidentWeights


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """An engine that has run every bucket it promises; the answers are not compared with anything yet.

    `restored`: what the runs have changed beside their answers, buffers by name; all of it is as it was before.
    """

    forward: Forward
    inputs: Mapping[str, Mapping[str, Array]]
    outputs: Mapping[str, Mapping[str, Array]]
    rows: tuple[BucketReport, ...]
    restored: tuple[str, ...]


@stage(Lane.DEVICE)
def warm_buckets(settings: Settings, engine: BoundEngine, resident: ResidentWeights, progress: Progress) -> WarmEngine:
    """Give the warm engine; raises WarmupError, or ResourceError for memory, when a required bucket cannot be warmed.

    An optional bucket that fails is reported and not promised: its shapes fall under the policy for uncovered ones.
    """
    # A build may have taken minutes: a file that was truncated meanwhile would end the process without a word.
    resident.check_unchanged()
    buckets = engine.forward.buckets
    rows = {bucket.name: BucketReport(bucket.name, bucket.required) for bucket in buckets}
    inputs: dict[str, Mapping[str, Array]] = {}
    outputs: dict[str, Mapping[str, Array]] = {}
    progress.expect(len(buckets), "buckets")
    progress.show(tuple(rows.values()))
    sample = sampler(settings.warmup.samples, settings.model_paths)
    budget, traces, restored = Budget.begin(settings.warmup), Traces.take(), set[str]()
    for bucket in buckets:
        inputs[bucket.name] = sample(bucket)
        try:
            budget.allow(bucket)
            with measured() as taken:
                row, outputs[bucket.name] = _warm(
                    engine.forward, bucket, inputs[bucket.name], settings.warmup.calls, progress
                )
            row = replace(row, peak_bytes=taken.peak_bytes, kept_bytes=taken.kept_bytes)
            budget.took(bucket, taken)
        except Exception as error:
            if bucket.required:
                raise _fatal(bucket, error) from error
            outputs.pop(bucket.name, None)
            state = "skipped" if isinstance(error, BudgetSpentError | DoesNotFitError) else "failed"
            row = replace(rows[bucket.name], state=state, why=str(error))
        restored.update(engine.forward.engine.restore_buffers())
        rows[bucket.name] = row
        progress.show(tuple(rows.values()))
        progress.advance()
    changed = (*sorted(restored), *traces.restore())
    progress.say(f"put back: {', '.join(changed)}" if changed else "")
    return WarmEngine(_only(engine.forward, outputs.keys()), inputs, outputs, tuple(rows.values()), changed)


def _fatal(bucket: Bucket, error: Exception) -> WarmgateError:
    """Return the error that ends the start; torch's allocators raise errors of a general kind."""
    told = f"required bucket {bucket.name} could not be warmed: {error}"
    of_memory = isinstance(error, ResourceError | MemoryError) or "allocate memory" in str(error)
    return ResourceError(told) if of_memory else WarmupError(told)


def _warm(
    forward: Forward, bucket: Bucket, arrays: Mapping[str, Array], calls: int, progress: Progress
) -> tuple[BucketReport, Mapping[str, Array]]:
    route = Route.exactly(bucket)
    outputs: Mapping[str, Array] = {}
    seconds = []
    before = graphs_traced()
    for run in range(calls):
        progress.say(f"{bucket.name}, run {run + 1} of {calls}")
        began = time.perf_counter()
        outputs = forward(arrays, route)
        seconds.append(time.perf_counter() - began)
    steady = statistics.median(seconds[2:] or seconds[1:])
    row = BucketReport(bucket.name, bucket.required, "warm", seconds[0], seconds[1], steady)
    return replace(row, graphs=graphs_traced() - before), outputs


def _only(forward: Forward, warm: Container[str]) -> Forward:
    """Return the forward that promises the warm buckets alone."""
    kept = forward.promising(lambda bucket: bucket.name in warm)
    if not kept.buckets:
        raise WarmupError("no bucket could be warmed, so ready would promise nothing; see the buckets in the report")
    return kept
