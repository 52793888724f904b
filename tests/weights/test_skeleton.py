"""The skeleton of any constructor: parameters without data, everything that no checkpoint holds as it is ordinarily."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from app.checkpoints import open_checkpoint
from app.progress import Progress
from app.settings import Model, Waive
from app.weights import LoadedModel, Skeleton
from app.weights.install import install
from app.weights.layout import plan_layout
from app.weights.plan import ModelTensor, plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton, meta_left, named_tensors


class Plain(nn.Module):
    """Runs on the meta device; its buffers have values that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4).sin(), persistent=False)


class ReadsBuffer(Plain):
    """Looks at values of its own, as models with stochastic depth do.

    Not by torch.linspace: `from_pretrained` of transformers makes that ignore the meta device for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(3.0) / 20]
        self.register_buffer("scaled", self.table * 2, persistent=False)


class ReadsParameter(Plain):
    """Looks at a value of a parameter that is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.embed.weight.abs().max().item() >= 0
        self.scale = nn.Parameter(torch.full((2,), 7.0))


class OnParametersDevice(Plain):
    """Computes a buffer where a parameter of its lies, as the attention masks of Swin in timm are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2, 3, device=self.embed.weight.device).tril(), persistent=False)


class OnParametersDeviceAndReadsBuffer(OnParametersDevice):
    """Does both, as Swin in timm with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(3.0) / 20]


class Partial(nn.Module):
    """Has parameters that a checkpoint may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.first = nn.Parameter(torch.full((2,), 7.0))
        self.second = self.first
        self.register_buffer("steps", torch.tensor([1, 2, 3]))


class PartialReadsBuffer(Partial):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(3.0) / 20]


Pair = namedtuple("Pair", ["left", "right"])


class Attributes(nn.Module):
    """Keeps tensors where neither parameters nor buffers are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.direct = torch.arange(4.0).sqrt()
        self.listed = ["text", torch.ones(2), torch.full((2,), 0.5)]
        self.mapped = OrderedDict(a=torch.tensor([3, 1, 2]), b=5)
        self.paired = (torch.zeros(1), "text", torch.ones(1))
        self.inner = nn.Sequential(nn.Linear(1, 1))
        self.inner.extra = torch.eye(2)
        self.named = Pair(torch.ones(1), 3)


class Many(nn.Module):
    """One of every kind of number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(2))
        self.narrow = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        self.whole = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        self.truth = nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False)
        self.complex = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.tied = self.number
        self.register_buffer("mean", torch.linspace(0, 1, 5))
        self.register_buffer("mean_again", self.mean)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("derived", torch.linspace(0, 1, 5, dtype=torch.float64), persistent=False)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(2, 3).t())


class Stateful(nn.Module):
    def get_extra_state(self) -> Any:
        return {"scale": 1}

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class HasState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Stateful(), nn.Sequential(Stateful(), nn.Linear(1, 1))


class TiedBuffers(nn.Module):
    """A buffer under a name that is stored and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alias", torch.zeros(3), persistent=False)
        self.register_buffer("kept", self.alias)


class Nested(nn.Module):
    """A tensor two levels deep in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = {"levels": [torch.arange(3.0)]}


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Plain,
        ReadsBuffer,
        ReadsParameter,
        OnParametersDevice,
        OnParametersDeviceAndReadsBuffer,
        Partial,
        PartialReadsBuffer,
        Attributes,
        Many,
        ChannelsLast,
        HasState,
        TiedBuffers,
        Nested,
    )
}


def make(kind: str) -> nn.Module:
    return KINDS[kind]()


def model(kind: str, **fields: Any) -> Model:
    return Model(
        name="m",
        factory="tests.weights.test_skeleton:make",
        kwargs={"kind": kind},
        checkpoint=Path("/unused"),
        **fields,
    )


def skeleton(kind: str, **fields: Any) -> Skeleton:
    return build_skeleton(model(kind, **fields))


def load(kind: str, directory: Path, source: nn.Module, **fields: Any) -> LoadedModel:
    """Save what the module holds, tied tensors once, and install it into a skeleton."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in source.state_dict().items():
        kept.setdefault(tensor.data_ptr(), (name, tensor.clone()))
    save_file(dict(kept.values()), directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    wanted = model(kind, **fields)
    built = build_skeleton(wanted)
    resident = read_resident(checkpoint, plan_layout(checkpoint, "map", "", wanted.cast), Progress(), 1 << 20, {})
    loaded = install(built, checkpoint, resident.memory, plan_weights(built.table, checkpoint, wanted))
    checkpoint.close()
    return loaded


WAYS = ["Plain", "ReadsBuffer", "ReadsParameter", "OnParametersDevice", "OnParametersDeviceAndReadsBuffer"]


@pytest.mark.parametrize("kind", WAYS)
def test_what_is_stored_has_no_data_and_other_buffers_that_of_an_ordinary_construction(kind: str) -> None:
    built, ordinary = skeleton(kind), make(kind)

    assert [name for name, parameter in built.module.named_parameters() if not parameter.is_meta] == []
    found = dict(built.module.named_buffers(remove_duplicate=False))
    expected = dict(ordinary.named_buffers(remove_duplicate=False))
    assert found.keys() == expected.keys()
    assert {name for name, buffer in found.items() if buffer.is_meta} == expected.keys() & ordinary.state_dict().keys()
    for name, buffer in expected.items():
        assert (found[name].dtype, found[name].shape) == (buffer.dtype, buffer.shape), name
        assert found[name].is_meta or torch.equal(found[name], buffer), name


@pytest.mark.parametrize("kind", WAYS)
def test_stored_buffers_that_may_be_missing_have_their_ordinary_values(kind: str) -> None:
    built, ordinary = skeleton(kind, waive=Waive(missing=["norm.running_*"])), make(kind)
    found = dict(built.module.named_buffers())

    assert torch.equal(found["norm.running_mean"], torch.zeros(4))
    assert torch.equal(found["norm.running_var"], torch.ones(4))
    assert found["norm.num_batches_tracked"].is_meta
    parameters = dict(ordinary.named_parameters(remove_duplicate=False))
    assert meta_left(built.module) == (*parameters, "norm.num_batches_tracked")


@pytest.mark.parametrize("kind", WAYS)
def test_every_way_of_construction_keeps_ties_and_gives_a_module_that_serves(kind: str) -> None:
    built = skeleton(kind)
    module = built.module

    assert isinstance(module, Plain)
    assert module.embed.weight is module.head.weight
    assert built.table.ties == (("embed.weight", "head.weight"),)
    assert not any(part.training for part in module.modules())
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("kind", WAYS)
def test_every_way_of_construction_takes_a_checkpoint(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = make(kind)
    loaded = load(kind, tmp_path, source)

    assert loaded.module is not None
    assert meta_left(loaded.module) == ()
    expected = dict(source.state_dict())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.module.state_dict().items())
    assert loaded.tensors["embed.weight"].data_ptr() == loaded.tensors["head.weight"].data_ptr()


@pytest.mark.parametrize(
    ("kind", "with_data"),
    [("Plain", False), ("OnParametersDevice", False), ("ReadsBuffer", True), ("ReadsParameter", True)],
)
def test_a_construction_with_data_is_told_and_why(kind: str, with_data: bool) -> None:
    told = skeleton(kind).construction

    assert told.startswith("built with data, since on the meta device model.factory ") is with_data
    assert ("meta" in told) is with_data
    assert bool(told) is with_data


@pytest.mark.parametrize("kind", ["Partial", "PartialReadsBuffer"])
@pytest.mark.parametrize(("waived", "kept"), [([], []), (["first", "second"], ["first", "second"])])
def test_parameters_that_may_be_missing_have_their_ordinary_values(
    kind: str, waived: list[str], kept: list[str]
) -> None:
    module = skeleton(kind, waive=Waive(missing=waived)).module

    assert isinstance(module, Partial)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert [name for name, parameter in parameters.items() if not parameter.is_meta] == kept
    assert all(torch.equal(parameters[name], torch.full((2,), 7.0)) for name in kept)
    assert module.first is module.second
    assert not any(parameter.requires_grad for parameter in parameters.values())
    assert module.steps.is_meta


def test_a_buffer_that_may_be_missing_has_its_ordinary_value(tmp_path: Path) -> None:
    source = Partial()
    del source._buffers["steps"]

    loaded = load("Partial", tmp_path, source, waive=Waive(missing=["steps"]))

    assert loaded.tensors["steps"].tolist() == [1, 2, 3]
    assert (loaded.plan.rebuilt, loaded.rebuilt_bytes) == (("steps",), 24)


def test_a_pattern_that_could_waive_all_leaves_nothing_as_it_was_constructed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = Partial()

    loaded = load("Partial", tmp_path, source, waive=Waive(missing=["*"]))

    assert torch.equal(loaded.tensors["layer.weight"], source.layer.weight)
    assert (loaded.plan.rebuilt, loaded.plan.waived) == ((), {})


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_"):
                continue
            items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            for number, item in enumerate(items):
                if isinstance(item, torch.Tensor):
                    yield f"{prefix}.{name}.{number}", item


def test_plain_tensor_attributes_of_any_kind_are_found_and_listed() -> None:
    built = skeleton("Attributes")
    found, expected = dict(plain_tensors(built.module)), dict(plain_tensors(Attributes()))

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert built.attributes == (
        "direct",
        "listed",
        "mapped",
        "paired",
        "named",
        "inner.extra",
    )
    module = built.module
    assert isinstance(module, Attributes)
    assert (module.listed[0], module.mapped["b"], module.paired[1]) == ("text", 5, "text")
    assert isinstance(module.paired, tuple)
    assert isinstance(module.mapped, OrderedDict)
    assert meta_left(module) == ("layer.weight", "layer.bias", "inner.0.weight", "inner.0.bias")


def test_a_named_tuple_stays_a_named_tuple() -> None:
    module = skeleton("Attributes").module

    assert isinstance(module, Attributes)
    assert (module.named.left.tolist(), module.named.right) == ([1.0], 3)


def test_a_tensor_deep_in_plain_attributes_has_its_value_or_is_told_as_left() -> None:
    module = skeleton("Nested").module

    assert isinstance(module, Nested)
    tensor = module.deep["levels"][0]
    assert not tensor.is_meta or meta_left(module) == ("deep",)


@pytest.mark.parametrize(
    ("dtype", "name", "kind"),
    [("bfloat16", "BF16", torch.bfloat16), ("float16", "F16", torch.float16), ("float64", "F64", torch.float64)],
)
def test_a_configured_dtype_is_that_of_every_floating_point_tensor_and_of_no_other(
    dtype: Any, name: str, kind: torch.dtype
) -> None:
    built = skeleton("Many", dtype=dtype)
    found = {tensor.name: tensor.dtype for tensor in built.table.tensors}

    assert found == {
        **dict.fromkeys(("number", "narrow", "tied", "mean", "mean_again", "derived"), name),
        "whole": "I8",
        "truth": "BOOL",
        "complex": "C64",
        "count": "I64",
    }
    module = built.module
    assert isinstance(module, Many)
    assert (module.derived.dtype, module.count.is_meta) == (kind, True)
    assert torch.equal(module.derived, Many().derived.to(kind))
    assert module.number is module.tied
    assert ("number", "tied") in built.table.ties


def test_a_configured_dtype_keeps_tied_buffers_tied() -> None:
    built = skeleton("Many", dtype="bfloat16")

    assert ("mean", "mean_again") in built.table.ties


def test_without_a_configured_dtype_every_tensor_has_its_own() -> None:
    found = {tensor.name: tensor.dtype for tensor in skeleton("Many").table.tensors}

    assert (found["number"], found["narrow"], found["derived"], found["complex"]) == ("F32", "F16", "F64", "C64")


def test_the_table_knows_the_strides_that_the_model_wants() -> None:
    table = {tensor.name: tensor for tensor in skeleton("ChannelsLast").table.tensors}

    assert table["conv.weight"] == ModelTensor("conv.weight", "F32", (5, 3, 2, 2), (12, 1, 6, 3), True, 240)
    assert table["turned"] == ModelTensor("turned", "F32", (3, 2), (1, 3), True, 24)


def test_the_table_knows_how_many_bytes_every_tensor_has() -> None:
    found = {tensor.name: tensor.nbytes for tensor in skeleton("Many").table.tensors}

    assert found == {name: tensor.nbytes for name, tensor in named_tensors(Many())}
    assert (found["number"], found["narrow"], found["truth"], found["count"], found["derived"]) == (8, 4, 2, 8, 40)


def test_the_table_knows_the_bytes_after_a_cast() -> None:
    found = {tensor.name: tensor.nbytes for tensor in skeleton("Many", dtype="bfloat16").table.tensors}

    assert (found["number"], found["narrow"], found["count"], found["derived"]) == (4, 4, 8, 10)


def test_the_table_names_modules_that_keep_state_beside_their_tensors() -> None:
    assert skeleton("HasState").table.extra_state == ("one._extra_state", "two.0._extra_state")
    assert skeleton("Plain").table.extra_state == ()


def test_a_buffer_that_is_not_stored_takes_the_value_of_its_stored_name(tmp_path: Path) -> None:
    source = TiedBuffers()
    source.kept.copy_(torch.tensor([1.0, 2.0, 3.0]))

    loaded = load("TiedBuffers", tmp_path, source)

    assert {name: tensor.tolist() for name, tensor in loaded.tensors.items()} == {
        "alias": [1.0, 2.0, 3.0],
        "kept": [1.0, 2.0, 3.0],
    }


def test_building_a_skeleton_leaves_registration_as_it_was() -> None:
    before = nn.Module.register_parameter

    skeleton("ReadsParameter", waive=Waive(missing=["scale"]))

    assert nn.Module.register_parameter is before
    assert not nn.Linear(1, 1).weight.is_meta
