"""Look for compiled code of exactly this identity, and verify it before anything of it is loaded."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from app.artifacts import Missed, Restored
from app.artifacts.collect import collect
from app.artifacts.opening import open_store
from app.checkpoints import Checkpoint
from app.devices import AcquiredDevice
from app.graph import Lane, stage
from app.progress import Progress
from app.runtime import Runtime
from app.settings import Settings

log = logging.getLogger("warmgate.artifacts")

# What `compile.engine` allows, the best first.
ENGINES: Mapping[str, tuple[str, ...]] = {
    "auto": ("aot", "jit"),
    "aot": ("aot",),
    "jit": ("jit",),
    "eager": ("eager",),
}


@stage(Lane.DISK)
def find_artifact(
    settings: Settings, checkpoint: Checkpoint, runtime: Runtime, device: AcquiredDevice, progress: Progress
) -> Restored | Missed:
    """Give a verified artifact, or why there is none; nothing about the identity is ever skipped to get a hit."""
    engines = ENGINES[settings.compile.engine]
    identities = {one: collect(settings, checkpoint, runtime.fields, device.fingerprint, one) for one in engines}
    if settings.compile.engine == "eager":
        return Missed(identities["eager"], "compile.engine is eager: no code is looked for")
    store, missed = open_store(settings.compile), []
    for engine, identity in identities.items():
        found = store.find(identity, settings.model.checkpoint)
        if isinstance(found, Restored):
            store.mark_used(identity)
            progress.say(f"hit {identity.key()[:12]}, {engine}")
            return found
        missed.append(found)
    progress.say(missed[0].why)
    log.info("artifact %s missed: %s", missed[0].identity.key()[:12], "; ".join(missed[0].differences) or missed[0].why)
    return replace(missed[0], identities=identities)
