"""torch.compile for models that cannot be exported: traced in each process, compiled once for a whole fleet."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from app.artifacts import Artifact, Layer
from app.buckets import Bucket
from app.engines import _inductor
from app.engines._compiler import Compiler
from app.engines.eager import EagerEngine, method_of, tensors_of
from app.errors import ArtifactError
from app.weights import LoadedModel


class JitEngine:
    """The compiled module, one graph a bucket; what cannot be traced between them runs as it is written."""

    plugin = True
    name = "jit"

    def __init__(self, module: nn.Module, read_only: frozenset[str], live: Path, expected: dict[str, int]) -> None:
        self._eager = EagerEngine(module, read_only)
        self._module = module
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._live, self._expected = live, expected
        self._before = _inductor.objects(live)

    @classmethod
    def open(cls, model: LoadedModel, artifact: Artifact | None) -> Self:
        """Restore the sealed caches and wrap the installed module; raises ArtifactError."""
        if artifact is None or model.module is None:
            raise ArtifactError("the jit engine needs an artifact and the installed module")
        Compiler(artifact.content["compiler"]).answer()
        live = _inductor.prepare(artifact.identity.key(), len(artifact.content["buckets"]), threads=1)
        _inductor.restore(artifact.path, live)
        expected = {layer["name"]: layer["count"] for layer in artifact.content["layers"]}
        return cls(model.module, model.read_only, live, expected)

    @property
    def dynamic(self) -> bool:
        """A shape that is no bucket would be compiled in a request."""
        return False

    def restore_buffers(self) -> tuple[str, ...]:
        """Put back the buffers that forward has changed."""
        return self._eager.restore_buffers()

    def layers(self) -> tuple[Layer, ...]:
        """Say what torch's caches did in this process so far."""
        return _inductor.layers(self._before, _inductor.objects(self._live), self._expected)

    def run(self, inputs: Sequence[torch.Tensor], path: str, bucket: Bucket | None) -> Sequence[torch.Tensor]:
        """Call the compiled module, or the compiled method of a path, and flatten what it returns."""
        del bucket
        if path not in self._compiled:
            self._compiled[path] = torch.compile(method_of(self._module, path), dynamic=False)
        return tensors_of(self._compiled[path](*inputs))
