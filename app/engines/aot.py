"""AOTInductor packages: no Dynamo, no compiler, weights by reference."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors.torch import load_file

from app.artifacts import CONSTANTS, Artifact, Layer, bypassed
from app.buckets import Bucket
from app.engines._container import Container
from app.errors import ArtifactError
from app.weights import LoadedModel


class Runner(Protocol):
    """A loaded package that has its constants."""

    def run(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run."""


class AotEngine:
    """Compiled packages: one for the whole range, or one a bucket."""

    plugin = True
    name = "aot"

    def __init__(self, runners: Mapping[str | None, Runner], kept: object) -> None:
        self._runners = runners
        self._kept = kept  # the packages hold bare pointers into these tensors

    @classmethod
    def open(cls, model: LoadedModel, artifact: Artifact | None) -> Self:
        """Open every package and give it its constants; raises ArtifactError when one is unknown."""
        if artifact is None:
            raise ArtifactError("the aot engine needs an artifact")
        runners = {
            package["bucket"]: _open(artifact.path / package["library"], model.tensors, package["proxied"])
            for package in artifact.content["packages"]
        }
        return cls(runners, model.tensors)

    @property
    def dynamic(self) -> bool:
        """One package for the whole range."""
        return None in self._runners

    def restore_buffers(self) -> tuple[str, ...]:
        """None: a program that changes buffers is refused when it is built."""
        return ()

    def layers(self) -> tuple[Layer, ...]:
        """None of torch's caches: the package is machine code."""
        return bypassed("the package needs none")

    def run(self, inputs: Sequence[torch.Tensor], bucket: Bucket | None) -> Sequence[torch.Tensor]:
        """Run the package of the bucket, or the one for the whole range."""
        runner = self._runners[None if self.dynamic or bucket is None else bucket.name]
        return runner.run(list(inputs))


def _open(library: Path, constants: Mapping[str, torch.Tensor], proxied: bool) -> Runner:
    """Open one package; all names are checked first, since a run without its constants is a segmentation fault.

    `proxied`: some operators have no C interface and go through an executor that only torch's own runner makes. Such
    a package, and any whose C interface cannot bind constants, runs correctly but keeps the interpreter lock.
    """
    container = Container.open(library)
    if proxied or not container.binds_by_reference:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        bound = _match(runner.get_constant_names_to_original_fqns(), constants, library)
        # use_inactive False, validate_full_updates True, user_managed True: pointers are stored, nothing is copied.
        runner.update_constant_buffer(bound, False, True, True)
        return runner  # type: ignore[no-any-return]
    container.bind(_match(container.constants(), constants, library))
    return container


def _match(names: Mapping[str, str], constants: Mapping[str, torch.Tensor], library: Path) -> dict[str, torch.Tensor]:
    lacking = sorted(name for name in names.values() if name not in constants)
    if lacking:
        raise ArtifactError(f"{library} wants constants that nothing holds: {', '.join(lacking)}; build it anew")
    return {own: constants[name] for own, name in names.items()}


def stored_constants(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Return the values that travel with the artifact because no checkpoint holds them."""
    return dict(load_file(artifact.path / CONSTANTS))
