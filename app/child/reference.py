"""Compute the eager reference: the module itself, on the real weights, for the sample inputs of every bucket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.artifacts import golden
from app.buckets import Coverage, Kind, Route
from app.checkpoints import open_checkpoint
from app.engines.eager import EagerEngine
from app.errors import WarmupError
from app.samples import sample_inputs
from app.serving.forward import Forward
from app.settings import Settings
from app.weights.install import install
from app.weights.plan import plan_weights
from app.weights.reading import map_files
from app.weights.skeleton import build_skeleton


def work(settings: Settings, directory: Path, scratch: Path, tell: Callable[[], None]) -> dict[str, Any]:
    """Write the answers by case into `directory`; raises CheckpointError when checkpoint and model do not fit.

    The files are mapped, not read: the server that started this process has made their pages resident.
    """
    del scratch
    torch.set_num_threads(settings.device.threads or torch.get_num_threads())
    checkpoint = open_checkpoint(settings.model.checkpoint)
    skeleton = build_skeleton(settings.model)
    tell()
    plan = plan_weights(skeleton.table, checkpoint, settings.model.waive)
    engine = EagerEngine.open(install(skeleton, checkpoint, map_files(checkpoint), plan), None)
    tell()
    coverage = Coverage(settings.symbolic, settings.buckets, engine.dynamic, settings.uncovered)
    forward = Forward(engine, coverage, settings.input_specs, settings.output_specs)
    answers = {}
    for bucket in settings.buckets:
        inputs = sample_inputs(settings.input_specs, dict(bucket.sizes), seed=bucket.name)
        answers[golden.case(bucket.name, inputs)] = forward(inputs, Route(Kind.EXACT, bucket, bucket.sizes))
    if changed := engine.changed_buffers():
        raise WarmupError(f"the model's forward changes its own buffers ({', '.join(changed)}): answers would differ")
    golden.write(directory / golden.FILE, answers)
    tell()
    return {"cases": len(answers)}
