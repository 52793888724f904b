"""Engines: one file each; an engine runs the model on tensors that are already on the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

from app.artifacts import Artifact, Layer
from app.buckets import Bucket
from app.weights import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """Something that runs the model; used on the device lane only."""

    plugin: bool
    name: str

    @classmethod
    def open(cls, model: LoadedModel, artifact: Artifact | None) -> Self:
        """Bind weights by reference and return the engine; raises ArtifactError."""

    @property
    def dynamic(self) -> bool:
        """The code holds for every shape in the declared range, not only for the buckets."""

    def restore_buffers(self) -> tuple[str, ...]:
        """Put back, bit for bit, the module state that runs have changed; return its names."""

    def layers(self) -> tuple[Layer, ...]:
        """Say what each cache below the sealed artifact did in this process so far."""

    def run(self, inputs: Sequence["Tensor"], path: str, bucket: Bucket | None) -> Sequence["Tensor"]:
        """Run a method of the model on contiguous inputs in call order; returns its outputs in the order it has."""
