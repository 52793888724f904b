"""What no checkpoint brings has the bits of an ordinary construction, or the start is refused; nothing else changes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from app.checkpoints import open_checkpoint
from app.errors import CheckpointError, SettingsError
from app.progress import Progress
from app.settings import Model, Waive
from app.weights.attributes import plain_tensors
from app.weights.install import install
from app.weights.layout import plan_layout
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton, meta_left, named_tensors
from tests.weights.loading import MODES, load, numbered, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated"),
]


class Seeded(nn.Module):
    """Draws for its parameters first, then for what is not stored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.l = nn.Linear(30, 40)
        self.register_buffer("noise", torch.randn(4, 5), persistent=False)
        self.other = nn.Embedding(7, 8)
        self.listed = [torch.rand(3), torch.randint(1000, (2,))]


class SeededAndReads(Seeded):
    """Cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.large = self.l.weight.abs().max().item() > 1
        self.register_buffer("last", torch.randn(6), persistent=False)


class SeededElsewhere(nn.Module):
    """Seeds all three sources of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.l = nn.Linear(3, 4)
        self.scale = torch.tensor([random.random(), np.random.rand(), np.random.randn()])
        self.register_buffer("more", torch.randn(3) * random.random(), persistent=False)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        generator = torch.Generator(device="cpu").manual_seed(3)
        self.register_buffer("noise", torch.randn(4, generator=generator, device="cpu"), persistent=False)


class NothingRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("table", torch.linspace(0, 1, 9).sin(), persistent=False)


class WaivedAfterDrawing(nn.Module):
    """A parameter that may be missing, drawn after others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.l = nn.Linear(3, 4)
        self.extra = nn.Parameter(torch.randn(5))


class RandomBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("noise", torch.randn(4), persistent=False)
        self.register_buffer("fixed", torch.ones(4), persistent=False)


class RandomAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4))
        self.inner.listed = {"a": [torch.ones(2), torch.rand(2)]}


class RandomOfPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.scale = torch.tensor(random.random())


class RandomAndReads(RandomBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.noise[0].item()


class OfRandomWeights(nn.Module):
    """Computed from weights as they were drawn, not as they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("sums", self.l.weight.detach().sum(1), persistent=False)


class RandomAndStored(nn.Module):
    """Random, but a checkpoint holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("noise", torch.randn(4))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(1, 1), nn.LazyLinear(4)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1)
        self.parts = nn.ModuleList([torch.jit.script(nn.Linear(2, 2))])


class HalfComplex(nn.Module):
    """A dtype that no checkpoint has a name for."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("turns", torch.full((3,), 1 + 2j, dtype=torch.complex32), persistent=False)


class HalfComplexAndRandom(HalfComplex):
    """The two constructions are compared bit for bit, also where torch cannot compare values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.register_buffer("noise", torch.randn(4), persistent=False)


FACTORIES: tuple[type[nn.Module], ...] = (
    Seeded, SeededAndReads, SeededElsewhere, OwnGenerator, NothingRandom, WaivedAfterDrawing, RandomBuffer,
    RandomAttribute, RandomOfPython, RandomAndReads, OfRandomWeights, RandomAndStored, Lazy, Scripted, HalfComplex,
    HalfComplexAndRandom,
)  # fmt: skip
KINDS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in FACTORIES}


def make(kind: str) -> nn.Module:
    return KINDS[kind]()


def model(kind: str, path: Path = Path("/unused"), **fields: Any) -> Model:
    return Model(name="m", factory="tests.weights.test_ordinary:make", kwargs={"kind": kind}, checkpoint=path, **fields)


def random_states() -> tuple[bytes, object, str]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def unstored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    stored = module.state_dict()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name not in stored)
    yield from ((f"{prefix}.{name}{path}", tensor) for prefix, name, path, tensor in plain_tensors(module))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "kind", ["Seeded", "SeededAndReads", "SeededElsewhere", "OwnGenerator", "NothingRandom", "HalfComplex",
             "HalfComplexAndRandom"],
)  # fmt: skip
def test_what_is_not_stored_has_the_bits_of_an_ordinary_construction(
    tmp_path: Path, kind: str, seed: int, mode: Any
) -> None:
    ordinary = make(kind)
    save(tmp_path, numbered(ordinary))
    wanted = {name: (tensor.dtype, raw(tensor)) for name, tensor in unstored(ordinary)}
    torch.manual_seed(seed)
    random.seed(seed)

    module = load(model(kind, tmp_path), mode).module

    assert module is not None
    assert wanted
    assert {name: (tensor.dtype, raw(tensor)) for name, tensor in unstored(module)} == wanted


def test_a_parameter_that_is_missing_has_the_bits_of_an_ordinary_construction(tmp_path: Path) -> None:
    ordinary = make("WaivedAfterDrawing")
    save(tmp_path, {name: tensor for name, tensor in numbered(ordinary).items() if name != "extra"})

    loaded = load(model("WaivedAfterDrawing", tmp_path, waive=Waive(missing=["extra"])))

    assert raw(loaded.tensors["extra"]) == raw(ordinary.extra)
    assert loaded.tensors["l.bias"].tolist() != ordinary.l.bias.tolist()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RandomBuffer", "noise"),
        ("RandomAttribute", "inner.listed"),
        ("RandomOfPython", "scale"),
        ("RandomAndReads", "noise"),
        ("OfRandomWeights", "sums"),
    ],
)
def test_what_is_random_and_not_stored_is_refused_by_its_name(kind: str, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_skeleton(model(kind))

    assert str(caught.value) == (
        f"model.factory tests.weights.test_ordinary:make makes {name} at random, other at every start, and no "
        f"checkpoint holds it; seed the constructor, or store it"
    )


def test_what_is_random_and_stored_is_loaded(tmp_path: Path) -> None:
    state = numbered(make("RandomAndStored"))
    save(tmp_path, state)

    assert torch.equal(load(model("RandomAndStored", tmp_path)).tensors["noise"], state["noise"])


def test_what_is_random_and_may_be_missing_has_some_value(tmp_path: Path) -> None:
    module = build_skeleton(model("RandomAndStored", waive=Waive(missing=["noise"]))).module

    assert module.noise.shape == (4,)
    assert not module.noise.is_meta


@pytest.mark.parametrize("kind", ["OwnGenerator", "NothingRandom", "RandomAndStored", "RandomBuffer", "HalfComplex"])
@pytest.mark.parametrize("waived", [[], ["l.bias"]])
def test_the_second_construction_leaves_the_sources_of_random_numbers_as_they_were(
    kind: str, waived: list[str]
) -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    np.random.randn()
    before = random_states()

    if kind == "RandomBuffer":
        with pytest.raises(SettingsError):
            build_skeleton(model(kind, waive=Waive(missing=waived)))
    else:
        build_skeleton(model(kind, waive=Waive(missing=waived)))

    assert random_states() == before


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Lazy", "later.weight has no shape yet; give the module its sizes"),
        ("Scripted", "parts.0 is scripted; return the module it is made of"),
    ],
)
def test_a_module_that_weights_cannot_be_given_to_is_refused_by_its_name(kind: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_skeleton(model(kind))

    assert str(caught.value) == f"model.factory tests.weights.test_ordinary:make: {told}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("l.weight"), "missing: l.weight"),
        (lambda state: state.update({"x": torch.zeros(1)}), "unexpected: x"),
        (lambda state: state.update({"l.bias": torch.zeros(5)}), "shape: l.bias"),
        (lambda state: state.update({"l.bias": torch.zeros(40, dtype=torch.int32)}), "dtype: l.bias"),
    ],
)
def test_a_plan_that_fails_leaves_the_module_as_it_was(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    state = dict(numbered(make("Seeded")))
    change(state)
    save(tmp_path, state)
    checkpoint = open_checkpoint(tmp_path)
    skeleton = build_skeleton(model("Seeded", tmp_path))
    before = dict(named_tensors(skeleton.module))
    values = {name: raw(tensor) for name, tensor in unstored(skeleton.module)}

    with pytest.raises(CheckpointError) as caught:
        plan_weights(skeleton.table, checkpoint, model("Seeded", tmp_path))
    checkpoint.close()

    after = dict(named_tensors(skeleton.module))
    assert [one.startswith(problem) for one in caught.value.problems] == [True]
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
    assert meta_left(skeleton.module) == tuple(state_names())
    assert {name: raw(tensor) for name, tensor in unstored(skeleton.module)} == values


def state_names() -> list[str]:
    return list(make("Seeded").state_dict())


class Untied(nn.Module):
    """Two names of one parameter, which files may hold as two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


KINDS["Untied"] = Untied


@pytest.mark.parametrize("mode", MODES)
def test_ties_that_fail_leave_the_module_as_it_was(tmp_path: Path, mode: Any) -> None:
    save(tmp_path, {"first.weight": torch.zeros(3, 3), "second.weight": torch.ones(3, 3)})
    checkpoint, wanted = open_checkpoint(tmp_path), model("Untied", tmp_path)
    skeleton = build_skeleton(wanted)
    before = dict(named_tensors(skeleton.module))
    plan = plan_weights(skeleton.table, checkpoint, wanted)
    memory = read_resident(checkpoint, plan_layout(checkpoint, mode, "", None), Progress(), 1 << 20, {}).memory

    with pytest.raises(CheckpointError, match=r"tied: second\.weight and first.weight are one tensor in the model"):
        install(skeleton, checkpoint, memory, plan)
    checkpoint.close()

    assert all(tensor is before[name] for name, tensor in named_tensors(skeleton.module))
    assert meta_left(skeleton.module) == ("first.weight", "second.weight")
