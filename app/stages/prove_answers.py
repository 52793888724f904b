"""Compare what the warm engine answers with the eager reference, or with the record of an earlier comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from app.artifacts import golden
from app.buckets import Route
from app.devices import AcquiredDevice
from app.errors import WarmupError
from app.graph import Lane, stage
from app.progress import Progress
from app.report import BucketReport
from app.servable import Array, is_finite, is_floating
from app.serving.company import in_company
from app.serving.forward import Forward
from app.settings import Settings, Tolerance
from app.stages.compute_reference import Reference, from_child
from app.stages.warm_buckets import WarmEngine
from app.traces import Traces
from app.weights import ResidentWeights

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ProvenModel:
    """A warm engine whose answers equal the reference: what may be served.

    `to_keep`: right answers by case that are not recorded beside the artifact yet.
    """

    forward: Forward
    rows: tuple[BucketReport, ...]
    to_keep: Mapping[str, Outputs]


@stage(Lane.DEVICE)
def prove_answers(
    settings: Settings,
    warm: WarmEngine,
    reference: Reference,
    resident: ResidentWeights,
    device: AcquiredDevice,
    progress: Progress,
) -> ProvenModel:
    """Give the proven model; raises WarmupError naming bucket, output, the difference and the tolerance.

    A record that disagrees may be damaged, so the module decides before the start is given up.
    """
    progress.expect(len(warm.outputs), "buckets")
    progress.show(warm.rows)
    traces = Traces.take()
    try:
        rows = _prove(settings, warm, reference, progress)
    except WarmupError as error:
        resident.check_unchanged()
        if reference.kind != "golden":
            raise
        progress.say(f"the record disagrees ({error}); asking the module")
        reference = Reference("reference", from_child(settings, resident, device.device.threads, progress))
        rows = _prove(settings, warm, reference, progress)
    progress.say("requests in company")
    tolerance = settings.warmup.tolerance
    forward = in_company(warm.forward, warm.inputs, warm.outputs, lambda one, two: compare(one, two, tolerance).why)
    traces.restore()
    progress.say(_company(forward))
    return ProvenModel(forward, rows, reference.cases if reference.kind == "reference" else {})


def _company(forward: Forward) -> str:
    """Say which paths keep requests from running together, and why."""
    kept = [path for path in forward.paths.values() if path.company_why]
    return "; ".join(f"{path.name}: requests in company: {path.company}, {path.company_why}" for path in kept)


def _prove(settings: Settings, warm: WarmEngine, reference: Reference, progress: Progress) -> tuple[BucketReport, ...]:
    rows = {row.name: row for row in warm.rows}
    for bucket in warm.forward.buckets:
        inputs, outputs = warm.inputs[bucket.name], warm.outputs[bucket.name]
        expected = reference.cases.get(golden.case(bucket.name, inputs))
        if reference.kind == "none":
            # The module serves: what can be proven is that it answers the same twice and that the values are finite.
            expected = warm.forward(inputs, Route.exactly(bucket))
            warm.forward.engine.restore_buffers()
        difference = compare(outputs, expected, settings.warmup.tolerance)
        if not difference.holds:
            raise WarmupError(f"bucket {bucket.name} is not proven: {difference.why}{_state(warm)}")
        proof = "reference" if reference.kind == "none" else reference.kind
        rows[bucket.name] = replace(rows[bucket.name], proof=proof, max_error=difference.largest)
        progress.show(tuple(rows.values()))
        progress.advance()
    return tuple(rows.values())


def _state(warm: WarmEngine) -> str:
    """Say what answers may depend on beside their inputs."""
    return f"; the forward changes {', '.join(warm.restored)}, on which its answers may depend" if warm.restored else ""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far outputs are from what they should be; `why` is empty when they are close enough."""

    largest: float | None
    why: str

    @property
    def holds(self) -> bool:
        """The outputs are proven."""
        return not self.why


def compare(outputs: Outputs, expected: Outputs | None, tolerance: Tolerance) -> Difference:
    """Compare output by output: names, shapes, dtypes, finite values, and |out - ref| <= atol + rtol * |ref|."""
    if expected is None:
        return Difference(None, "the reference has no answer for its inputs")
    worst = 0.0
    for name, array in outputs.items():
        other = expected.get(name)
        if other is None or other.shape != array.shape or other.dtype != array.dtype:
            return Difference(None, f"output {name} is {array.dtype}{list(array.shape)}, the reference is not")
        if not is_finite(array):
            return Difference(None, f"output {name} has values that are not finite")
        if not is_floating(array.dtype):
            if not np.array_equal(array, other):
                return Difference(None, f"output {name} differs from the reference; whole numbers must be equal")
            continue
        one, two = array.astype(np.float64), other.astype(np.float64)
        error = np.abs(one - two)
        allowed = tolerance.atol + tolerance.rtol * np.abs(two)
        worst = max(worst, float(error.max(initial=0.0)))
        if not (error <= allowed).all():
            return Difference(
                worst,
                f"output {name} differs from the reference by up to {error.max():.3g}, allowed are "
                f"atol {tolerance.atol:g} + rtol {tolerance.rtol:g}: the engine and the module disagree",
            )
    return Difference(worst, "")
