"""Give every tensor of the model its data by assignment: completely, or not at all."""

from dataclasses import replace

from app.artifacts import Compiled, Uncompiled
from app.errors import ArtifactError
from app.graph import Lane, stage
from app.progress import Progress
from app.settings import Settings
from app.units import bytes_text
from app.weights import LoadedModel, ResidentWeights, Skeleton
from app.weights.plan import ModelTable, plan_weights


@stage(Lane.DEVICE)
def install_weights(
    settings: Settings,
    resident: ResidentWeights,
    code: Compiled | Uncompiled,
    skeleton: Skeleton | None,
    progress: Progress,
) -> LoadedModel:
    """Give the loaded model: its tensors by name for compiled code, else the module. Raises CheckpointError."""
    from app.engines.aot import stored_constants
    from app.weights import install

    resident.check_unchanged()
    checkpoint, memory = resident.checkpoint, resident.memory
    if skeleton is not None:
        plan = plan_weights(skeleton.table, checkpoint, settings.model)
        loaded = install.install(skeleton, checkpoint, memory, plan)
        if isinstance(code, Compiled):
            # What is lifted out of the graph is no tensor of the module.
            loaded = replace(loaded, tensors={**stored_constants(code.artifact), **loaded.tensors})
    elif isinstance(code, Compiled):
        table = ModelTable.from_json(code.artifact.content["model"])
        plan = plan_weights(table, checkpoint, settings.model)
        loaded = install.bind(table, stored_constants(code.artifact), checkpoint, memory, plan)
    else:
        raise ArtifactError("there is neither compiled code nor a module to give weights to")
    progress.expect(len(plan.sources), "tensors")
    progress.advance(len(plan.sources))
    progress.say(
        f"{len(plan.rebuilt)} rebuilt, {len(loaded.table.ties)} tied, {len(plan.cast)} cast, "
        f"{bytes_text((resident.copied_bytes or 0) + loaded.copied_bytes)} copied"
    )
    return loaded
