"""Skeleton and installation with real torch modules: exact buffers, kept ties, nothing left on meta."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from app.checkpoints import Checkpoint, open_checkpoint
from app.errors import CheckpointError, SettingsError
from app.progress import Progress
from app.settings import Model, Waive
from app.weights import LoadedModel, ResidentWeights
from app.weights.install import bind, install
from app.weights.layout import Mode, plan_layout
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import build_skeleton, describe, meta_left


class Attributes(nn.Module):
    """Keeps tensors where neither parameters nor buffers are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.plain = torch.arange(4.0).sqrt()
        self.listed = [torch.ones(2), torch.full((2,), 0.5)]
        self.named = {"a": torch.tensor([3, 1, 2])}
        self.paired = (torch.zeros(1), "text")


class Shared(nn.Module):
    """Two names for one parameter, in different modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Partial(nn.Module):
    """Has a parameter that the checkpoint may lack; its ordinary value is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((2,), 7.0))


def attributes() -> nn.Module:
    return Attributes()


def shared() -> nn.Module:
    return Shared()


def partial() -> nn.Module:
    return Partial()


def bert() -> nn.Module:
    return BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    )


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaModel(LlamaConfig(vocab_size=50, **sizes))


def raising() -> nn.Module:
    raise RuntimeError("no such size")


def nothing() -> Any:
    return {"not": "a module"}


def model(factory: str, **fields: Any) -> Model:
    return Model(name="m", factory=f"tests.weights.test_install:{factory}", checkpoint=Path("/unused"), **fields)


def saved(module: nn.Module, file: Path, drop: tuple[str, ...] = ()) -> Checkpoint:
    """Save what a checkpoint holds, tied tensors once, and open it again."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        kept.setdefault(tensor.data_ptr(), (name, tensor.clone()))
    save_file({name: tensor for name, tensor in kept.values() if name not in drop}, file)
    return open_checkpoint(file)


def read(checkpoint: Checkpoint, mode: Mode = "map") -> ResidentWeights:
    return read_resident(checkpoint, plan_layout(checkpoint, mode, "", None), Progress(), 1 << 20, {})


def loaded(factory: str, checkpoint: Checkpoint, mode: Mode = "map", **fields: Any) -> LoadedModel:
    wanted = model(factory, **fields)
    skeleton = build_skeleton(wanted)
    plan = plan_weights(skeleton.table, checkpoint, wanted)
    return install(skeleton, checkpoint, read(checkpoint, mode).memory, plan)


def attribute_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        yield from ((f"{name}.{n}", item) for n, item in enumerate(items) if isinstance(item, torch.Tensor))


@pytest.mark.parametrize("factory", ["bert", "llama"])
def test_buffers_that_no_checkpoint_holds_have_the_bits_of_an_ordinary_construction(factory: str) -> None:
    ordinary = globals()[factory]()
    skeleton = build_skeleton(model(factory))
    buffers = dict(skeleton.module.named_buffers(remove_duplicate=False))
    assert buffers
    for name, expected in ordinary.named_buffers(remove_duplicate=False):
        assert buffers[name].dtype == expected.dtype
        assert torch.equal(buffers[name], expected), name
    assert all(parameter.is_meta for parameter in skeleton.module.parameters())
    assert not skeleton.module.training


def test_plain_tensor_attributes_have_their_ordinary_values_too() -> None:
    skeleton = build_skeleton(model("attributes"))
    found, expected = dict(attribute_tensors(skeleton.module)), dict(attribute_tensors(Attributes()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert meta_left(skeleton.module) == ("layer.weight", "layer.bias")


@pytest.mark.parametrize("mode", ["map", "read"])
@pytest.mark.parametrize("factory", ["bert", "gpt2", "llama", "shared", "attributes"])
def test_an_installed_module_computes_from_the_memory_that_was_read_and_has_nothing_on_meta(
    factory: str, mode: Mode, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    original = globals()[factory]()
    checkpoint = saved(original, tmp_path / "model.safetensors")
    result = loaded(factory, checkpoint, mode)
    assert result.module is not None
    assert meta_left(result.module) == ()
    state = original.state_dict()
    assert {
        name: torch.equal(tensor, state[name]) for name, tensor in result.module.state_dict().items()
    } == dict.fromkeys(state, True)
    assert not any(parameter.requires_grad for parameter in result.module.parameters())
    assert result.copied_bytes == 0


def test_ties_are_one_object_after_installing(tmp_path: Path) -> None:
    result = loaded("shared", saved(Shared(), tmp_path / "model.safetensors"))
    assert isinstance(result.module, Shared)
    assert result.module.embed.weight is result.module.head.weight
    assert result.table.ties == (("embed.weight", "head.weight"),)
    assert result.tensors["embed.weight"].data_ptr() == result.tensors["head.weight"].data_ptr()


def test_a_parameter_that_may_be_missing_keeps_its_ordinary_value(tmp_path: Path) -> None:
    checkpoint = saved(Partial(), tmp_path / "model.safetensors", drop=("scale",))
    result = loaded("partial", checkpoint, waive=Waive(missing=["scale"]))
    assert torch.equal(result.tensors["scale"], torch.full((2,), 7.0))
    assert (result.plan.rebuilt, result.plan.waived) == (("scale",), {"missing": ("scale",)})
    with pytest.raises(CheckpointError, match=r"missing: scale F32\[2\] is in the model, not in the checkpoint"):
        loaded("partial", checkpoint)


def test_tensors_are_bound_by_name_without_a_module(tmp_path: Path) -> None:
    module = Partial()
    checkpoint = saved(module, tmp_path / "model.safetensors", drop=("scale",))
    table = describe(module)
    plan = plan_weights(table, checkpoint, model("partial", waive=Waive(missing=["scale"])))
    memory = read(checkpoint).memory
    result = bind(table, {"scale": torch.zeros(2)}, checkpoint, memory, plan)
    assert result.module is None
    assert torch.equal(result.tensors["layer.weight"], module.layer.weight.detach())
    with pytest.raises(CheckpointError, match="neither checkpoint nor artifact holds scale"):
        bind(table, {}, checkpoint, memory, plan)


def test_a_tensor_that_is_not_aligned_to_its_element_is_placed_where_it_is(tmp_path: Path) -> None:
    # One odd byte in front: the format has no alignment, and a reader must not take the address for aligned.
    weight = torch.arange(4, dtype=torch.float32)
    header = (
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
        b'"b": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]}}'
    )
    header += b" " * (-len(header) % 8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" + weight.numpy().tobytes())

    module = nn.Module()
    module.register_buffer("a", torch.zeros(1, dtype=torch.uint8))
    module.register_buffer("b", torch.zeros(4))
    checkpoint = open_checkpoint(file)
    table = describe(module)
    resident = read(checkpoint)
    result = bind(table, {}, checkpoint, resident.memory, plan_weights(table, checkpoint, model("unused")))
    assert torch.equal(result.tensors["b"], weight)
    assert result.tensors["b"].data_ptr() % 64 == 0
    assert resident.memory.layout.slab_bytes == 16
    assert result.copied_bytes == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("raising", "model.factory tests.weights.test_install:raising raised RuntimeError: no such size"),
        ("nothing", "model.factory tests.weights.test_install:nothing returned dict, expected an nn.Module"),
        ("absent", "model.factory = 'tests.weights.test_install:absent' cannot be imported"),
    ],
)
def test_a_factory_that_gives_no_module_is_a_configuration_error(factory: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_skeleton(model(factory))
    assert str(caught.value).startswith(message)
