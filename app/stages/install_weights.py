"""Give every tensor of the model its data by assignment: completely, or not at all."""

from app.artifacts import Missed, Restored
from app.settings import Settings
from app.startup import Lane, Progress, stage
from app.weights import LoadedModel, ResidentWeights, Skeleton
from app.weights.plan import ModelTable, plan_weights


@stage(Lane.DEVICE)
def install_weights(
    settings: Settings,
    resident: ResidentWeights,
    lookup: Restored | Missed,
    skeleton: Skeleton | None,
    progress: Progress,
) -> LoadedModel:
    """Give the loaded model: the module on a miss, its tensors by name on a hit. Raises CheckpointError."""
    from app.engines.aot import stored_constants
    from app.weights import install

    if skeleton is not None:
        plan = plan_weights(skeleton.table, resident.checkpoint, settings.model.waive)
        loaded = install.install(skeleton, resident, plan)
    else:
        artifact = lookup.artifact if isinstance(lookup, Restored) else None
        if artifact is None:
            raise TypeError("a miss always builds the skeleton")
        table = ModelTable.from_json(artifact.content["model"])
        plan = plan_weights(table, resident.checkpoint, settings.model.waive)
        loaded = install.bind(table, stored_constants(artifact), resident, plan)
    progress.expect(len(plan.sources), "tensors")
    progress.advance(len(plan.sources))
    progress.say(f"{len(plan.rebuilt)} rebuilt, {len(loaded.table.ties)} tied, {loaded.copied_bytes} bytes copied")
    return loaded

