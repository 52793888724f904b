"""Plan the memory of the weights, and refuse a start that cannot fit before anything large is done."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.checkpoints import Checkpoint
from app.errors import ResourceError
from app.graph import Lane, stage
from app.ledger import Books, Room, Row
from app.progress import Progress
from app.sampling import sampler
from app.settings import Settings
from app.units import bytes_text
from app.weights.choosing import Choice, choose_layout
from app.weights.digests import expected_digests
from app.weights.layout import Layout
from app.weights.reading import planned_staging


@dataclass(frozen=True, slots=True)
class Preflight:
    """The weights fit beside what is in use already, and how they will lie in memory; `digests`: sha256 by file."""

    choice: Choice
    digests: Mapping[str, str]
    staging_bytes: int

    def rows(self, checkpoint: Checkpoint, layout: Layout) -> tuple[Row, ...]:
        """Return the planned ledger; what only the model can tell (rebuilt buffers, constants) is not planned here."""
        return (
            Row("checkpoint_mapped", planned_bytes=sum(checkpoint.files[number].size for number in layout.mapped)),
            Row("checkpoint_resident", planned_bytes=layout.mapped_bytes),
            Row("anonymous_copies", planned_bytes=layout.slab_bytes),
            Row("staging", planned_bytes=self.staging_bytes),
        )


@stage(Lane.DISK)
def preflight(settings: Settings, checkpoint: Checkpoint, progress: Progress) -> Preflight:
    """Give the plan of memory; raises ResourceError with need, limit, what counts and what to change."""
    sampler(settings.warmup.samples, settings.model_paths)  # so that a file that cannot be used ends the start now
    choice = choose_layout(checkpoint, settings.model.reading, settings.model.cast)
    layout = choice.layout
    digests = expected_digests(settings.model.sha256, checkpoint)
    staging = planned_staging(layout, settings.memory.staging_bytes, bool(digests))
    books, ratio = Books(), settings.memory.reserve_ratio
    rooms = books.rooms()
    if (own := settings.memory.host_limit_bytes) is not None:
        rooms.append(Room("memory.host_limit_bytes", own, books.own_bytes()))
    room = min(rooms, key=lambda one: one.free_bytes - int(one.limit_bytes * ratio))
    reserve = int(room.limit_bytes * ratio)
    # The pages of a file that is memory itself count as used already.
    mapped = 0 if choice.in_memory else layout.mapped_bytes
    need = mapped + layout.slab_bytes + staging + reserve
    if need > room.free_bytes:
        raise ResourceError(
            f"{checkpoint.path} does not fit into memory: {need} bytes are needed ({mapped} mapped, "
            f"{layout.slab_bytes} copied, {staging} staging, {reserve} reserve), {room.free_bytes} are free of the "
            f"{room.limit_bytes} of {room.where} ({room.used_bytes} anonymous and shared memory in use; page cache "
            f"does not count); raise the memory limit, or lower memory.reserve_ratio"
        )
    progress.say(
        f"{layout.mode}: {layout.why}; {bytes_text(need - reserve)} of weights, {bytes_text(room.free_bytes)} free "
        f"of {bytes_text(room.limit_bytes)}"
    )
    return Preflight(choice, digests, staging)
