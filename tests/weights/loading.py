"""Save a state as a checkpoint and load it as a start-up does: skeleton, plan, reading, installation."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from app.checkpoints import open_checkpoint
from app.progress import Progress
from app.settings import Model
from app.weights import LoadedModel
from app.weights.install import install
from app.weights.layout import Mode, plan_layout
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton

MODES: tuple[Mode, ...] = ("map", "read")


def save(directory: Path, state: Mapping[str, Any], suffix: str = ".safetensors") -> Path:
    """Write a state as one file; of what has several names safetensors gets the first."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"model{suffix}"
    if suffix != ".safetensors":
        torch.save(state, file)
        return file
    kept: dict[object, tuple[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        kept.setdefault(
            (tensor.data_ptr(), tensor.shape, tensor.stride()), (name, tensor.detach().clone().contiguous())
        )
    save_file(dict(kept.values()), file)
    return file


def load(model: Model, mode: Mode = "map") -> LoadedModel:
    """Load what lies at the model's path."""
    checkpoint = open_checkpoint(model.checkpoint)
    try:
        skeleton = build_skeleton(model)
        plan = plan_weights(skeleton.table, checkpoint, model)
        layout = plan_layout(checkpoint, mode, "", model.cast)
        memory = read_resident(checkpoint, layout, Progress(), 1 << 20, {}).memory
        return install(skeleton, checkpoint, memory, plan)
    finally:
        checkpoint.close()


def numbered(module: nn.Module) -> "OrderedDict[str, Any]":
    """Return a state for a module in which every floating-point number is another one; none is a constructor's."""
    state = module.state_dict()
    made: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            key = tensor.data_ptr()
            if key not in made:
                made[key] = (torch.arange(tensor.numel(), dtype=tensor.dtype) + 100 * (len(made) + 1)).view(
                    tensor.shape
                )
            state[name] = made[key]
    return state
