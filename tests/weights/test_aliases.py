"""Plain attributes and unstored buffers that are weights, or look into them, show the loaded values."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.settings import Model
from app.weights.attributes import plain_tensors
from app.weights.layout import Mode
from app.weights.skeleton import build_skeleton, meta_left
from tests.weights.loading import MODES, load, numbered, save

Pair = namedtuple("Pair", ["left", "right"])


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("stored", torch.zeros(6))


class InContainers(Base):
    """The objects themselves, as deep in containers as tensors are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = [self.l.weight, "text", self.l.weight]
        self.named = {"w": (self.l.weight, self.l.bias)}
        self.paired = Pair(self.l.bias, 1)
        self.deep = {"a": [{"b": [self.l.weight]}]}


class Views(Base):
    def __init__(self) -> None:
        super().__init__()
        self.data = self.l.weight.data
        self.rows = self.l.weight.detach()[:2]
        self.last = self.l.weight.detach()[-1, 1:]
        self.turned = self.l.weight.detach().t()
        self.flat = self.l.weight.detach().view(-1)[::2]
        self.many = self.l.bias.detach().expand(5, 4)
        self.of_buffer = [self.stored[1:4]]


class UnstoredBuffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tail", self.l.weight.detach()[1:], persistent=False)
        self.register_buffer("turned", self.l.weight.data.t(), persistent=False)
        self.register_buffer("whole", self.stored, persistent=False)
        self.register_buffer("part", self.stored[2:], persistent=False)


class OfAChild(Base):
    """A parent that looks into a child, and a child into its sibling."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.inner[1].of_first = self.inner[0].weight.data
        self.top = self.inner[1].bias.detach()[1:]


class ChannelsLast(Base):
    """A view of a parameter that has strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.first = self.conv.weight.detach()[0]
        self.same = self.conv.weight.data


class Tied(Base):
    """What is shown has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 4)
        self.other.weight = self.l.weight
        self.ws = [self.other.weight, self.other.weight.detach()[1:]]


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (InContainers, Views, UnstoredBuffers, OfAChild, ChannelsLast, Tied)
}


def make(kind: str, reads: bool) -> nn.Module:
    module = KINDS[kind]()
    if reads:
        assert [rate.item() for rate in torch.arange(2.0)] == [0, 1]
    return module


def model(kind: str, path: Path, reads: bool = False, **fields: Any) -> Model:
    kwargs = {"kind": kind, "reads": reads}
    return Model(name="m", factory="tests.weights.test_aliases:make", kwargs=kwargs, checkpoint=path, **fields)


def shown(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield everything in plain attributes, and every buffer."""
    for prefix, name, path, tensor in plain_tensors(module):
        yield f"{prefix}.{name}{list(path)}", tensor.detach()
    yield from module.named_buffers(remove_duplicate=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("reads", [False, True], ids=["on meta", "reads data"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_shows_a_weight_shows_the_loaded_one(
    tmp_path: Path, kind: str, reads: bool, dtype: Any, mode: Mode
) -> None:
    source = KINDS[kind]()
    state = numbered(source)
    save(tmp_path, state)
    with torch.no_grad():
        for name, tensor in source.state_dict().items():
            tensor.copy_(state[name])
    wanted = {
        name: tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in shown(source)
    }

    loaded = load(model(kind, tmp_path, reads, dtype=dtype), mode)

    assert loaded.module is not None
    found = dict(shown(loaded.module))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert meta_left(loaded.module) == ()
    assert not any(tensor.requires_grad for *_, tensor in plain_tensors(loaded.module))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reads", [False, True], ids=["on meta", "reads data"])
def test_what_was_the_very_object_is_the_very_object_again(tmp_path: Path, mode: Mode, reads: bool) -> None:
    save(tmp_path, numbered(InContainers()))

    module = load(model("InContainers", tmp_path, reads), mode).module

    assert isinstance(module, InContainers)
    weight, bias = module.l.weight, module.l.bias
    assert module.ws[0] is module.ws[2] is module.named["w"][0] is module.deep["a"][0]["b"][0] is weight
    assert module.named["w"][1] is module.paired.left is bias
    assert (module.ws[1], module.paired.right, type(module.paired)) == ("text", 1, Pair)


@pytest.mark.parametrize("mode", MODES)
def test_views_take_no_memory_of_their_own(tmp_path: Path, mode: Mode) -> None:
    save(tmp_path, numbered(Views()))

    module = load(model("Views", tmp_path), mode).module

    assert isinstance(module, Views)
    begin = module.l.weight.data_ptr()
    pointers = [one.data_ptr() - begin for one in (module.data, module.rows, module.last, module.turned, module.flat)]
    assert pointers == [0, 0, 4 * 10, 0, 0]
    assert module.many.data_ptr() == module.l.bias.data_ptr()
    assert module.of_buffer[0].data_ptr() == module.stored[1:].data_ptr()


@pytest.mark.parametrize("reads", [False, True], ids=["on meta", "reads data"])
def test_a_skeleton_names_what_shows_its_weights_and_rebuilds_none_of_it(reads: bool) -> None:
    skeleton = build_skeleton(model("Views", Path("/unused"), reads))

    assert [(one.name, one.target, one.same) for one in skeleton.aliases] == [
        ("data", "l.weight", False),
        ("rows", "l.weight", False),
        ("last", "l.weight", False),
        ("turned", "l.weight", False),
        ("flat", "l.weight", False),
        ("many", "l.bias", False),
        ("of_buffer", "stored", False),
    ]
    assert skeleton.attributes == ()


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=True)


def make_recurrent(kind: str, reads: bool) -> nn.Module:
    module = Recurrent(kind)
    if reads:
        assert torch.ones(1).item() == 1
    return module


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("reads", [False, True], ids=["on meta", "reads data"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_flat_weights_of_recurrent_layers_are_the_installed_parameters(
    tmp_path: Path, kind: str, reads: bool, dtype: Any, mode: Mode
) -> None:
    torch.manual_seed(1)
    source = Recurrent(kind).eval()
    save(tmp_path, source.state_dict())
    kwargs = {"kind": kind, "reads": reads}
    factory = "tests.weights.test_aliases:make_recurrent"

    module = load(Model(name="m", factory=factory, kwargs=kwargs, checkpoint=tmp_path, dtype=dtype), mode).module

    assert isinstance(module, Recurrent)
    flat = module.cell._flat_weights
    assert len(flat) == len(module.cell._flat_weights_names) == 16
    assert all(one is module.cell._parameters[n] for one, n in zip(flat, module.cell._flat_weights_names, strict=True))
    x = torch.arange(12.0).view(1, 4, 3)
    if dtype:
        x, source = x.double(), source.double()
    with torch.no_grad():
        assert torch.equal(module.cell(x)[0], source.cell(x)[0])
