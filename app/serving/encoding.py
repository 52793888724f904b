"""A codec's own samples as tensors that the model can be run on."""

from app.buckets import Route
from app.codecs import Arrays, LoadedCodec, case_name
from app.errors import WarmupError
from app.servable import Rejected
from app.serving.forward import Forward, measure


def encoded_sample(forward: Forward, loaded: LoadedCodec, raw: Arrays, number: int) -> tuple[Arrays, Route]:
    """Return the tensors of a sample and how they are run; raises WarmupError where they cannot be."""
    try:
        tensors = loaded.encode(raw)
        path = next(iter(forward.paths.values()))
        return tensors, forward.route(path.name, measure(path.inputs, tensors))
    except Rejected as rejected:
        raise WarmupError(f"{case_name(number)} is refused: {rejected}") from rejected
