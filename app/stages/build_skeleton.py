"""Build the module without data, where this process runs it."""

from app.artifacts import Compiled, Uncompiled
from app.graph import Lane, Skipped, stage
from app.progress import Progress
from app.runtime import Runtime, imported_modules
from app.settings import Settings
from app.weights import Skeleton


@stage(Lane.DEVICE)
def build_skeleton(
    settings: Settings, runtime: Runtime, code: Compiled | Uncompiled, progress: Progress
) -> Skeleton | Skipped[Skeleton | None] | None:
    """Give the module on meta for the engines that call it, eager and jit, or where it runs what is uncovered.

    Else AOT-compiled code does without: its artifact holds the table of tensors, the reference comes from a child, and
    the model's library, slow to import under the interpreter lock, stays out of the process that answers probes.
    """
    del runtime
    if isinstance(code, Compiled) and code.engine == "aot" and settings.uncovered != "eager":
        return Skipped(None, "compiled code runs without the module")
    from app.weights import skeleton

    progress.observe(imported_modules)
    built = skeleton.build_skeleton(settings.model, settings.configured_paths)
    rebuilt = f"{len(built.attributes)} plain attributes rebuilt" if built.attributes else ""
    progress.say("; ".join(text for text in (built.construction, rebuilt) if text))
    return built
