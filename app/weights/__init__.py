"""Weights: a skeleton without data, files made resident, tensors installed by assignment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.checkpoints import PUBLISH, Checkpoint, CheckpointFile
from app.errors import CheckpointError
from app.weights.disk import DiskSpeed
from app.weights.memory import Memory
from app.weights.plan import ModelTable, WeightsPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from app.weights.aliases import Alias


@dataclass(frozen=True, slots=True)
class ResidentWeights:
    """A checkpoint whose bytes are in memory.

    `fingerprint`: sha256 over names, dtypes, shapes and samples of every tensor: other weights have another one,
    short of differences that no sample meets. `verified`: file → sha256 that was asked for and found.
    `cached_ratio`: share of the files' bytes that the page cache held before; None where a file system does not tell.
    `direct_bytes`: how many were read past the page cache. `staging_bytes`: the scratch memory that reading took, given
    back since. `resident_bytes`, `copied_bytes`: what was measured of mappings and slab; None where the kernel does not
    tell.
    """

    checkpoint: Checkpoint
    memory: Memory
    fingerprint: str
    warnings: tuple[str, ...]
    verified: Mapping[str, str]
    bytes_read: int
    seconds: float
    file_cache: str
    cached_ratio: float | None
    disk: DiskSpeed
    direct_bytes: int
    staging_bytes: int
    resident_bytes: int | None
    copied_bytes: int | None

    @property
    def mapped_files(self) -> "tuple[CheckpointFile, ...]":
        """The files whose pages are used where they are."""
        return tuple(self.checkpoint.files[number] for number in self.memory.maps)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where a mapped file is no longer what was read."""
        for file in self.mapped_files:
            if told := file.changed_in_place():
                raise CheckpointError(f"{told}, and its mapped pages are the model; {PUBLISH}")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A module in evaluation mode whose parameters are on meta and whose buffers have their ordinary values.

    `construction`: how it was built, where that was not on the meta device, and why; empty otherwise. `attributes`:
    names of plain tensor attributes that took the value of an ordinary construction. `aliases`: unstored tensors that
    show stored ones.
    """

    module: "nn.Module"
    table: ModelTable
    construction: str = ""
    attributes: tuple[str, ...] = ()
    aliases: "tuple[Alias, ...]" = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights with data, nothing on meta; the module only where something will run it.

    `tensors`: every name a parameter or buffer is known by, ties under each of their names. `copied_bytes`: what had
    to be copied. `rebuilt_bytes`, `constant_bytes`: values that no checkpoint holds. `read_only`: buffers of the module
    that cannot be written to.
    """

    tensors: Mapping[str, "Tensor"]
    plan: WeightsPlan
    table: ModelTable
    module: "nn.Module | None"
    copied_bytes: int
    rebuilt_bytes: int
    constant_bytes: int
    read_only: frozenset[str] = frozenset()
