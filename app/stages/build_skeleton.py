"""Build the module without data, where something will run it or compare with it."""

from app.artifacts import Missed, Restored
from app.runtime import Runtime
from app.settings import Settings
from app.startup import Lane, Progress, Skipped, stage
from app.weights import Skeleton


@stage(Lane.DEVICE)
def build_skeleton(
    settings: Settings, runtime: Runtime, lookup: Restored | Missed, progress: Progress
) -> Skeleton | None | Skipped[Skeleton | None]:
    """Give the module on meta; on a hit nothing needs it, and its library (often slow to import) stays out."""
    del runtime
    if isinstance(lookup, Restored):
        return Skipped(None, "the artifact holds the model's table of tensors")
    from app.runtime import imported_modules
    from app.weights import skeleton

    progress.observe(imported_modules)
    return skeleton.build_skeleton(settings.model)
