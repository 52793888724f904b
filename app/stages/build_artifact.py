"""On a miss, build the artifact in a child process beside the reading of the weights."""

import logging
from dataclasses import replace

from app import child
from app.artifacts import Compiled, Layer, Missed, Restored, Uncompiled
from app.artifacts.flight import flight
from app.artifacts.opening import open_store, sign_built, store_of_this_process, why_not_kept
from app.artifacts.seal import seal
from app.devices import AcquiredDevice
from app.errors import ArtifactError
from app.graph import Lane, Skipped, stage
from app.progress import Progress
from app.settings import Settings

log = logging.getLogger("warmgate.builder")

# Engine → the child's task that builds its code, and the layer that it fills.
TASKS = {"aot": ("build", "aot-package"), "jit": ("jit", "jit-caches")}


@stage(Lane.PROCESS)
def build_artifact(
    settings: Settings, lookup: Restored | Missed, device: AcquiredDevice, progress: Progress
) -> Compiled | Uncompiled | Skipped[Compiled | Uncompiled]:
    """Give code to open, or (engine eager or auto) the reason why the module runs as it is written.

    Raises ArtifactError when code was demanded and is not to be had.
    """
    if isinstance(lookup, Restored):
        why = str(lookup.artifact.content.get("why", ""))
        return Skipped(Compiled(lookup.artifact, "restored", lookup.layers, why=why), "the artifact was restored")
    if settings.compile.engine == "eager":
        return Skipped(Uncompiled(lookup.why, lookup.layers), lookup.why)
    if settings.compile.on_miss == "fail":
        differences = "; ".join(lookup.differences[:5])
        raise ArtifactError(
            f"no artifact in {settings.compile.artifacts} ({lookup.why}) and compile.on_miss is fail; "
            f"build it with `warmgate build`{': ' + differences if differences else ''}"
        )
    if settings.compile.on_miss == "eager_then_swap":
        why = f"{lookup.why}; the module serves until its code is built (compile.on_miss is eager_then_swap)"
        return Skipped(Uncompiled(why, lookup.layers), why)
    return first_that_builds(settings, lookup, device.device.threads, progress)


def first_that_builds(settings: Settings, lookup: Missed, threads: int, progress: Progress) -> Compiled | Uncompiled:
    """Try the allowed engines in their order; each that fails is told, and is a layer of the report."""
    failed: list[Layer] = []
    *_, last = lookup.identities
    for engine, identity in lookup.identities.items():
        wanted = replace(lookup, identity=identity, why="; ".join(layer.why for layer in failed))
        try:
            found = _build(settings, wanted, engine, threads, progress, insist=engine == last)
        except ArtifactError as error:
            if settings.compile.engine != "auto":
                raise
            log.warning("the %s engine could not be built: %s", engine, error)
            progress.say(f"no {engine}: {error}")
            failed.append(Layer(TASKS[engine][1], "bypass", f"the {engine} engine could not be built: {error}"))
            continue
        return replace(found, layers=(*failed, *found.layers), why=wanted.why)
    return Uncompiled("; ".join(layer.why for layer in failed), (*lookup.layers, *failed))


def _build(settings: Settings, wanted: Missed, engine: str, threads: int, progress: Progress, insist: bool) -> Compiled:
    """Build and publish, or take what another process builds at the same time; `wanted.why` spoke against others.

    `insist`: try it although it failed for the process that was waited for, as there is no other engine to try.
    """
    task, layer = TASKS[engine]
    alone = why_not_kept(settings.compile)
    if alone:
        log.warning("what is built serves this process alone and is not kept: %s", alone)
    store = store_of_this_process() if alone else open_store(settings.compile)
    with flight(store, wanted, settings.model.checkpoint, progress, settings.compile.wait_s) as turn:
        if turn.published:
            return Compiled(turn.published.artifact, "restored", turn.published.layers)
        if turn.failure and not insist:
            raise ArtifactError(turn.failure)
        with store.workspace() as workspace:
            payload = workspace / "payload"
            payload.mkdir()
            content = child.run(task, settings, payload, threads, progress, key=wanted.identity.key())
            try:
                seal(payload, wanted.identity, {**content, "why": wanted.why})
                sign_built(payload, settings.compile)
                artifact = turn.publish(payload)
            except OSError as error:
                raise ArtifactError(
                    f"the artifact could not be written to {store.path}: {error.strerror}; is the disk full?"
                ) from error
    told = f"built by this start, for this process alone: {alone}" if alone else turn.why or "built by this start"
    return Compiled(artifact, "rebuilt", (*wanted.layers, Layer(layer, "miss", told)), wanted.differences)
