"""Import torch: a stage like any other, because it takes longer than most."""

from app.graph import Lane, stage
from app.progress import Progress
from app.runtime import Runtime, import_torch, imported_modules


@stage(Lane.DEVICE)
def import_runtime(progress: Progress) -> Runtime:
    """Give the imported runtime; its sign of life is the number of modules imported so far."""
    progress.observe(imported_modules)
    runtime = import_torch()
    progress.say(f"torch {runtime.versions['torch']}")
    return runtime
