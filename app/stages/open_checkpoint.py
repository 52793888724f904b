"""Find the checkpoint's format and validate every header before the model is touched."""

import time

from app import checkpoints
from app.checkpoints import Checkpoint
from app.errors import CheckpointError
from app.graph import Lane, stage
from app.progress import Progress, reads_of_this_thread
from app.settings import Settings
from app.units import bytes_text


@stage(Lane.DISK)
def open_checkpoint(settings: Settings, progress: Progress) -> Checkpoint:
    """Give a checkpoint whose headers agree with each other, with the index and with the sizes of the files."""
    progress.observe(reads_of_this_thread())
    found = _open(settings, progress)
    told = f"{found.format}, {len(found.files)} file(s), {len(found.tensors)} tensors, {bytes_text(found.nbytes)}"
    progress.say("; ".join([told, *found.notes]))
    return found


def _open(settings: Settings, progress: Progress) -> Checkpoint:
    """Give whoever brings the checkpoint (a job, a model container) the configured time to complete it."""
    model = settings.model
    until = time.monotonic() + model.wait_s
    while True:
        try:
            return checkpoints.open_checkpoint(model.checkpoint, model.trust_pickle)
        except CheckpointError as error:
            left = until - time.monotonic()
            if left <= 0:
                raise
            progress.check()
            progress.say(f"waiting for {model.checkpoint}, {left:.0f} s left: {str(error).splitlines()[0]}")
            time.sleep(min(0.5, left))
