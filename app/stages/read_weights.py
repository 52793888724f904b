"""Make the checkpoint resident while torch is being imported."""

from app.checkpoints import Checkpoint
from app.errors import CheckpointError
from app.graph import Lane, stage
from app.logs import log
from app.progress import Progress
from app.settings import Settings
from app.stages.preflight import Preflight
from app.units import bytes_text
from app.weights import ResidentWeights
from app.weights.choosing import probe_mapping
from app.weights.page_cache import cached_shares
from app.weights.reading import read_resident


@stage(Lane.DISK)
def read_weights(settings: Settings, checkpoint: Checkpoint, plan: Preflight, progress: Progress) -> ResidentWeights:
    """Give weights whose every byte is in memory, mapped or in memory of our own; raises CheckpointError."""
    if checkpoint.headers_only:
        raise CheckpointError(f"{checkpoint.path} has headers only, for `build`; name the whole checkpoint")
    layout = plan.choice.layout
    # Before the probe: it brings in up to 128 MiB, and a cold file would be told as a warm one.
    cached = cached_shares(checkpoint)
    if plan.choice.measure:
        layout = probe_mapping(checkpoint, layout, settings.model.cast)
    read = read_resident(checkpoint, layout, progress, settings.memory.staging_bytes, plan.digests, cached)
    for warning in read.warnings:
        log.warning("weights: %s", warning)
    rate = bytes_text(round(read.bytes_read / read.seconds))
    verified = f", sha256 of {len(read.verified)} file(s) verified" if read.verified else ""
    past = f", {bytes_text(read.direct_bytes)} read past it" if read.direct_bytes else ""
    progress.say(f"{layout.mode} ({layout.why}), {rate}/s, file cache was {read.file_cache}{past}{verified}")
    return read
