"""Compare what the warm engine answers with the eager reference, or with the record of an earlier comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from app.artifacts import Compiled, Uncompiled, golden
from app.buckets import Bucket, Kind, Route
from app.errors import WarmupError
from app.report import BucketReport
from app.servable import Array
from app.serving.forward import Forward
from app.settings import Settings, Tolerance
from app.stages.warm_buckets import WarmEngine
from app.startup import Lane, Progress, stage
from app.weights import LoadedModel, ResidentWeights

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ProvenModel:
    """A warm engine whose answers equal the reference: what may be served.

    `new_golden`: proven answers by case, to be kept once ready; empty when the stored record was used.
    """

    forward: Forward
    rows: tuple[BucketReport, ...]
    new_golden: Mapping[str, Outputs]


@stage(Lane.DEVICE)
def prove_answers(
    settings: Settings,
    warm: WarmEngine,
    loaded: LoadedModel,
    resident: ResidentWeights,
    code: Compiled | Uncompiled,
    progress: Progress,
) -> ProvenModel:
    """Give the proven model; raises WarmupError naming bucket, output, the difference and the tolerance."""
    reference = _Reference(settings, loaded, resident, warm.forward, progress)
    recorded = _recorded(code, resident)
    rows = {row.name: row for row in warm.rows}
    fresh: dict[str, Outputs] = {}
    progress.expect(len(warm.outputs), "buckets")
    for bucket in warm.forward.coverage.buckets:
        inputs, outputs = warm.inputs[bucket.name], warm.outputs[bucket.name]
        case = golden.case(bucket.name, inputs)
        proof, difference = "golden", _difference(outputs, recorded.get(case), settings.warmup.tolerance)
        if not difference.holds:
            # No record, or one that disagrees: it may be damaged, so the reference itself decides.
            proof, difference = "reference", _difference(outputs, reference(bucket, inputs), settings.warmup.tolerance)
            fresh[case] = outputs
        if not difference.holds:
            raise WarmupError(f"bucket {bucket.name} is not proven: {difference.why}")
        rows[bucket.name] = replace(rows[bucket.name], proof=proof, max_error=difference.largest)
        progress.show(tuple(rows.values()))
        progress.advance()
    return ProvenModel(warm.forward, tuple(rows.values()), fresh if isinstance(code, Compiled) else {})


def _recorded(code: Compiled | Uncompiled, resident: ResidentWeights) -> golden.Golden:
    """Code built by this start is compared with the module that is there anyway, restored code with its record."""
    restored = isinstance(code, Compiled) and code.outcome == "restored"
    return golden.recall(code.artifact, resident.digest) if restored and isinstance(code, Compiled) else {}


class _Reference:
    """The module in eager mode on the same inputs; built on demand where a restored start has none for its weights."""

    def __init__(
        self,
        settings: Settings,
        loaded: LoadedModel,
        resident: ResidentWeights,
        serving: Forward,
        progress: Progress,
    ) -> None:
        self._settings, self._loaded, self._resident = settings, loaded, resident
        self._serving, self._progress = serving, progress
        self._forward: Forward | None = None

    def __call__(self, bucket: Bucket, inputs: Mapping[str, Array]) -> Outputs:
        if self._forward is None:
            self._forward = self._open()
        return self._forward(inputs, Route(Kind.EXACT, bucket, bucket.sizes))

    def _open(self) -> Forward:
        from app.engines.eager import EagerEngine
        from app.weights.install import install
        from app.weights.skeleton import build_skeleton

        loaded = self._loaded
        if loaded.module is None:
            self._progress.say("no record for these weights: the module is built for comparison")
            loaded = install(build_skeleton(self._settings.model), self._resident, loaded.plan)
        engine = EagerEngine.open(loaded, None)
        return Forward(engine, self._serving.coverage, self._serving.inputs, self._serving.outputs)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far outputs are from what they should be; `why` is empty when they are close enough."""

    largest: float | None
    why: str

    @property
    def holds(self) -> bool:
        """The outputs are proven."""
        return not self.why


def _difference(outputs: Outputs, expected: Outputs | None, tolerance: Tolerance) -> Difference:
    if expected is None:
        return Difference(None, "there is nothing to compare with")
    worst = 0.0
    for name, array in outputs.items():
        other = expected.get(name)
        if other is None or other.shape != array.shape or other.dtype != array.dtype:
            return Difference(None, f"output {name} is {array.dtype}{list(array.shape)}, the reference is not")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return Difference(None, f"output {name} has values that are not finite")
        # Booleans and whole numbers must be equal; floats are compared in double precision.
        one, two = array.astype(np.float64), other.astype(np.float64)
        error = np.abs(one - two)
        allowed = tolerance.atol + tolerance.rtol * np.abs(two) if array.dtype.kind == "f" else 0.0
        worst = max(worst, float(error.max(initial=0.0)))
        if not (error <= allowed).all():
            return Difference(
                worst,
                f"output {name} differs from the reference by up to {error.max():.3g}, allowed are "
                f"atol {tolerance.atol:g} + rtol {tolerance.rtol:g}: the compiled code and the module disagree",
            )
    return Difference(worst, "")
