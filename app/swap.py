"""Serve the module at once, build its code meanwhile, and put it in its place once it is proven."""

import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.artifacts import Compiled, Missed, Restored, Uncompiled
from app.buckets import Bucket, Route
from app.devices import AcquiredDevice
from app.errors import ArtifactError, WarmgateError, WarmupError
from app.lanes import DeviceLane
from app.progress import Progress, Stopped
from app.report import BucketReport
from app.servable import Array
from app.serving.forward import Forward
from app.settings import Settings
from app.stages.bind_engine import BoundEngine, bind_engine
from app.stages.build_artifact import first_that_builds
from app.stages.install_weights import install_weights
from app.stages.prove_answers import ProvenModel, compare
from app.stages.warm_buckets import WarmEngine
from app.weights import LoadedModel, ResidentWeights

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Swapped:
    """Proven code in the place of the module."""

    code: Compiled
    loaded: LoadedModel
    engine: BoundEngine
    proven: ProvenModel


class Swap:
    """One attempt, on a thread of its own; the device thread does one run at a time, between requests."""

    def __init__(self, settings: Settings, lane: DeviceLane) -> None:
        self._settings, self._lane = settings, lane
        self._progress = Progress()
        self._thread: threading.Thread | None = None

    def wanted(self, values: Mapping[Any, Any]) -> bool:
        """Say whether the module serves only until its code is built."""
        compiling = self._settings.compile
        missed = isinstance(values[Restored | Missed], Missed)
        return compiling.on_miss == "eager_then_swap" and compiling.engine != "eager" and missed

    def stop(self, within_s: float = 5.0) -> None:
        """End it, and wait until no child process is left."""
        self._progress.stop()
        if self._thread is not None:
            self._thread.join(within_s)

    def run(self, values: Mapping[Any, Any]) -> Swapped | Uncompiled:
        """Build, bind, warm and prove; returns what to serve from now on, or why the module goes on serving.

        Raises Stopped. What fails here costs nobody an answer.
        """
        self._thread = threading.current_thread()
        lookup: Missed = values[Restored | Missed]
        try:
            return self._swapped(values, lookup)
        except Stopped:
            raise
        except WarmgateError as error:
            return Uncompiled(f"the module goes on serving, its code could not be swapped in: {error}", lookup.layers)

    def _swapped(self, values: Mapping[Any, Any], lookup: Missed) -> Swapped | Uncompiled:
        device: AcquiredDevice = values[AcquiredDevice]
        code = first_that_builds(self._settings, lookup, device.device.threads, self._progress)
        if isinstance(code, Uncompiled):
            return code
        serving: LoadedModel = values[LoadedModel]
        if code.engine == "jit":
            loaded = serving
        else:
            kept = serving.module if self._settings.uncovered == "eager" else None
            loaded = self._install(values[ResidentWeights], code, kept)
        engine: BoundEngine = self._on_device(bind_engine.run, self._settings, loaded, code, Progress())
        forward = self._as_promised(engine.forward, values[WarmEngine].forward)
        try:
            rows = tuple(self._prove(forward, bucket, values[WarmEngine]) for bucket in forward.buckets)
        finally:  # the module that goes on serving may be the same one
            self._on_device(forward.engine.restore_buffers)
        before: ProvenModel = values[ProvenModel]
        others = tuple(row for row in before.rows if row.name not in {one.name for one in rows})
        proven = ProvenModel(forward, (*rows, *others), before.to_keep)
        return Swapped(code, loaded, replace(engine, forward=forward), proven)

    def _install(self, resident: ResidentWeights, code: Compiled, module: "nn.Module | None") -> LoadedModel:
        loaded: LoadedModel = self._on_device(install_weights.run, self._settings, resident, code, None, Progress())
        return replace(loaded, module=module)

    def _as_promised(self, forward: Forward, promised: Forward) -> Forward:
        """Return the forward for the buckets that are promised; raises ArtifactError where it would serve less."""
        if any(forward.coverages[name].policy != old.policy for name, old in promised.coverages.items()):
            raise ArtifactError("one code a bucket would reject shapes that the module serves: give every input a pad")
        return forward.along(promised.paths.values())

    def _prove(self, forward: Forward, bucket: Bucket, warm: WarmEngine) -> BucketReport:
        """Warm one bucket and compare with what the module, itself proven, has answered."""
        route = Route.exactly(bucket)
        seconds: list[float] = []
        outputs: Mapping[str, Array] = {}
        for _ in range(self._settings.warmup.calls):
            outputs, took = self._on_device(_timed, forward, warm.inputs[bucket.name], route)
            seconds.append(took)
        difference = compare(outputs, warm.outputs[bucket.name], self._settings.warmup.tolerance)
        if not difference.holds:
            raise WarmupError(f"bucket {bucket.name} is not proven: {difference.why}")
        steady = statistics.median(seconds[2:] or seconds[1:])
        row = BucketReport(bucket.name, bucket.required, "warm", seconds[0], seconds[1], steady)
        return replace(row, proof="reference", max_error=difference.largest)

    def _on_device(self, work: Any, *arguments: Any) -> Any:
        """Run on the device thread and wait; anything that it raises is one of our errors or becomes one."""
        self._progress.check()
        try:
            return self._lane.submit(lambda: work(*arguments)).result()
        except (WarmgateError, Stopped):
            raise
        except Exception as error:
            raise ArtifactError(f"{type(error).__name__}: {error}") from error


def _timed(forward: Forward, arrays: Mapping[str, Array], route: Route) -> tuple[Mapping[str, Array], float]:
    began = time.perf_counter()
    return forward(arrays, route), time.perf_counter() - began
