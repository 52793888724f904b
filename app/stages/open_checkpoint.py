"""Find the checkpoint's format and validate every header before the model is touched."""

from app import checkpoints
from app.checkpoints import Checkpoint
from app.graph import Lane, stage
from app.progress import Progress
from app.settings import Settings
from app.units import bytes_text


@stage(Lane.DISK)
def open_checkpoint(settings: Settings, progress: Progress) -> Checkpoint:
    """Give a checkpoint whose headers agree with each other, with the index and with the sizes of the files."""
    found = checkpoints.open_checkpoint(settings.model.checkpoint)
    progress.say(
        f"{found.format}, {len(found.files)} file(s), {len(found.tensors)} tensors, {bytes_text(found.nbytes)}"
    )
    return found
