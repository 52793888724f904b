"""Send a request through everything that a client's request meets, before a client does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.errors import WarmupError
from app.graph import Lane, Skipped, stage
from app.paths import ModelPath
from app.progress import Progress
from app.servable import Array
from app.serving.forward import Forward
from app.stages.prove_answers import ProvenModel
from app.stages.prove_codec import ProvenCodec
from app.stages.warm_buckets import WarmEngine

TIMES = 2


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Sends arrays for a path to the application as a client would and returns the status of its answer."""

    send: Callable[[ProvenModel, ModelPath, Mapping[str, Array]], int]


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A proven model behind an application that has answered with it."""

    forward: Forward


@stage(Lane.DISK)
def rehearse_requests(
    proven: ProvenModel, warm: WarmEngine, codec: ProvenCodec, rehearsal: Rehearsal, progress: Progress
) -> ReadyModel | Skipped[ReadyModel]:
    """Give the model that may be served; raises WarmupError when the application does not answer with it.

    The engine is warm already; here the socket, the routing, the decoding and the encoding run for the first time.
    """
    smallest = min(proven.forward.buckets, key=lambda bucket: bucket.volume)
    requests = [(f"bucket {smallest.name}", smallest.path, warm.inputs[smallest.name])]
    if codec.sample is not None:
        requests.append(("the codec's first sample", next(iter(proven.forward.paths)), codec.sample))
    progress.expect(TIMES * len(requests), "requests")
    for what, path, arrays in requests * TIMES:
        status = rehearsal.send(proven, proven.forward.paths[path], arrays)
        if status == 413:
            return Skipped(ReadyModel(proven.forward), f"{what} is larger than serving.max_body_bytes as JSON")
        if status != 200:
            raise WarmupError(f"a request for {what} was answered with {status}; the log has the reason")
        progress.advance()
    return ReadyModel(proven.forward)
