"""Choose how a checkpoint is read: by what its file system is known to be, else by measuring it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.checkpoints import Checkpoint, CheckpointFile, fill
from app.units import bytes_text
from app.weights.filesystems import FileSystem, Reach, farthest, file_systems
from app.weights.layout import Layout, Mode, plan_layout
from app.weights.memory import POPULATE_READ, Memory, address_of, can_populate, populate
from app.weights.reading import CALL

# How much of a file a mapping of unknown speed is judged by, and below which share of plain reading it is given up.
PROBE = 64 << 20
ENOUGH = 0.5
# What is smaller is noise; copying it costs nothing.
SMALLEST_PROBE = 8 << 20
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, and what is known of where the files lie.

    `measure`: the mapping is to be measured (`probe_mapping`) before it is relied on. `in_memory`: the files are memory
    themselves, so that mapping them takes none.
    """

    layout: Layout
    measure: bool = False
    in_memory: bool = False


def choose_layout(checkpoint: Checkpoint, wanted: str, cast: str | None) -> Choice:
    """Return how a checkpoint is to be read; `wanted` is auto, map or read, `cast` as for `plan_layout`."""
    if not checkpoint.files:
        return Choice(plan_layout(checkpoint, "map", "there is nothing to read", cast))
    systems = file_systems(file.path for file in checkpoint.files)
    system = farthest(systems)
    measure = False
    if wanted == "auto":
        mode, why, measure = _judge(system, max(file.size for file in checkpoint.files))
    else:
        mode, why = "map" if wanted == "map" else "read", f"model.reading is {wanted}"
    in_memory = all(one.type in IN_MEMORY for one in systems)
    return Choice(plan_layout(checkpoint, mode, why, cast), measure, in_memory)


def _judge(system: FileSystem, largest: int) -> tuple[Mode, str, bool]:
    """Return the mode, the reason, and whether it is to be measured."""
    where = f"{system.mount_point} is {system.type}"
    if system.reach is Reach.NETWORK:
        return "read", f"{where}, a network file system", False
    if not can_populate():
        return "read", "this kernel, before 5.14, cannot bring a mapping into memory with faults as errors", False
    if system.reach is Reach.LOCAL:
        return "map", f"{where}, a local file system", False
    if largest < SMALLEST_PROBE:
        return "read", f"{where}, not known to be local, and too small to measure", False
    return "map", f"{where}, not known to be local", True


def probe_mapping(
    checkpoint: Checkpoint, layout: Layout, cast: str | None, clock: Callable[[], float] = time.perf_counter
) -> Layout:
    """Measure a mapping on the first 64 MiB of the largest file against reading the next 64 MiB.

    Returns the layout with the figures in its reason, or one that reads where the mapping was slow. Raises
    CheckpointError where the file cannot be read.
    """
    number = max(layout.mapped, key=lambda one: checkpoint.files[one].size, default=None)
    if number is None:
        return layout
    file = checkpoint.files[number]
    size = min(PROBE, file.size // 2)
    mapping = Memory.reserve(checkpoint, layout).maps[number]
    began = clock()
    failed = populate(address_of(mapping), size, POPULATE_READ)
    mapped_s = clock() - began
    read_s = _reading_s(file, size, clock)
    told = f"{layout.why}; measured: {_rate(size, mapped_s)} mapped, {_rate(size, read_s)} read"
    slow = bool(failed) or mapped_s * ENOUGH > read_s
    return plan_layout(checkpoint, "read" if slow else "map", told, cast)


def _reading_s(file: CheckpointFile, size: int, clock: Callable[[], float]) -> float:
    scratch = memoryview(bytearray(min(CALL, max(1, size))))
    began = clock()
    for offset in range(size, 2 * size, len(scratch)):
        fill(file, scratch[: min(len(scratch), 2 * size - offset)], offset)
    return clock() - began


def _rate(size: int, seconds: float) -> str:
    return f"{bytes_text(round(size / seconds) if seconds else size)}/s"
