"""On a miss, build the artifact in a child process beside the reading of the weights."""

import logging

from app import child
from app.artifacts import Artifact, Compiled, Layer, Missed, Restored, Uncompiled
from app.artifacts.opening import open_store, sign_built, store_of_this_process, why_not_kept
from app.artifacts.seal import seal
from app.devices import AcquiredDevice
from app.errors import ArtifactError
from app.graph import Lane, Skipped, stage
from app.progress import Progress
from app.settings import Settings

log = logging.getLogger("warmgate.builder")


@stage(Lane.PROCESS)
def build_artifact(
    settings: Settings, lookup: Restored | Missed, device: AcquiredDevice, progress: Progress
) -> Compiled | Uncompiled | Skipped[Compiled | Uncompiled]:
    """Give code to open, or (engine eager or auto) the reason why the module runs as it is written.

    Raises ArtifactError when code was demanded and is not to be had.
    """
    if isinstance(lookup, Restored):
        return Skipped(Compiled(lookup.artifact, "restored", lookup.layers), "the artifact was restored")
    if settings.compile.engine == "eager":
        return Skipped(Uncompiled(lookup.why, lookup.layers), lookup.why)
    if settings.compile.on_miss == "fail":
        differences = "; ".join(lookup.differences[:5])
        raise ArtifactError(
            f"no artifact in {settings.compile.artifacts} ({lookup.why}) and compile.on_miss is fail; "
            f"build it with `warmgate build`{': ' + differences if differences else ''}"
        )
    try:
        artifact = _build(settings, lookup, device.device.threads, progress)
    except ArtifactError as error:
        if settings.compile.engine != "auto":
            raise
        log.warning("the module will run as it is written: %s", error)
        why = str(error)
        progress.say(f"eager instead of aot: {why}")
        layers = (*lookup.layers, Layer("aot-package", "bypass", why))
        return Uncompiled(f"the aot engine could not be built: {why}", layers)
    alone = why_not_kept(settings.compile)
    told = f"built by this start, for this process alone: {alone}" if alone else "built by this start"
    layers = (*lookup.layers, Layer("aot-package", "miss", told, len(artifact.content["packages"])))
    return Compiled(artifact, "rebuilt", layers, lookup.differences)


def _build(settings: Settings, lookup: Missed, threads: int, progress: Progress) -> Artifact:
    alone = why_not_kept(settings.compile)
    if alone:
        log.warning("what is built serves this process alone and is not kept: %s", alone)
    store = store_of_this_process() if alone else open_store(settings.compile)
    with store.workspace() as workspace:
        payload = workspace / "payload"
        payload.mkdir()
        content = child.run("build", settings, payload, threads, progress)
        try:
            seal(payload, lookup.identity, content)
            sign_built(payload, settings.compile)
            if any(layer.result == "rejected" for layer in lookup.layers):
                store.set_aside(lookup.identity)
            return store.publish(payload, lookup.identity)
        except OSError as error:
            raise ArtifactError(
                f"the artifact could not be written to {store.path}: {error.strerror}; is the disk full?"
            ) from error
