"""Checkpoints, configurations and artifacts that several end-to-end tests share."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from tests.e2e import models
from tests.e2e.harness import ROOT, Server, command

JSON = dict[str, Any]
Start = Callable[..., Server]


def save(module: nn.Module, path: Path) -> None:
    """Write what a checkpoint of this module holds, tied tensors once."""
    seen: set[int] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)


def configuration(model: str, checkpoint: Path, store: Path, **sections: Any) -> JSON:
    """Return a configuration of a small model that takes x [batch, 16]; sections are merged over it."""
    config: JSON = {
        "model": {"name": model, "factory": f"tests.e2e.models:{model}", "checkpoint": str(checkpoint)},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": ["batch", 16], "pad": 0}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": ["batch", 4]}],
        "dimensions": {"batch": {"min": 1, "max": 16, "buckets": [2, 8]}},
        "compile": {"artifacts": str(store)},
        "http": {"drain_delay_s": 0.5, "drain_timeout_s": 10},
        "startup": {"stall_timeout_s": 60},
    }
    for name, value in sections.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    return config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers that are killed when the test ends."""
    running: list[Server] = []

    def begin(config: JSON, **options: Any) -> Server:
        directory = tmp_path / f"server-{len(running)}"
        directory.mkdir()
        running.append(Server(directory, config, **options))
        return running[-1]

    yield begin
    for server in running:
        server.__exit__()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> JSON:
    """The tiny model with an artifact that `build` has made: servers restore it."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save(models.Tiny(), directory / "model.safetensors")
    config = configuration("tiny", directory / "model.safetensors", directory / "store")
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done = command("build", "--config", str(file))
    assert done.returncode == 0, done.stderr
    return config


@pytest.fixture
def tiny_config(tiny: JSON) -> JSON:
    """A copy that a test may change."""
    return copy.deepcopy(tiny)


@pytest.fixture(scope="session")
def minilm_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the artifact of the real model is kept for the whole session."""
    return tmp_path_factory.mktemp("minilm") / "store"


@pytest.fixture
def minilm_config(minilm_store: Path) -> JSON:
    """The example's configuration, with a store of the tests' own."""
    config: JSON = yaml.safe_load((ROOT / "examples/minilm.yaml").read_text())
    config["compile"]["artifacts"] = str(minilm_store)
    config["report"]["file"] = str(minilm_store.parent / "report.json")
    return config
