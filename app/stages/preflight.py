"""Refuse a start that cannot fit into memory before anything large is done."""

from dataclasses import dataclass

from app import ledger
from app.checkpoints import Checkpoint
from app.errors import ResourceError
from app.graph import Lane, stage
from app.ledger import Row
from app.progress import Progress
from app.settings import Settings
from app.units import bytes_text


@dataclass(frozen=True, slots=True)
class Preflight:
    """The weights fit beside what is in use already."""

    rows: tuple[Row, ...]


@stage(Lane.DISK)
def preflight(settings: Settings, checkpoint: Checkpoint, progress: Progress) -> Preflight:
    """Give the planned ledger; raises ResourceError with need, limit and what is in use."""
    limit = min(ledger.host_limit_bytes(), settings.memory.host_limit_bytes or ledger.host_limit_bytes())
    used = ledger.host_used_bytes()
    need = checkpoint.nbytes + int(limit * settings.memory.reserve_ratio)
    if need + used > limit:
        raise ResourceError(
            f"{checkpoint.path}: {checkpoint.nbytes} bytes of weights and a reserve of "
            f"{int(limit * settings.memory.reserve_ratio)} do not fit into {limit} bytes of host memory with {used} in "
            f"use; raise the memory limit (or memory.host_limit_bytes), or lower memory.reserve_ratio"
        )
    progress.say(f"{bytes_text(checkpoint.nbytes)} of weights, {bytes_text(limit - used)} free of {bytes_text(limit)}")
    return Preflight((Row("checkpoint_mapped", planned_bytes=checkpoint.nbytes), Row("staging", planned_bytes=0)))
