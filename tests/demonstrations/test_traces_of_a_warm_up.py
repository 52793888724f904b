"""A warm-up is a real run, so it leaves what real runs leave: which traces, and what it takes to undo them.

A training step changes parameters, buffers, moments, the schedule, the random state and the position in the data.
Restoring the weights alone gives another training, silently. Everything restored gives the same one, bit for bit. A
forward for inference leaves traces too where it writes to a buffer: it is put back, and where answers depend on it the
model is not made ready.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from app.artifacts import Uncompiled
from app.buckets import FORWARD
from app.checkpoints import open_checkpoint
from app.engines.eager import EagerEngine
from app.errors import WarmupError
from app.progress import Progress
from app.settings import Settings
from app.stages.acquire_device import acquire_device
from app.stages.bind_engine import bind_engine
from app.stages.compute_reference import Reference
from app.stages.import_runtime import import_runtime
from app.stages.prove_answers import prove_answers
from app.stages.warm_buckets import warm_buckets
from app.weights import LoadedModel, ResidentWeights
from app.weights.dtypes import same_bits
from app.weights.install import install
from app.weights.layout import plan_layout
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton

BATCH = 8


class Training:
    """A small training with everything that its next step depends on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.rows = torch.randn(64, 4)
        self.position = 0

    def step(self) -> Tensor:
        """Train on the next batch and return the loss."""
        batch = self.rows[self.position : self.position + BATCH]
        self.position += BATCH
        self.optimizer.zero_grad()
        loss: Tensor = self.module(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


@dataclass(frozen=True)
class Part:
    """One part of a training's state: how it is taken, and how it is put back."""

    take: Callable[[Training], Any]
    put: Callable[[Training, Any], object]


def put_tensors(targets: Any, values: Any) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


PARTS = {
    "parameters": Part(
        lambda now: [one.detach().clone() for one in now.module.parameters()],
        lambda now, values: put_tensors(now.module.parameters(), values),
    ),
    "buffers": Part(
        lambda now: [one.clone() for one in now.module.buffers()],
        lambda now, values: put_tensors(now.module.buffers(), values),
    ),
    "moments": Part(
        lambda now: copy.deepcopy(now.optimizer.state_dict()),
        lambda now, state: now.optimizer.load_state_dict(state),
    ),
    "schedule": Part(
        lambda now: copy.deepcopy(now.schedule.state_dict()),
        lambda now, state: now.schedule.load_state_dict(state),
    ),
    "random state": Part(lambda _: torch.get_rng_state(), lambda _, state: torch.set_rng_state(state)),
    "position in the data": Part(lambda now: now.position, lambda now, position: setattr(now, "position", position)),
}


def after_warm_up(restored: set[str]) -> Training:
    """Return a training that was warmed up by one step, with only these parts of its state restored."""
    training = Training()
    snapshot = {name: part.take(training) for name, part in PARTS.items()}
    training.step()
    for name in restored:
        PARTS[name].put(training, snapshot[name])
    return training


def outcome(training: Training) -> list[Tensor]:
    """Train three steps; return every loss, parameter and buffer."""
    losses = [training.step() for _ in range(3)]
    return [*losses, *training.module.parameters(), *training.module.buffers()]


def same(one: Any, other: Any) -> bool:
    """Compare two states leaf by leaf, tensors by every bit."""
    return all(same_leaf(a, b) for a, b in zip_longest(tree_leaves(one), tree_leaves(other)))


def same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def test_a_training_repeats_itself_bit_for_bit_when_nothing_comes_before() -> None:
    assert same(outcome(Training()), outcome(Training()))


@pytest.mark.parametrize("name", PARTS)
def test_a_warm_up_step_changes_every_part(name: str) -> None:
    training = Training()
    before = PARTS[name].take(training)
    training.step()
    assert not same(PARTS[name].take(training), before)


def test_restoring_the_weights_is_not_enough() -> None:
    assert not same(outcome(after_warm_up({"parameters", "buffers"})), outcome(Training()))


@pytest.mark.parametrize("forgotten", PARTS)
def test_one_part_that_is_forgotten_gives_another_training(forgotten: str) -> None:
    assert not same(outcome(after_warm_up(PARTS.keys() - {forgotten})), outcome(Training()))


def test_the_whole_state_restored_gives_the_same_training_bit_for_bit() -> None:
    assert same(outcome(after_warm_up(set(PARTS))), outcome(Training()))


class Counting(nn.Module):
    """Weighs its answers by the number of calls, kept in a buffer of the checkpoint."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        found: Tensor = self.layer(x) / self.calls
        return found


class Drawing(nn.Module):
    """Draws random numbers that its answers do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + 0 * torch.rand(1)
        return found


def build() -> nn.Module:
    return Counting()


def build_drawing() -> nn.Module:
    return Drawing()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(Counting(), "build", tmp_path)


def configured(module: nn.Module, factory: str, directory: Path) -> Settings:
    torch.manual_seed(0)
    save_model(module, str(directory / "model.safetensors"))
    configuration: dict[str, Any] = {
        "model": {"name": "m", "factory": f"{__name__}:{factory}", "checkpoint": directory},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": ["batch", 3], "pad": 0}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": ["batch", 2]}],
        "dimensions": {"batch": {"max": 8, "buckets": [2]}},
    }
    return Settings(**configuration)


def loaded(settings: Settings) -> tuple[ResidentWeights, LoadedModel]:
    """Read and install as a start does."""
    checkpoint, skeleton = open_checkpoint(settings.model.checkpoint), build_skeleton(settings.model)
    plan = plan_weights(skeleton.table, checkpoint, settings.model)
    resident = read_resident(checkpoint, plan_layout(checkpoint, "map", "", None), Progress(), 1 << 20, {})
    return resident, install(skeleton, checkpoint, resident.memory, plan)


def test_a_forward_that_writes_to_a_buffer_answers_the_first_client_by_who_warmed_it_up(settings: Settings) -> None:
    _, model = loaded(settings)
    assert model.module is not None
    engine, x = EagerEngine.open(model, None), torch.ones(1, 3)
    parameters = [one.clone() for one in model.module.parameters()]
    buffers = [one.clone() for one in model.module.buffers()]
    (cold,) = engine.run([x], FORWARD, None)

    (warm,) = engine.run([x], FORWARD, None)
    assert not same_bits(warm, cold)
    assert all(same_bits(now, before) for now, before in zip(model.module.parameters(), parameters, strict=True))

    assert engine.restore_buffers() == ("calls",)
    assert all(same_bits(now, before) for now, before in zip(model.module.buffers(), buffers, strict=True))
    assert engine.restore_buffers() == ()
    (again,) = engine.run([x], FORWARD, None)
    assert same_bits(again, cold)


def test_warm_up_puts_the_buffer_back_and_tells_of_it(settings: Settings) -> None:
    resident, model = loaded(settings)
    assert model.module is not None
    before = [one.clone() for one in model.module.buffers()]
    bound = bind_engine.run(settings, model, Uncompiled("the module runs as it is written"), Progress())

    warm = warm_buckets.run(settings, bound, resident, Progress())

    assert warm.restored == ("calls",)
    assert all(same_bits(now, was) for now, was in zip(model.module.buffers(), before, strict=True))


def test_answers_that_depend_on_it_are_not_proven_and_the_start_ends(settings: Settings) -> None:
    resident, model = loaded(settings)
    bound = bind_engine.run(settings, model, Uncompiled("the module runs as it is written"), Progress())
    warm = warm_buckets.run(settings, bound, resident, Progress())
    device = acquire_device.run(settings, import_runtime.run(Progress()), Progress())

    with pytest.raises(
        WarmupError, match=r"not proven: .*; the forward changes calls, on which its answers may depend"
    ):
        prove_answers.run(settings, warm, Reference("none", {}), resident, device, Progress())


def test_random_states_are_after_warm_up_and_proof_what_they_were_before(tmp_path: Path) -> None:
    settings = configured(Drawing(), "build_drawing", tmp_path)
    resident, model = loaded(settings)
    device = acquire_device.run(settings, import_runtime.run(Progress()), Progress())
    bound = bind_engine.run(settings, model, Uncompiled("the module runs as it is written"), Progress())
    before = torch.get_rng_state()

    warm = warm_buckets.run(settings, bound, resident, Progress())
    prove_answers.run(settings, warm, Reference("none", {}), resident, device, Progress())

    assert torch.equal(torch.get_rng_state(), before)
