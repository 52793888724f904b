"""Look for compiled code of exactly this identity, and verify it before anything of it is loaded."""

import logging

from app.artifacts import Missed, Restored
from app.artifacts.collect import collect
from app.artifacts.store import Store
from app.checkpoints import Checkpoint
from app.devices import AcquiredDevice
from app.graph import Lane, stage
from app.progress import Progress
from app.runtime import Runtime
from app.settings import Settings

log = logging.getLogger("warmgate.artifacts")


@stage(Lane.DISK)
def find_artifact(
    settings: Settings, checkpoint: Checkpoint, runtime: Runtime, device: AcquiredDevice, progress: Progress
) -> Restored | Missed:
    """Give a verified artifact, or why there is none; nothing about the identity is ever skipped to get a hit."""
    identity = collect(settings, checkpoint, runtime.fields, device.fingerprint)
    if settings.compile.engine == "eager":
        return Missed(identity, "compile.engine is eager: no code is looked for")
    found = Store(settings.compile.artifacts).find(identity, settings.model.checkpoint)
    progress.say(f"hit {identity.key()[:12]}" if isinstance(found, Restored) else found.why)
    if isinstance(found, Missed):
        log.info("artifact %s missed: %s", identity.key()[:12], "; ".join(found.differences) or found.why)
    return found
