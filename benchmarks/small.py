"""Models that take next to no time, so that what is measured is the server around them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.wrk import Body, raw_body

WIDTH = 16
WIDE = (256, 1024)  # 1 MiB of FP32


class Scaled(nn.Module):
    """Its input times a number: as many bytes out as in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def tiny() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def wide() -> nn.Module:
    return Scaled()


def configured(directory: Path, name: str, width: int, batch: int) -> Path:
    """Write a checkpoint and a configuration of one of the models above; return the configuration."""
    torch.manual_seed(0)
    model = {"tiny": tiny, "wide": wide}[name]()
    save_file(model.state_dict(), directory / f"{name}.safetensors")
    config: dict[str, Any] = {
        "model": {"name": name, "factory": f"benchmarks.small:{name}", "checkpoint": f"{directory}/{name}.safetensors"},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": ["batch", width], "pad": 0}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": ["batch", width]}],
        "dimensions": {"batch": {"min": 1, "max": max(batch, 32), "buckets": sorted({1, 32, batch})}},
        "http": {"host": "127.0.0.1", "drain_delay_s": 0},
    }
    file = directory / f"{name}.yaml"
    file.write_text(json.dumps(config))
    return file


def values(rows: int, width: int) -> Any:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width).numpy()


def as_json(array: Any) -> Body:
    tensor = {"name": "x", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
    return Body(json.dumps({"inputs": [tensor]}).encode())


def as_raw(array: Any) -> Body:
    return raw_body({"x": array}, "FP32", binary_data_output=True)
