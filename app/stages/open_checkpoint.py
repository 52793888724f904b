"""Find the checkpoint's format and validate every header before the model is touched."""

import time
from pathlib import Path

from app import checkpoints
from app.checkpoints import Checkpoint
from app.graph import Lane, stage
from app.progress import Progress
from app.settings import Settings
from app.units import bytes_text


@stage(Lane.DISK)
def open_checkpoint(settings: Settings, progress: Progress) -> Checkpoint:
    """Give a checkpoint whose headers agree with each other, with the index and with the sizes of the files."""
    model = settings.model
    _wait_for(model.checkpoint, model.wait_s, progress)
    found = checkpoints.open_checkpoint(model.checkpoint, model.trust_pickle)
    told = f"{found.format}, {len(found.files)} file(s), {len(found.tensors)} tensors, {bytes_text(found.nbytes)}"
    progress.say("; ".join([told, *found.notes]))
    return found


def _wait_for(path: Path, wait_s: float, progress: Progress) -> None:
    """Give whoever brings the checkpoint (an init job, a model container) time to put it there."""
    until = time.monotonic() + wait_s
    while not path.exists() and (left := until - time.monotonic()) > 0:
        progress.check()
        progress.say(f"waiting for {path}, {left:.0f} s left")
        time.sleep(min(0.2, left))
