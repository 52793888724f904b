"""Make the checkpoint resident while torch is being imported."""

import os

from app.checkpoints import Checkpoint
from app.graph import Lane, stage
from app.progress import Progress
from app.settings import Settings
from app.stages.preflight import Preflight
from app.units import bytes_text
from app.weights import ResidentWeights
from app.weights.reading import read_resident


@stage(Lane.DISK)
def read_weights(settings: Settings, checkpoint: Checkpoint, fits: Preflight, progress: Progress) -> ResidentWeights:
    """Give weights whose every page is in memory and whose content is known by its digest."""
    del settings, fits
    # More threads than processors do not hash faster, and four keep a local disk busy.
    read = read_resident(checkpoint, progress, threads=max(1, min(4, len(os.sched_getaffinity(0)))))
    progress.say(f"{bytes_text(round(read.bytes_read / read.seconds))}/s, file cache was {read.file_cache}")
    return read
