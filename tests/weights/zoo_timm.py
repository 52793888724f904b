"""Models of the timm library, in the shape of `tests.weights.zoo`: tiny, random, seeded.

timm is installed in an environment of its own: transformers would use the torchvision that it finds beside it. timm
writes and reads one file; shards of its models are written and read with `huggingface_hub`, which it is built on.

torchvision's wheels are built for CUDA and their compiled parts do not load beside the CPU build of torch. Its newest
release that can be imported all the same is 0.16.2. timm's models take plain Python from it and none of its operators.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.weights.zoo import SEED, Case, Kind, Tensors, fill, save_state


def build(name: str) -> nn.Module:
    """Build the model of a case; the factory `tests.weights.zoo_timm:build` for settings that name it."""
    return CASES[name].build()


def library() -> Any:
    """Import timm; nothing is hidden but what torchvision says about its compiled image reader."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load image Python extension", category=UserWarning)
        import timm
    return timm


@dataclass(frozen=True, slots=True)
class TimmRecipe:
    """A timm model: the name it is registered under and what is given to `timm.create_model`."""

    model: str
    settings: dict[str, Any]

    def construct(self) -> nn.Module:
        torch.manual_seed(SEED)
        module: nn.Module = library().create_model(self.model, num_classes=5, **self.settings)
        return module

    def save(self, directory: Path, kind: Kind, sharded: bool) -> nn.Module:
        module = fill(self.construct())
        if sharded:
            save_state(module.state_dict(), directory, kind, sharded)
        else:
            library().models.save_for_hf(module, str(directory), safe_serialization=kind == "safetensors")
        return module

    def reload(self, directory: Path) -> nn.Module:
        from huggingface_hub import load_torch_model

        if any(directory.glob("*.index.json")):
            module = self.construct()
            load_torch_model(module, directory, strict=True, safe=not any(directory.glob("*.bin")))
        else:
            file = next(path for path in directory.iterdir() if path.suffix in {".safetensors", ".bin"})
            module = library().create_model(self.model, num_classes=5, checkpoint_path=str(file), **self.settings)
        return module.eval()


def _pictures(size: int) -> Callable[[], Tensors]:
    return lambda: {"x": torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(SEED))}


def _case(name: str, family: str, recipe: TimmRecipe, size: int) -> Case:
    return Case(name, family, recipe.construct, recipe.save, recipe.reload, _pictures(size))


VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("timm_vit", "timm's ViT", TimmRecipe("vit_tiny_patch16_224", VIT), 16),
        _case("timm_swin", "timm's Swin, index and mask buffers", TimmRecipe("swin_tiny_patch4_window7_224", SWIN), 16),
        _case("timm_efficientnet", "timm's EfficientNet, batch-norm buffers", TimmRecipe("test_efficientnet", {}), 32),
    )
}
