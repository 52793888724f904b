"""Codecs for tests: one that also turns outputs back, and such as are wrong in one way each."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


class Numbers:
    """Texts of sixteen numbers for the tiny model; the answer is the name of the largest output."""

    inputs: Sequence[Mapping[str, Any]] = ({"name": "numbers", "datatype": "BYTES", "shape": ["batch"]},)
    outputs: Sequence[Mapping[str, Any]] = (
        {"name": "label", "datatype": "BYTES", "shape": ["batch"]},
        {"name": "score", "datatype": "FP32", "shape": ["batch"]},
    )

    def __init__(self, labels: Sequence[str] = ("north", "east", "south", "west")) -> None:
        self._labels = [label.encode() for label in labels]

    def encode(self, inputs: Arrays) -> Arrays:
        rows = [[float(word) for word in text.split()] for text in inputs["numbers"]]
        return {"x": np.array(rows, np.float32)}

    def decode(self, outputs: Arrays) -> Arrays:
        best = outputs["y"].argmax(axis=1)
        labels = np.empty(len(best), object)
        labels[:] = [self._labels[one] for one in best]
        return {"label": labels, "score": outputs["y"].max(axis=1)}

    def samples(self) -> Sequence[Arrays]:
        return [{"numbers": ["0.5 " * 16]}, {"numbers": ["1 " * 16, "2 " * 16]}]


class Elsewhere(Numbers):
    """Has other samples than it had before."""

    def samples(self) -> Sequence[Arrays]:
        return [{"numbers": ["3 " * 16]}]


class Moody(Numbers):
    """Decodes otherwise each time."""

    calls = 0

    def decode(self, outputs: Arrays) -> Arrays:
        Moody.calls += 1
        return {**super().decode(outputs), "score": outputs["y"].max(axis=1) + Moody.calls}


class Fickle(Numbers):
    """Encodes otherwise each time."""

    calls = 0

    def encode(self, inputs: Arrays) -> Arrays:
        Fickle.calls += 1
        return {"x": super().encode(inputs)["x"] + Fickle.calls}


class Short(Numbers):
    """Makes tensors that the model does not take."""

    def encode(self, inputs: Arrays) -> Arrays:
        return {"x": super().encode(inputs)["x"][:, :3]}


class Silent(Numbers):
    """Has nothing to prove."""

    def samples(self) -> Sequence[Arrays]:
        return []


class Misnamed(Numbers):
    """Has a sample of something else."""

    def samples(self) -> Sequence[Arrays]:
        return [{"text": ["1"]}]


class Lacking:
    """Takes something and does nothing."""

    inputs = Numbers.inputs


class Breaking(Numbers):
    """Breaks on a word, with a message that holds what was asked, and never comes back from another."""

    def encode(self, inputs: Arrays) -> Arrays:
        if any(b"hang" in text for text in inputs["numbers"]):
            time.sleep(3600)
        if any(b"break" in text for text in inputs["numbers"]):
            raise RuntimeError(f"cannot take {inputs['numbers'].tolist()}")
        return super().encode(inputs)
