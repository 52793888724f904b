"""AOTInductor packages: no Dynamo, no compiler, weights by reference."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

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
    """Compiled packages: for each path one for the whole range, or one a bucket."""

    plugin = True
    name = "aot"

    def __init__(self, runners: Mapping[tuple[str, str | None], Runner], kept: object) -> None:
        self._runners = runners
        self._kept = kept  # the packages hold bare pointers into these tensors

    @classmethod
    def open(cls, model: LoadedModel, artifact: Artifact | None) -> Self:
        """Open every package and give it its constants; raises ArtifactError when one is unknown."""
        if artifact is None:
            raise ArtifactError("the aot engine needs an artifact")
        runners = {
            (package["path"], package["bucket"]): _open(artifact.path / package["library"], package, model.tensors)
            for package in artifact.content["packages"]
        }
        return cls(runners, model.tensors)

    @property
    def dynamic(self) -> bool:
        """One package a path for its whole range."""
        return any(bucket is None for _, bucket in self._runners)

    def restore_buffers(self) -> tuple[str, ...]:
        """None: a program that changes buffers is refused when it is built."""
        return ()

    def layers(self) -> tuple[Layer, ...]:
        """None of torch's caches: the package is machine code."""
        return bypassed("the package needs none")

    def run(self, inputs: Sequence[torch.Tensor], path: str, bucket: Bucket | None) -> Sequence[torch.Tensor]:
        """Run the package of the bucket, or the path's one for the whole range."""
        runner = self._runners[path, None if self.dynamic or bucket is None else bucket.name]
        return runner.run(list(inputs))


def _open(library: Path, package: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> Runner:
    """Open one package; all names are checked first, since a run without its constants is a segmentation fault.

    Where it is `proxied`, some operators have no C interface and go through an executor that only torch's own runner
    makes. Such a package, and any whose C interface cannot bind constants, runs correctly but keeps the interpreter
    lock.
    """
    container, names = Container.open(library), package["constants"]
    if package["proxied"] or not container.binds_by_reference:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        bound = _match(runner.get_constant_names_to_original_fqns(), names, constants, library)
        # use_inactive False, validate_full_updates True, user_managed True: pointers are stored, nothing is copied.
        runner.update_constant_buffer(bound, False, True, True)
        return runner  # type: ignore[no-any-return]
    container.bind(_match(container.constants(), names, constants, library))
    return container


def _match(
    wanted: Iterable[str], names: Mapping[str, str], constants: Mapping[str, torch.Tensor], library: Path
) -> dict[str, torch.Tensor]:
    """Return a tensor for each constant; `names`: the library's own → those of the module and of the artifact."""
    lacking = sorted(names.get(own, own) for own in wanted if names.get(own) not in constants)
    if lacking:
        raise ArtifactError(f"{library} wants constants that nothing holds: {', '.join(lacking)}; build it anew")
    return {own: constants[names[own]] for own in wanted}


def stored_constants(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Return the values that travel with the artifact because no checkpoint holds them."""
    return dict(load_file(artifact.path / CONSTANTS))
