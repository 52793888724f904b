"""Compiled code is a plan, not an answer: which changes let it be used again, and which must not.

A plan is made from names, shapes and dtypes of weights, for one compiler and one processor. The numbers in the weights
are given to it when it is opened. So a model that was trained further finds its code, and is proven anew; anything that
the plan was made from is a miss, which says in words what differs. The look-up compares and hashes, it never runs what
it finds: here the code is two files with a few bytes in each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from app.artifacts import CONSTANTS, Artifact, Missed, Restored, golden
from app.artifacts.collect import collect
from app.artifacts.seal import seal
from app.artifacts.store import Store
from app.checkpoints import open_checkpoint
from app.devices.cpu import Cpu
from app.identity import ArtifactIdentity
from app.progress import Progress
from app.runtime import import_torch
from app.settings import Settings
from app.weights.layout import plan_layout
from app.weights.reading import read_resident

RUNTIME = import_torch().fields
DEVICE = Cpu(2).fingerprint()
FEATURE = DEVICE["features"].split()[0]


def build() -> nn.Module:
    return nn.Linear(4, 3)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A configured model on a machine: everything that an identity is collected from."""

    checkpoint: Path
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime: Mapping[str, Any] = dataclasses.field(default_factory=lambda: RUNTIME)
    device: Mapping[str, Any] = dataclasses.field(default_factory=lambda: DEVICE)

    def identity(self) -> ArtifactIdentity:
        configuration: dict[str, Any] = {
            "model": {"name": "m", "factory": f"{__name__}:build", "checkpoint": self.checkpoint, **self.model},
            "inputs": [{"name": "x", "datatype": "FP32", "shape": ["batch", 4], "pad": 0}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": ["batch", 3]}],
            "dimensions": {"batch": {"max": 16, "buckets": [2, 8]}},
        }
        checkpoint = open_checkpoint(self.checkpoint)
        checkpoint.close()
        return collect(Settings(**configuration), checkpoint, self.runtime, self.device, engine="aot")


def saved(module: nn.Module, file: Path) -> Path:
    save_file(module.state_dict(), file)
    return file


@pytest.fixture
def deployed(tmp_path: Path) -> Deployment:
    torch.manual_seed(0)
    return Deployment(saved(build(), tmp_path / "model.safetensors"))


@pytest.fixture
def store(tmp_path: Path, deployed: Deployment) -> Store:
    """A store that holds the code of what is deployed."""
    found, identity = Store(tmp_path / "store"), deployed.identity()
    with found.workspace() as workspace:
        payload = workspace / "payload"
        payload.mkdir()
        for name in ("code.so", CONSTANTS):
            (payload / name).write_bytes(b"code")
        seal(payload, identity, {"packages": [{"library": "code.so"}], "factory_files": {}})
        found.publish(payload, identity)
    return found


def find(store: Store, wanted: Deployment) -> Restored | Missed:
    return store.find(wanted.identity(), wanted.checkpoint)


def other_weights(now: Deployment) -> Deployment:
    torch.manual_seed(1)
    return dataclasses.replace(now, checkpoint=saved(build(), now.checkpoint.with_name("trained.safetensors")))


def test_new_weights_for_the_same_graph_find_its_code(store: Store, deployed: Deployment) -> None:
    trained = other_weights(deployed)

    assert trained.checkpoint.read_bytes() != deployed.checkpoint.read_bytes()
    assert deployed.identity().differences(trained.identity()) == ()
    assert isinstance(find(store, trained), Restored)


def fingerprint(deployment: Deployment) -> str:
    checkpoint = open_checkpoint(deployment.checkpoint)
    try:
        return read_resident(checkpoint, plan_layout(checkpoint, "map", "", None), Progress(), 1 << 20, {}).fingerprint
    finally:
        checkpoint.close()


def test_but_they_are_not_served_on_the_proof_of_the_old_ones(store: Store, deployed: Deployment) -> None:
    found = find(store, deployed)
    assert isinstance(found, Restored)
    artifact: Artifact = found.artifact
    proven = {"batch=2": {"y": np.ones((2, 3), np.float32)}}
    golden.keep(artifact, fingerprint(deployed), proven)

    assert golden.recall(artifact, fingerprint(deployed)).keys() == proven.keys()
    assert golden.recall(artifact, fingerprint(other_weights(deployed))) == {}


def wider(now: Deployment) -> Deployment:
    return dataclasses.replace(now, checkpoint=saved(nn.Linear(5, 3), now.checkpoint.with_name("wider.safetensors")))


def stored_in_half_precision(now: Deployment) -> Deployment:
    return dataclasses.replace(now, checkpoint=saved(build().half(), now.checkpoint.with_name("half.safetensors")))


def cast_while_loading(now: Deployment) -> Deployment:
    return dataclasses.replace(now, model={"dtype": "bfloat16"})


def another_torch(now: Deployment) -> Deployment:
    return dataclasses.replace(now, runtime={**RUNTIME, "torch": "2.99.0 (0123456789ab)"})


def another_processor(now: Deployment) -> Deployment:
    features = DEVICE["features"].replace(FEATURE, "zzz", 1)
    return dataclasses.replace(now, device={**DEVICE, "features": features})


MISSES: list[tuple[Callable[[Deployment], Deployment], tuple[str, ...]]] = [
    (wider, ("tensor weight F32[3,4] → F32[3,5]",)),
    (stored_in_half_precision, ("tensor bias F32[3] → F16[3]", "tensor weight F32[3,4] → F16[3,4]")),
    (cast_while_loading, ("model.dtype null → bfloat16",)),
    (another_torch, (f"torch {RUNTIME['torch']} → 2.99.0 (0123456789ab)",)),
    (another_processor, (f"the processor lacks {FEATURE} and has zzz",)),
]


@pytest.mark.parametrize(("change", "words"), MISSES, ids=[change.__name__ for change, _ in MISSES])
def test_what_the_plan_was_made_from_is_a_miss_that_says_what_differs(
    store: Store, deployed: Deployment, change: Callable[[Deployment], Deployment], words: tuple[str, ...]
) -> None:
    changed = change(deployed)
    found = find(store, changed)

    assert deployed.identity().differences(changed.identity()) == words
    assert isinstance(found, Missed)
    assert found.differences == words
    assert found.why.startswith(f"the nearest differs: {words[0]}")
