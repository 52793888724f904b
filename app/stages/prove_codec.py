"""Run the codec's own samples through codec and model, and compare with what their author says is right."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.buckets import Route
from app.codecs import LoadedCodec, as_array
from app.errors import WarmupError
from app.graph import Lane, Skipped, stage
from app.paths import ModelPath
from app.progress import Progress
from app.servable import Array, Rejected
from app.serving.coding import encoded
from app.serving.forward import Forward, measure
from app.settings import Settings
from app.stages.prove_answers import ProvenModel, compare

Arrays = Mapping[str, Array]
TIMES = 2


@dataclass(frozen=True, slots=True)
class ProvenCodec:
    """A codec that has answered all of its samples; the first of them as a request would give it, None without one."""

    sample: Arrays | None


@stage(Lane.DEVICE)
def prove_codec(
    settings: Settings, loaded: LoadedCodec, proven: ProvenModel, progress: Progress
) -> ProvenCodec | Skipped[ProvenCodec]:
    """Give the codec that may be served; raises WarmupError naming sample, output and difference.

    The model's answers to tensors are proven already. Here the codec answers twice, the same both times, and as its
    samples say where they say it.
    """
    if loaded.codec is None or loaded.raw is None:
        return Skipped(ProvenCodec(None), "model.codec is not set")
    samples = loaded.codec.samples()
    if not samples:
        raise WarmupError(f"model.codec {settings.model.codec} has no samples, so nothing of it can be proven")
    progress.expect(len(samples), "samples")
    known = 0
    for number, (given, expected) in enumerate(samples):
        inputs = _arrays(loaded.raw, given, f"sample {number}")
        answers = [_answer(proven.forward, loaded, inputs, number) for _ in range(TIMES)]
        right = answers[0] if expected is None else expected
        known += expected is not None
        for answer in answers:
            difference = compare(answer, right, settings.warmup.tolerance)
            if not difference.holds:
                raise WarmupError(f"model.codec {settings.model.codec}, sample {number}: {difference.why}")
        progress.advance()
    progress.say(f"{len(samples)} samples, {known} of them with answers that are known to be right")
    return ProvenCodec(_arrays(loaded.raw, samples[0][0], "sample 0"))


def _arrays(raw: ModelPath, given: Arrays, what: str) -> Arrays:
    names = {spec.name for spec in raw.inputs}
    if set(given) != names:
        raise WarmupError(f"{what} of the codec gives {sorted(given)}, its inputs are {sorted(names)}")
    return {spec.name: as_array(given[spec.name], spec) for spec in raw.inputs}


def _answer(forward: Forward, loaded: LoadedCodec, inputs: Arrays, number: int) -> Arrays:
    try:
        tensors = encoded(loaded, inputs)
        path = next(iter(forward.paths.values()))
        route: Route = forward.route(path.name, measure(path.inputs, tensors))
    except Rejected as rejected:
        raise WarmupError(f"sample {number} of the codec is refused: {rejected}") from rejected
    return loaded.decode(forward(tensors, route))
