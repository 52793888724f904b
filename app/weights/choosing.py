"""Choose how a checkpoint is read: by what its file system is known to be, else by measuring it."""

import time
from collections.abc import Callable

from app.checkpoints import Checkpoint, CheckpointFile
from app.units import bytes_text
from app.weights.filesystems import Reach, farthest
from app.weights.layout import Layout, Mode, plan_layout
from app.weights.memory import POPULATE_READ, Memory, address_of, populate
from app.weights.reading import CALL, fill

# How much of a file a mapping of unknown speed is judged by, and below which share of plain reading it is given up.
PROBE = 64 << 20
ENOUGH = 0.5


def choose_layout(checkpoint: Checkpoint, wanted: str, cast: str | None) -> tuple[Layout, bool]:
    """Return the layout, and whether a mapping is still to be measured (`probe_mapping`) before it is relied on.

    `wanted` is auto, map or read; `cast` as for `plan_layout`.
    """
    if wanted != "auto":
        mode: Mode = "map" if wanted == "map" else "read"
        return plan_layout(checkpoint, mode, f"model.reading is {wanted}", cast), False
    if not checkpoint.files:
        return plan_layout(checkpoint, "map", "there is nothing to read", cast), False
    system = farthest(file.path for file in checkpoint.files)
    mode = "read" if system.reach is Reach.NETWORK else "map"
    why = f"{system.mount_point} is {system.type}, a {system.reach} file system"
    if system.reach is Reach.UNKNOWN:
        why = f"{system.mount_point} is {system.type}, not known to be local"
    return plan_layout(checkpoint, mode, why, cast), system.reach is Reach.UNKNOWN


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
