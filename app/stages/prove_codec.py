"""Run the codec's own samples through codec and model, and compare with what the module answers to their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from app.artifacts import golden
from app.codecs import Arrays, LoadedCodec, case_name
from app.devices import AcquiredDevice
from app.errors import WarmupError
from app.graph import Lane, Skipped, stage
from app.progress import Progress
from app.serving.encoding import encoded_sample
from app.serving.forward import Forward
from app.settings import Settings, Tolerance
from app.stages.compute_reference import Reference, from_child
from app.stages.prove_answers import ProvenModel, compare
from app.traces import Traces
from app.weights import ResidentWeights


@dataclass(frozen=True, slots=True)
class ProvenCodec:
    """A codec that has answered all of its samples; the first of them as a request would give it, None without one.

    `to_keep`: right answers by case that are not recorded beside the artifact yet.
    """

    sample: Arrays | None
    to_keep: Mapping[str, Arrays]


@stage(Lane.DEVICE)
def prove_codec(
    settings: Settings,
    loaded: LoadedCodec,
    proven: ProvenModel,
    reference: Reference,
    resident: ResidentWeights,
    device: AcquiredDevice,
    progress: Progress,
) -> ProvenCodec | Skipped[ProvenCodec]:
    """Give the codec that may be served; raises WarmupError naming sample, output and difference.

    It codes the same twice, and the model's answers to its tensors are the module's. A record that lacks them is of
    another codec; one that disagrees may be damaged: then the module is asked.
    """
    if loaded.codec is None:
        return Skipped(ProvenCodec(None, {}), "model.codec is not set")
    samples = loaded.samples()
    progress.expect(len(samples), "samples")
    traces = Traces.take()
    right = proven.to_keep or reference.cases
    asked: Mapping[str, Arrays] = {}
    try:
        _prove(proven.forward, loaded, right if reference.kind != "none" else None, settings.warmup.tolerance, progress)
    except _UnprovenError as error:
        resident.check_unchanged()
        if reference.kind != "golden" or proven.to_keep:
            raise
        asked = from_child(settings, resident, device.device.threads, progress)
        progress.say(f"the module was asked: the record does not hold: {error}")
        _prove(proven.forward, loaded, asked, settings.warmup.tolerance, progress)
    traces.restore()
    return ProvenCodec(samples[0], asked)


class _UnprovenError(WarmupError):
    """An answer is not the one that is recorded."""


def _prove(
    forward: Forward,
    loaded: LoadedCodec,
    right: Mapping[str, Arrays] | None,
    tolerance: Tolerance,
    progress: Progress,
) -> None:
    """Prove every sample; `right`: answers by case, None where the module itself serves and can only repeat itself."""
    for number, raw in enumerate(loaded.samples()):
        name = case_name(number)
        tensors, route = encoded_sample(forward, loaded, raw, number)
        again, _ = encoded_sample(forward, loaded, raw, number)
        _same_twice(tensors, again, f"{name}: encode gives")
        outputs = forward(tensors, route)
        forward.engine.restore_buffers()
        expected = forward(tensors, route) if right is None else right.get(golden.case(name, tensors))
        forward.engine.restore_buffers()
        difference = compare(outputs, expected, tolerance)
        if not difference.holds:
            raise _UnprovenError(f"{name}: {difference.why}")
        _same_twice(loaded.decode(outputs), loaded.decode(outputs), f"{name}: decode gives")
        progress.advance()


def _same_twice(one: Arrays, other: Arrays, what: str) -> None:
    for name, array in one.items():
        again = other.get(name)
        if again is None or not np.array_equal(array, again, equal_nan=array.dtype.kind == "f"):
            raise WarmupError(f"{what} {name} otherwise the second time; answers would depend on who asked before")
