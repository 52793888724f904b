"""Codecs: what turns raw inputs (texts, files) into the model's tensors, and its outputs back; written by users.

A codec is a class; its methods are called from several threads at once and never on the event loop.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from app.errors import SettingsError, WarmupError
from app.paths import ModelPath
from app.servable import BYTES, DATATYPES, Array, Rejected, TensorSpec
from app.settings import Model

Arrays = Mapping[str, Array]


class Codec(Protocol):
    """What `model.codec` names.

    `inputs`: rows like those of the configuration (`name`, `datatype`, `shape`); elements of BYTES are Python's bytes.
    A class may also have `outputs`, rows of the same kind, and `decode`, from the model's outputs to those.
    """

    inputs: Sequence[Mapping[str, Any]]

    def encode(self, inputs: Arrays) -> Arrays:
        """Return the model's input tensors for one request; raises ValueError, which the client is told."""

    def samples(self) -> Sequence[Arrays]:
        """Return inputs to warm up and to prove with; of the right outputs the model's own module is the source."""


class DecodingCodec(Codec, Protocol):
    """A codec whose answers are not the model's own outputs."""

    outputs: Sequence[Mapping[str, Any]]

    def decode(self, outputs: Arrays) -> Arrays:
        """Return the answer for one request from the model's outputs for it."""


@dataclass(frozen=True, slots=True)
class LoadedCodec:
    """A codec and the form of requests that it serves beside that of plain tensors; both None where there is none."""

    codec: Codec | None
    raw: ModelPath | None

    def samples(self) -> tuple[Arrays, ...]:
        """Return the codec's samples as a request would give them; raises WarmupError where there are none."""
        if self.codec is None or self.raw is None:
            return ()
        if not (found := self.codec.samples()):
            raise WarmupError("model.codec has no samples, so nothing of it can be proven")
        return tuple(_sample(self.raw, given, case_name(number)) for number, given in enumerate(found))

    def encode(self, inputs: Arrays) -> Arrays:
        """Return the model's tensors; what the codec cannot take is the client's mistake (Rejected, 400)."""
        if self.codec is None:
            raise TypeError("there is no codec")
        try:
            return self.codec.encode(inputs)
        except ValueError as error:
            raise Rejected(400, f"the codec cannot take the input: {error}") from error

    def decode(self, outputs: Arrays) -> Arrays:
        """Return the answer; raises TypeError where it is not what the codec declares."""
        decode = getattr(self.codec, "decode", None)
        if decode is None or self.raw is None:
            return outputs
        found: Arrays = decode(outputs)
        for spec in self.raw.outputs:
            array = found.get(spec.name)
            if array is None or array.dtype != spec.dtype or array.ndim != len(spec.shape):
                given = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise TypeError(f"the codec gives {given} for {spec.name}, declared is {spec.datatype} {spec.shape}")
        return found


NO_CODEC = LoadedCodec(None, None)


def case_name(number: int) -> str:
    """Name a sample, in what is told and among the right answers."""
    return f"codec sample {number}"


def load(model: Model, path: ModelPath) -> LoadedCodec:
    """Import and make the codec of a model, which serves its first path; raises SettingsError."""
    if model.codec is None:
        return NO_CODEC
    module, _, name = model.codec.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
        codec = kind(**model.codec_kwargs)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"model.codec = {model.codec!r} cannot be imported ({error}); is its package installed and on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise SettingsError(f"model.codec {model.codec} raised {type(error).__name__}: {error}") from error
    return declared(codec, model.codec, path)


def declared(codec: Any, name: str, path: ModelPath) -> LoadedCodec:
    """Return a codec with its form of requests; raises SettingsError naming what it lacks or declares wrongly."""
    decodes = hasattr(codec, "decode") or hasattr(codec, "outputs")
    needed = ("inputs", "encode", "samples", *(("outputs", "decode") if decodes else ()))
    if missing := [member for member in needed if getattr(codec, member, None) is None]:
        raise SettingsError(f"model.codec {name} lacks {', '.join(missing)}")
    inputs = _specs(codec.inputs, f"model.codec {name}: inputs")
    outputs = _specs(codec.outputs, f"model.codec {name}: outputs") if decodes else path.outputs
    if same := {spec.name for spec in inputs} & {spec.name for spec in path.inputs}:
        raise SettingsError(f"model.codec {name}: inputs {', '.join(sorted(same))} are the model's own; choose others")
    if not inputs:
        raise SettingsError(f"model.codec {name}: inputs are empty")
    return LoadedCodec(codec, ModelPath(path.name, inputs, outputs, (), ()))


def chosen(path: ModelPath, raw: ModelPath | None, given: Any) -> ModelPath:
    """Return the form of a request by the names of its inputs: raw where all of them are the codec's."""
    if raw is None or path.name != raw.name or not given:
        return path
    return raw if set(given) <= {spec.name for spec in raw.inputs} else path


def as_array(values: Any, spec: TensorSpec) -> Array:
    """Return a codec's sample as the array that a request would give: texts may stand for their UTF-8 bytes."""
    if spec.datatype != BYTES:
        return np.asarray(values, spec.dtype)
    texts = np.asarray(values, object)
    made: Array = np.empty(texts.shape, object)
    made.reshape(-1)[:] = [one.encode() if isinstance(one, str) else one for one in texts.reshape(-1)]
    return made


def _sample(raw: ModelPath, given: Arrays, what: str) -> Arrays:
    names = {spec.name for spec in raw.inputs}
    if set(given) != names:
        raise WarmupError(f"{what} gives {sorted(given)}, the codec's inputs are {sorted(names)}")
    return {spec.name: as_array(given[spec.name], spec) for spec in raw.inputs}


def _specs(rows: Any, what: str) -> tuple[TensorSpec, ...]:
    try:
        return tuple(_spec(**row) for row in rows)
    except (TypeError, ValueError) as error:
        datatypes = ", ".join(DATATYPES)
        raise SettingsError(f"{what} = {rows!r}: rows of name, shape and datatype, one of {datatypes}") from error


def _spec(name: str, datatype: str, shape: Sequence[str | int]) -> TensorSpec:
    if not isinstance(name, str) or datatype not in DATATYPES or isinstance(shape, str):
        raise ValueError(name)
    return TensorSpec(name, datatype, tuple(shape))
