"""Every value of every dtype arrives bit for bit, in the place, the strides and the object that the model wants."""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from app.checkpoints import Checkpoint, CheckpointFile, Piece, TensorEntry, file_stamp, open_checkpoint
from app.dtypes import BITS, FLOATING, size_bytes
from app.errors import CheckpointError
from app.progress import Progress
from app.settings import CASTS, Model, Waive
from app.weights import LoadedModel, Skeleton
from app.weights.dtypes import TORCH
from app.weights.install import bind, install
from app.weights.layout import Mode, plan_layout
from app.weights.memory import Memory
from app.weights.plan import plan_weights
from app.weights.reading import read_resident
from app.weights.skeleton import describe
from tests.unit.written import filled, noise, safetensors_bytes

MODES: tuple[Mode, ...] = ("map", "read")
STORED = sorted(set(BITS) - {"C128"})
STAGING = 1 << 20


def model(**fields: Any) -> Model:
    return Model(name="m", factory="a:b", checkpoint=Path("/unused"), **fields)


def memory_of(checkpoint: Checkpoint, mode: Mode, cast: str | None = None, verify: bool = False) -> Memory:
    digests = {file.path.name: hashlib.sha256(file.path.read_bytes()).hexdigest() for file in checkpoint.files}
    layout = plan_layout(checkpoint, mode, "", cast)
    return read_resident(checkpoint, layout, Progress(), STAGING, digests if verify else {}).memory


def held(module: nn.Module, checkpoint: Checkpoint, mode: Mode, cast: str | None = None, verify: bool = False) -> Any:
    """Return the tensors by name, bound without a module."""
    table = describe(module)
    memory = memory_of(checkpoint, mode, cast, verify)
    names = {short: name for name, short in CASTS.items()}
    wanted = model(dtype=names[cast] if cast else None)
    return bind(table, {}, checkpoint, memory, plan_weights(table, checkpoint, wanted)).tensors


def holder(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module whose buffers have these names, dtypes, shapes and strides, and no data."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty_like(tensor, device="meta"))
    return module


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.fixture
def every_dtype(tmp_path: Path) -> Checkpoint:
    """A file whose tensors are of every dtype, several shapes each, some of them at odd addresses."""
    tensors = {}
    for dtype in STORED:
        tensors |= {f"{dtype}_{n}": filled(dtype, *s, salt=n) for n, s in enumerate([(6,), (3, 4), (0, 2), (65, 70)])}
        if dtype != "F4":
            tensors[f"{dtype}_scalar"] = filled(dtype)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors, padded=False))
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_that_safetensors_holds_arrives_as_its_own_library_reads_it(
    every_dtype: Checkpoint, mode: Mode, verify: bool
) -> None:
    expected = load_file(every_dtype.files[0].path)
    assert {tensor.dtype for tensor in expected.values()} == {TORCH[dtype] for dtype in STORED}

    assert_equal(held(holder(expected), every_dtype, mode, verify=verify), expected)


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cast", sorted(CASTS.values()))
def test_a_cast_gives_the_values_that_torch_would_give(
    every_dtype: Checkpoint, mode: Mode, cast: str, verify: bool
) -> None:
    stored = load_file(every_dtype.files[0].path)
    names = {name: name.rpartition("_")[0] for name in stored}
    expected = {name: tensor.to(TORCH[cast]) if names[name] in FLOATING else tensor for name, tensor in stored.items()}

    assert_equal(held(holder(expected), every_dtype, mode, cast, verify), expected)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_without_a_type_in_torch_is_refused_by_its_name(tmp_path: Path, dtype: str) -> None:
    text = f'{{"w": {{"dtype": "{dtype}", "shape": [4], "data_offsets": [0, 3]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))

    with pytest.raises(CheckpointError, match=rf"tensor w is {dtype}, for which torch has no type; known are F4, BOOL"):
        open_checkpoint(tmp_path)


def boxes(directory: Path, dtype: str, shape: tuple[int, int, int]) -> tuple[Checkpoint, bytes]:
    """Cut a tensor of noise into four boxes that lie in two files; return them as a checkpoint, and its bytes."""
    whole = torch.frombuffer(bytearray(filled(dtype, *shape)[2]), dtype=torch.uint8).view(*shape, -1)
    cuts = [(0, 0), (0, 1), (1, 0), (1, 1)]
    middle = (shape[0] // 3, shape[2] // 2)
    contents: list[bytes] = [b"\0" * 64, b"\0" * 128]
    pieces = []
    for number, (upper, right) in enumerate(cuts):
        rows = slice(middle[0], None) if upper else slice(0, middle[0])
        columns = slice(middle[1], None) if right else slice(0, middle[1])
        box = whole[rows, :, columns].contiguous()
        start = (middle[0] * upper, 0, middle[1] * right)
        pieces.append(Piece(number % 2, len(contents[number % 2]), start, tuple(box.shape[:3])))
        contents[number % 2] += box.numpy().tobytes()
    files = []
    for number, data in enumerate(contents):
        path = directory / f"{number}.bin"
        path.write_bytes(data)
        handle = path.open("rb")
        files.append(CheckpointFile(path, handle.fileno(), len(data), file_stamp(path.stat())))
        KEPT.append(handle)
    entry = TensorEntry("w", dtype, shape, 0, 0, size_bytes(dtype, shape), None, tuple(pieces))
    return Checkpoint(directory, "boxes", tuple(files), {"w": entry}), whole.numpy().tobytes()


KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Any:
    yield
    while KEPT:
        KEPT.pop().close()


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", sorted(BITS))
def test_a_tensor_in_pieces_of_any_dtype_is_put_together_bit_for_bit(
    tmp_path: Path, dtype: str, mode: Mode, verify: bool
) -> None:
    checkpoint, whole = boxes(tmp_path, dtype, (7, 5, 6))

    found = held(holder({"w": torch.empty((7, 5, 6), dtype=TORCH[dtype])}), checkpoint, mode, verify=verify)

    assert bits(found["w"]) == whole
    assert found["w"].data_ptr() % 64 == 0


@pytest.mark.parametrize("stored", sorted(FLOATING))
@pytest.mark.parametrize("cast", sorted(CASTS.values()))
def test_a_tensor_in_pieces_is_cast_on_its_way(tmp_path: Path, stored: str, cast: str) -> None:
    checkpoint, whole = boxes(tmp_path, stored, (7, 5, 6))
    expected = torch.frombuffer(bytearray(whole), dtype=TORCH[stored]).view(7, 5, 6).to(TORCH[cast])

    found = held(holder({"w": expected}), checkpoint, "map", cast)

    assert bits(found["w"]) == bits(expected)


def test_what_is_larger_than_the_scratch_memory_is_converted_in_parts(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 700, 900), "v": torch.randn(1_500_000), "u": torch.randn(2, 1, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    expected = {name: tensor.bfloat16() for name, tensor in tensors.items()}

    assert_equal(held(holder(expected), checkpoint, "map", "BF16"), expected)


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.dense = nn.Linear(3, 2)


class Numbers(nn.Module):
    """Parameters that cannot have gradients, as quantized models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.arange(6, dtype=torch.uint8).view(2, 3), requires_grad=False)
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.arange(4.0))
        self.register_buffer("again", self.steps)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.state: Any = None

    def get_extra_state(self) -> Any:
        return torch.tensor([1.5, 2.5]) if self.state is None else self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Versioned(nn.Module):
    """Refuses what looks like a file of its first format."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.seen: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Expanded(nn.Module):
    """A stored buffer whose elements share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.outer = nn.Sequential(Versioned(), nn.Linear(2, 2))


def loaded(
    module: nn.Module, state: Mapping[str, torch.Tensor], directory: Path, mode: Mode = "map", **fields: Any
) -> LoadedModel:
    """Install saved tensors into a module that has lost its parameters, as a skeleton has."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, directory / "model.safetensors"
    )
    checkpoint = open_checkpoint(directory)
    module.eval().requires_grad_(False)
    table = describe(module)
    memory = memory_of(checkpoint, mode)
    plan = plan_weights(table, checkpoint, model(**fields))
    return install(Skeleton(module, table), checkpoint, memory, plan)


@pytest.mark.parametrize("mode", MODES)
def test_a_channels_last_module_gets_the_values_in_its_own_strides(tmp_path: Path, mode: Mode) -> None:
    source, module = Channels(), Channels()

    result = loaded(module, source.state_dict(), tmp_path, mode)

    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert (module.turned.shape, module.turned.stride()) == ((3, 2), (1, 3))
    assert_equal(dict(module.state_dict()), dict(source.state_dict()))
    assert result.copied_bytes == source.conv.weight.nbytes + source.turned.nbytes


@pytest.mark.parametrize("mode", MODES)
def test_whole_numbers_are_parameters_without_gradients(tmp_path: Path, mode: Mode) -> None:
    source, module = Numbers(), Numbers()
    source.packed.data += 7

    loaded(module, source.state_dict(), tmp_path, mode)

    assert all(isinstance(one, nn.Parameter) for one in (module.packed, module.table, module.scale))
    assert_equal(dict(module.state_dict()), dict(source.state_dict()))
    assert [parameter.requires_grad for parameter in module.parameters()] == [False] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "names", [("one.weight", "steps"), ("two.weight", "again"), ("one.weight", "two.weight", "steps", "again")]
)
def test_tied_names_are_one_object_whichever_of_them_are_stored(
    tmp_path: Path, mode: Mode, names: tuple[str, ...]
) -> None:
    source, module = Tied(), Tied()
    state = source.state_dict()

    result = loaded(module, {name: state[name] for name in names}, tmp_path, mode)

    assert module.one.weight is module.two.weight
    assert module.steps is module.again
    assert_equal(dict(module.state_dict()), dict(state))
    assert result.tensors["one.weight"].data_ptr() == result.tensors["two.weight"].data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_tied_names_that_are_stored_as_different_tensors_are_refused(tmp_path: Path, mode: Mode) -> None:
    state = dict(Tied().state_dict())
    state["two.weight"] = state["one.weight"] + 1

    with pytest.raises(CheckpointError, match=r"tied: .*(one|two)\.weight.* are one tensor in the model, .*different"):
        loaded(Tied(), state, tmp_path, mode)


def test_tied_names_that_are_stored_as_equal_but_no_numbers_are_the_same(tmp_path: Path) -> None:
    state = dict(Tied().state_dict())
    state["one.weight"] = state["two.weight"] = torch.full((3, 3), float("nan"))
    module = Tied()

    loaded(module, state, tmp_path)

    assert module.one.weight is module.two.weight


def test_equal_numbers_of_different_bits_are_different(tmp_path: Path) -> None:
    state = dict(Tied().state_dict())
    state["one.weight"], state["two.weight"] = torch.zeros(3, 3), -torch.zeros(3, 3)

    with pytest.raises(CheckpointError, match=r"tied: .*(one|two)\.weight.* are one tensor in the model, .*different"):
        loaded(Tied(), state, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_is_given_its_extra_state(tmp_path: Path, mode: Mode) -> None:
    module = Stateful()
    state = {**module.state_dict(), "_extra_state": torch.tensor([5.0, 6.0, 7.0])}

    result = loaded(module, state, tmp_path, mode)

    assert module.state.tolist() == [5.0, 6.0, 7.0]
    assert result.plan.extra_state == ("_extra_state",)
    module.state += 1


def test_extra_state_that_is_no_tensor_is_given_as_it_is(tmp_path: Path) -> None:
    source, module = Stateful(), Stateful().eval().requires_grad_(False)
    save_file({"layer.weight": source.layer.weight, "layer.bias": source.layer.bias}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    checkpoint = Checkpoint(opened.path, opened.format, opened.files, opened.tensors, {"_extra_state": {"a": 1}})
    table = describe(module)

    install(Skeleton(module, table), checkpoint, memory_of(checkpoint, "map"), plan_weights(table, checkpoint, model()))

    assert module.state == {"a": 1}


def test_extra_state_that_may_be_missing_is_left_to_the_constructor(tmp_path: Path) -> None:
    module = Stateful()
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "_extra_state"}

    loaded(module, state, tmp_path, waive=Waive(missing=["_extra_state"]))

    assert module.state is None


def test_modules_are_told_the_version_of_their_own_format(tmp_path: Path) -> None:
    module = Normed()

    loaded(module, Normed().state_dict(), tmp_path)

    assert module.outer[0].seen == [3]
    assert module.norm._version == 2


@pytest.mark.parametrize("mode", MODES)
def test_buffers_can_be_written_and_the_file_does_not_change(tmp_path: Path, mode: Mode) -> None:
    module = Normed()
    loaded(module, Normed().state_dict(), tmp_path, mode)
    before = (tmp_path / "model.safetensors").read_bytes()

    for buffer in module.buffers():
        buffer.add_(1)

    assert module.norm.running_mean.tolist() == [1.0, 1.0, 1.0]
    assert module.norm.num_batches_tracked.item() == 1
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("mode", MODES)
def test_a_stored_buffer_whose_elements_share_their_memory_takes_the_stored_values(tmp_path: Path, mode: Mode) -> None:
    module = Expanded()

    loaded(module, {"mask": torch.tensor([1.0, 0.0, 1.0, 0.0])}, tmp_path, mode)

    assert module.mask.tolist() == [1.0, 0.0, 1.0, 0.0]


WRITING = """
import sys
from pathlib import Path
import torch
from torch import nn
from tests.weights.test_values import loaded
cast, mode, directory = sys.argv[1:]
torch.set_num_threads(1)
module = nn.Linear(40, 40)
state = {"weight": torch.ones(40, 40), "bias": torch.ones(40)}
loaded(module, state, Path(directory), mode)
print("installed", module.weight.sum().item(), flush=True)
module.weight.add_(1)
print("written", module.weight.sum().item())
"""


@pytest.mark.parametrize("mode", MODES)
def test_writing_to_the_weights_never_passes_unseen(tmp_path: Path, mode: Mode) -> None:
    command = [sys.executable, "-c", WRITING, "none", mode, str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.stdout.split() == ["installed", "1600.0"]
    assert done.returncode != 0


@pytest.mark.parametrize("mode", MODES)
def test_tensors_outlive_everything_that_brought_them(tmp_path: Path, mode: Mode) -> None:
    source, module = nn.Linear(300, 300), nn.Linear(300, 300)

    loaded(module, source.state_dict(), tmp_path, mode)
    (tmp_path / "model.safetensors").unlink()
    junk = [noise(100_000, salt) for salt in range(20)]

    assert torch.equal(module.weight, source.weight)
    assert len(junk) == 20


STRIDED = {
    "turned": ((3, 2), (1, 3), 6),
    "a step": ((4,), (3,), 10),
    "the same row again": ((3, 4), (0, 1), 4),
    "windows that overlap": ((5, 3), (1, 1), 7),
    "channels last": ((2, 3, 2, 2), (12, 1, 6, 3), 24),
    "one element": ((1, 1), (7, 9), 1),
    "no axis": ((), (), 1),
}


@pytest.mark.parametrize(("shape", "stride", "extent"), STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cast", [None, "F32", "BF16"])
def test_a_tensor_that_is_stored_with_strides_has_its_values(
    tmp_path: Path,
    mode: Mode,
    cast: str | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    extent: int,
) -> None:
    path = tmp_path / "0.bin"
    path.write_bytes(bytes(8) + torch.arange(extent, dtype=torch.float32).numpy().tobytes() + bytes(8))
    KEPT.append(path.open("rb"))
    file = CheckpointFile(path, KEPT[-1].fileno(), path.stat().st_size, file_stamp(path.stat()))
    entry = TensorEntry("w", "F32", shape, 0, 8, 4 * extent, stride)
    checkpoint = Checkpoint(tmp_path, "strided", (file,), {"w": entry})
    expected = torch.arange(extent, dtype=torch.float32).as_strided(shape, stride).to(TORCH[cast or "F32"]).contiguous()

    found = held(holder({"w": expected}), checkpoint, mode, cast)

    assert found["w"].is_contiguous()
    assert_equal(found, {"w": expected})


def test_a_single_value_with_odd_strides_is_compared_with_the_other_name_of_its_tie(tmp_path: Path) -> None:
    path = tmp_path / "0.bin"
    path.write_bytes(torch.tensor([3.0, 3.0, 4.0]).numpy().tobytes())
    KEPT.append(path.open("rb"))
    file = CheckpointFile(path, KEPT[-1].fileno(), path.stat().st_size, file_stamp(path.stat()))
    entries = {name: TensorEntry(name, "F32", (1, 1), 0, offset, 4, (7, 9)) for name, offset in (("a", 0), ("b", 4))}
    module = nn.Module()
    module.register_buffer("a", torch.empty(1, 1, device="meta"))
    module.register_buffer("b", module.a)

    found = held(module, Checkpoint(tmp_path, "strided", (file,), entries), "map")

    assert {name: tensor.item() for name, tensor in found.items()} == {"a": 3.0, "b": 3.0}
