"""Compute the eager reference: the module itself, on the real weights, for the samples of every bucket and codec."""

from typing import Any, get_args

import torch

from app import codecs
from app.artifacts import golden
from app.buckets import Route
from app.checkpoints import Checkpoint, open_checkpoint
from app.child import Resident, Work
from app.engines.eager import EagerEngine
from app.errors import CheckpointError, WarmupError
from app.sampling import sampler
from app.serving.encoding import encoded_sample
from app.serving.forward import Forward
from app.settings import Settings
from app.weights.install import install
from app.weights.layout import Mode, plan_layout
from app.weights.memory import Memory
from app.weights.plan import plan_weights
from app.weights.skeleton import build_skeleton


def work(given: Work) -> dict[str, Any]:
    """Write the answers by case into the directory; raises CheckpointError when checkpoint and model do not fit."""
    settings, tell = given.settings, given.tell
    torch.set_num_threads(settings.device.threads or torch.get_num_threads())
    checkpoint = open_checkpoint(settings.model.checkpoint, settings.model.trust_pickle)
    memory = _memory(settings, checkpoint, given.resident)
    skeleton = build_skeleton(settings.model, settings.configured_paths)
    tell()
    plan = plan_weights(skeleton.table, checkpoint, settings.model)
    engine = EagerEngine.open(install(skeleton, checkpoint, memory, plan), None)
    tell()
    forward = Forward(engine, settings.model_paths, settings.uncovered)
    answers, sample = {}, sampler(settings.warmup.samples, settings.model_paths)
    for bucket in forward.buckets:
        inputs = sample(bucket)
        answers[golden.case(bucket.name, inputs)] = forward(inputs, Route.exactly(bucket))
        engine.restore_buffers()  # each answer is that of a module which nobody has asked before
    loaded = codecs.load(settings.model, settings.model_paths[0])
    for number, raw in enumerate(loaded.samples()):
        tensors, route = encoded_sample(forward, loaded, raw, number)
        answers[golden.case(codecs.case_name(number), tensors)] = forward(tensors, route)
        engine.restore_buffers()
    golden.write(given.directory / golden.FILE, answers)
    tell()
    return {"cases": len(answers)}


def _memory(settings: Settings, checkpoint: Checkpoint, resident: Resident | None) -> Memory:
    """Map what the server that started this process holds: the same pages of the files, and its slab."""
    if resident is None or resident.mode not in get_args(Mode):
        raise WarmupError("the reference needs the weights of the process that asks for it")
    if [tuple(stamp) for stamp in resident.stamps] != [file.stamp for file in checkpoint.files]:
        raise CheckpointError(f"{checkpoint.path} was replaced after it was read; restart to load it anew")
    mode: Mode = "map" if resident.mode == "map" else "read"
    layout = plan_layout(checkpoint, mode, "", settings.model.cast)
    memory = Memory.reserve(checkpoint, layout, resident.slab_fd)
    memory.populate(checkpoint)
    return memory
