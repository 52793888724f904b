"""Weights: a skeleton without data, files made resident, tensors installed by assignment."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.checkpoints import Checkpoint
from app.weights.plan import ModelTable, WeightsPlan

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ResidentWeights:
    """A checkpoint whose pages are in memory.

    `digest` is the sha256 over the sha256 of every chunk of every file, in order: equal exactly when the bytes are.
    """

    checkpoint: Checkpoint
    maps: tuple[mmap.mmap, ...]
    digest: str
    bytes_read: int
    seconds: float
    mode: str
    file_cache: str
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A module in evaluation mode whose parameters are on meta and whose buffers have their ordinary values."""

    module: "nn.Module"
    table: ModelTable


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights with data, nothing on meta; the module only where something will run it.

    `tensors`: every name a parameter or buffer is known by, ties under each of their names.
    """

    tensors: Mapping[str, "Tensor"]
    plan: WeightsPlan
    table: ModelTable
    module: "nn.Module | None"
    copied_bytes: int
