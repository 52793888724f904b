"""The module without the data of its weights, which is what code is compiled on, and what every manifest tells."""

import datetime
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.artifacts import inputs
from app.environment import compiler_version
from app.errors import ArtifactError
from app.settings import Settings
from app.weights import Skeleton
from app.weights.aliases import repoint
from app.weights.skeleton import build_skeleton, strides_of


@dataclass(frozen=True, slots=True)
class Blank:
    """A skeleton to compile, the files that its factory read (→ sha256), and when the building began."""

    settings: Settings
    skeleton: Skeleton
    factory_files: Mapping[str, str]
    began: float

    @classmethod
    def build(cls, settings: Settings) -> "Blank":
        """Build the skeleton; raises ArtifactError where no code can be compiled on it at all."""
        began = time.monotonic()
        if not any(map(shutil.which, ("g++", "c++", "clang++"))):
            raise ArtifactError("no C++ compiler on this machine (g++): restore a built artifact, or install one")
        with inputs.recording(settings.model.checkpoint) as factory_files:
            skeleton = build_skeleton(settings.model, settings.configured_paths)
        if states := skeleton.table.extra_state:
            raise ArtifactError(
                f"modules keep state beside their tensors ({', '.join(states)}), "
                "which code compiled without weights misses"
            )
        return cls(settings, skeleton, factory_files, began)

    def give_memory(self) -> None:
        """Replace tensors on meta by memory that is never touched: compilers ask for strides and devices, not values.

        Tied ones stay one object, since the graph must see them as one.
        """
        made: dict[int, torch.Tensor] = {}
        for part in self.skeleton.module.modules():
            for home in (part._parameters, part._buffers):
                for name, old in home.items():
                    if old is None or not old.is_meta:
                        continue
                    if id(old) not in made:
                        empty = torch.empty_strided(old.shape, strides_of(old), dtype=old.dtype)
                        is_parameter = isinstance(old, nn.Parameter)
                        made[id(old)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
                    home[name] = made[id(old)]
        repoint(self.skeleton.module, self.skeleton.aliases)

    def manifest(self, engine: str, layers: Sequence[Mapping[str, Any]], **own: Any) -> dict[str, Any]:
        """Return the manifest's content; `layers`: what must hit when it is restored, `own`: the engine's fields."""
        settings, skeleton = self.settings, self.skeleton
        return {
            "engine": engine,
            "packages": [],
            "constants": [],
            "constant_bytes": 0,
            "model": skeleton.table.as_json(),
            "construction": skeleton.construction,
            "rebuilt_attributes": list(skeleton.attributes),
            "factory_files": self.factory_files,
            "layers": list(layers),
            "buckets": [bucket.name for bucket in settings.buckets],
            "timings": {"build_s": time.monotonic() - self.began},
            "tools": {"cxx": compiler_version()},
            "built": {
                "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "model": settings.model.name,
                "version": settings.model.version,
            },
            **own,
        }
