"""Have the right answers: the record of an earlier comparison, or the module itself in a child process."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app import child
from app.artifacts import Missed, Restored, golden
from app.devices import AcquiredDevice
from app.errors import WarmupError
from app.graph import Lane, Skipped, stage
from app.progress import Progress
from app.servable import Array
from app.settings import Settings
from app.weights import ResidentWeights


@dataclass(frozen=True, slots=True)
class Reference:
    """Right answers by case; `kind` is golden, reference, or none where the module itself will serve."""

    kind: str
    cases: Mapping[str, Mapping[str, Array]]


@stage(Lane.PROCESS)
def compute_reference(
    settings: Settings, lookup: Restored | Missed, resident: ResidentWeights, device: AcquiredDevice, progress: Progress
) -> Reference | Skipped[Reference]:
    """Give the answers that compiled code must equal; raises CheckpointError when weights and model do not fit.

    Runs beside the build, once the weights are in memory: the child maps the same memory and copies none.
    """
    if isinstance(lookup, Restored):
        if recorded := golden.recall(lookup.artifact, resident.fingerprint):
            return Skipped(Reference("golden", recorded), "recorded for these weights by an earlier start")
    elif settings.compile.engine == "eager":
        return Skipped(Reference("none", {}), "the module itself serves")
    return Reference("reference", from_child(settings, resident, device.device.threads, progress))


def from_child(settings: Settings, resident: ResidentWeights, threads: int, progress: Progress) -> golden.Golden:
    """Run the module in a child process on the sample inputs of every bucket; it maps the weights that are here."""
    slab = resident.memory.slab_file
    stamps = tuple(file.stamp for file in resident.checkpoint.files)
    memory = child.Resident(resident.memory.layout.mode, None if slab is None else slab.fileno(), stamps)
    try:
        with tempfile.TemporaryDirectory(prefix="warmgate-") as temporary:
            child.run("reference", settings, Path(temporary), threads, progress, memory)
            return golden.read(Path(temporary) / golden.FILE)
    except OSError as error:
        raise WarmupError(f"the reference needs a writable temporary directory: {error}") from error
