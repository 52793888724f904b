"""On a miss, build the artifact in a child process beside the reading of the weights."""

import logging

from app import child
from app.artifacts import Compiled, Layer, Missed, Restored, Uncompiled
from app.artifacts.flight import flight
from app.artifacts.seal import seal
from app.artifacts.store import Store
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
        return _build(settings, lookup, device.device.threads, progress)
    except ArtifactError as error:
        if settings.compile.engine != "auto":
            raise
        log.warning("the module will run as it is written: %s", error)
        why = str(error)
        progress.say(f"eager instead of aot: {why}")
        layers = (*lookup.layers, Layer("aot-package", "bypass", why))
        return Uncompiled(f"the aot engine could not be built: {why}", layers)


def _build(settings: Settings, lookup: Missed, threads: int, progress: Progress) -> Compiled:
    """Build and publish, or take what another process builds at the same time."""
    store = Store(settings.compile.artifacts)
    with flight(store, lookup, settings.model.checkpoint, progress, settings.compile.wait_s) as turn:
        if turn.published:
            return Compiled(turn.published.artifact, "restored", turn.published.layers)
        with store.workspace() as workspace:
            payload = workspace / "payload"
            payload.mkdir()
            content = child.run("build", settings, payload, threads, progress)
            try:
                seal(payload, lookup.identity, content)
                artifact = turn.publish(payload)
            except OSError as error:
                raise ArtifactError(
                    f"the artifact could not be written to {store.path}: {error.strerror}; is the disk full?"
                ) from error
    built = Layer("aot-package", "miss", turn.why or "built by this start", len(artifact.content["packages"]))
    return Compiled(artifact, "rebuilt", (*lookup.layers, built), lookup.differences)
