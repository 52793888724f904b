"""Compile artifacts: plans and kernels on disk, sealed once, verified before anything in them is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.identity import ArtifactIdentity

# The file of values that travel with the code because no checkpoint holds them.
CONSTANTS = "constants.safetensors"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one cache layer said; `result` is hit, miss, rejected or bypass."""

    name: str
    result: str
    why: str = ""
    count: int = 1


# The caches below the sealed artifact, and what is made anew in every process.
CACHES = ("dynamo", "aotautograd", "fx-graph", "autotune", "triton-bundle", "cpp-objects")
DEVICE_GRAPH = Layer("device-graph", "bypass", "a cpu has no device graphs", 0)


def bypassed(why: str) -> tuple[Layer, ...]:
    """Return the rows of an engine that none of torch's caches serves."""
    return (*(Layer(name, "bypass", why, 0) for name in CACHES), DEVICE_GRAPH)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A sealed directory whose identity, sizes and hashes have been verified; `told`: what its signature said."""

    path: Path
    identity: ArtifactIdentity
    content: Mapping[str, Any]
    told: str = ""

    @property
    def golden_directory(self) -> Path:
        """Where proven answers for this code are kept, one file for each set of weights."""
        return self.path.with_name(f"{self.path.name}.golden")


@dataclass(frozen=True, slots=True)
class Restored:
    """An artifact of exactly this identity was found and verified."""

    artifact: Artifact
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """No usable artifact: why, and how the nearest one differs; `identities`: engine → what its code must be."""

    identity: ArtifactIdentity
    why: str
    layers: tuple[Layer, ...] = ()
    differences: tuple[str, ...] = ()
    identities: Mapping[str, ArtifactIdentity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Code to open: restored as it was found, or built by this start; `why`: what spoke against a better engine."""

    artifact: Artifact
    outcome: str
    layers: tuple[Layer, ...]
    differences: tuple[str, ...] = ()
    why: str = ""

    @property
    def engine(self) -> str:
        """The engine that the code is for."""
        return str(self.artifact.content["engine"])


@dataclass(frozen=True, slots=True)
class Uncompiled:
    """The module runs as it is written, and why."""

    why: str
    layers: tuple[Layer, ...] = ()
