"""Files of torch.save open without torch: every tensor where torch put it, and every fault by file, fact and remedy."""

import io
import json
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.checkpoints import Checkpoint, Opaque, _torch_archive, open_checkpoint
from app.checkpoints.torch_zip import TorchZip
from app.dtypes import BITS
from app.errors import CheckpointError

TORCH: dict[str, torch.dtype] = {
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
FULL = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def bits(dtype: str, *shape: int) -> torch.Tensor:
    """Return a tensor whose bytes all differ in meaning: 0 and 1 for truths, anything for the others."""
    count = torch.Size(shape).numel() * max(1, BITS[dtype] // 8)
    raw = torch.arange(count, dtype=torch.uint8)
    return (raw % 2 if dtype == "BOOL" else raw * 37).view(TORCH[dtype]).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()) if tensor.numel() else b""


def saved(path: Path, value: object, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, path, **options)
    return path


def stored(checkpoint: Checkpoint, name: str) -> bytes:
    entry = checkpoint.tensors[name]
    return os.pread(checkpoint.files[entry.file].fd, entry.nbytes, entry.offset)


def opened(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).close()
    count = len(caught.value.problems)
    assert str(caught.value).split("\n")[0] == f"{path} is not a complete checkpoint: {count} problem(s)"
    return caught.value.problems


def test_every_dtype_that_is_known_here_is_tested_here() -> None:
    assert sorted(TORCH) == sorted(BITS)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_tensor_of_every_dtype_lies_where_torch_put_it(tmp_path: Path, dtype: str) -> None:
    tensor = bits(dtype, 2, 3)
    checkpoint = open_checkpoint(saved(tmp_path / "x.pt", {"w": tensor}))

    entry = checkpoint.tensors["w"]
    assert (entry.dtype, entry.shape, entry.stride, entry.pieces) == (dtype, (2, 3), None, ())
    assert stored(checkpoint, "w") == bytes(tensor.untyped_storage().tolist())
    checkpoint.close()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_suffix_and_protocol_opens_as_a_file_and_in_a_directory(
    tmp_path: Path, suffix: str, protocol: int
) -> None:
    file = saved(tmp_path / f"x{suffix}", OrderedDict(w=FULL, e=torch.zeros(0, 3)), pickle_protocol=protocol)

    for path in (file, tmp_path):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.format, list(checkpoint.tensors)) == ("torch", ["w", "e"])
        assert (stored(checkpoint, "w"), stored(checkpoint, "e")) == (raw(FULL), b"")
        assert (checkpoint.tensors["e"].shape, checkpoint.objects, checkpoint.notes) == ((0, 3), {}, ())
        checkpoint.close()


# what is saved → its shape, its stride where that is not C order, the bytes from the first element to the last
VIEWS: dict[str, tuple[torch.Tensor, tuple[int, ...] | None, int]] = {
    "whole": (FULL, None, 96),
    "rows": (FULL[1:3], None, 48),
    "one element": (FULL[3, 5], None, 4),
    "transposed": (FULL.t(), (1, 6), 96),
    "columns": (FULL[:, 2:4], (6, 1), 80),
    "a box": (FULL[1:3, 2:4], (6, 1), 32),
    "every other": (FULL[::2, ::3], (12, 3), 64),
    "expanded": (FULL[0, :1].expand(5), (0,), 4),
    "one of a dimension": (FULL[:1].t()[:, :1], None, 24),
    "channels last": (FULL.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last), (24, 1, 8, 2), 96),
    "none of a dimension": (FULL[:, 6:], None, 0),
}


@pytest.mark.parametrize(("tensor", "stride", "nbytes"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_kept_as_its_stretch_and_its_stride(
    tmp_path: Path, tensor: torch.Tensor, stride: tuple[int, ...] | None, nbytes: int
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "x.pt", {"w": tensor}))
    entry, found = checkpoint.tensors["w"], stored(checkpoint, "w")
    checkpoint.close()

    assert (entry.shape, entry.stride, entry.nbytes, len(found)) == (tuple(tensor.shape), stride, nbytes, nbytes)
    if nbytes:
        flat = torch.frombuffer(bytearray(found), dtype=torch.float32)
        assert torch.equal(flat.as_strided(tensor.shape, stride or torch.empty(tensor.shape).stride()), tensor)


def test_tensors_that_share_a_storage_share_its_bytes(tmp_path: Path) -> None:
    checkpoint = opened(saved(tmp_path / "x.pt", {"a": FULL, "b": FULL, "c": FULL[2:]}))

    a, b, c = (checkpoint.tensors[name] for name in "abc")
    assert a.place == b.place
    assert (c.offset - a.offset, c.nbytes) == (48, 48)


class Labelled(nn.Module):
    """Has what state dicts have besides plain tensors: parameters, buffers, an extra state."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def with_attributes() -> dict[str, object]:
    tensor, parameter = torch.ones(2), nn.Parameter(torch.zeros(2))
    tensor.label = parameter.label = "text"
    return {"t": tensor, "p": parameter, "q": nn.Parameter(FULL, requires_grad=False)}


def test_parameters_and_attributes_are_seen_through(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "x.pt", with_attributes()))

    found = {name: stored(checkpoint, name) for name in checkpoint.tensors}
    checkpoint.close()

    assert found == {"t": raw(torch.ones(2)), "p": bytes(8), "q": raw(FULL)}


# what get_extra_state returned → what is kept of it, what is noted
EXTRA: dict[str, tuple[object, object, tuple[str, ...]]] = {
    "nothing": (None, None, ()),
    "plain": ({"n": [1, 2.5, (True, "x")], "b": b"\0\xff", "s": {3}}, ..., ()),
    "empty bytes": (b"", b"", ()),
    "an object": ({"o": Path("x")}, Opaque("dict"), ()),
    "a stream": (io.BytesIO(b"x"), Opaque("_io.BytesIO"), ()),
    "a tensor inside": (
        [FULL],
        Opaque("list"),
        ("x.pt: _extra_state is a list with tensors in it, which are left aside",),
    ),
    "tensors by name": (
        {"a": FULL},
        Opaque("dict"),
        ("x.pt: _extra_state is a dict with tensors in it, which are left aside",),
    ),
}


@pytest.mark.parametrize(("extra", "kept", "notes"), EXTRA.values(), ids=EXTRA)
def test_an_extra_state_is_kept_when_it_is_plain(
    tmp_path: Path, extra: object, kept: object, notes: tuple[str, ...]
) -> None:
    module = Labelled(extra)
    checkpoint = opened(saved(tmp_path / "x.pt", module.state_dict()))

    assert checkpoint.objects == {"_extra_state": extra if kept is ... else kept}
    assert sorted(checkpoint.tensors) == sorted(set(module.state_dict()) - {"_extra_state"})
    assert checkpoint.notes == notes


STATE = {"layer.weight": FULL, "layer.bias": torch.ones(4)}
# what is saved → what is noted
WRAPPED: dict[str, tuple[dict[Any, object], str]] = {
    "alone": ({"state_dict": STATE}, "x.pt: the weights are what it holds as state_dict; left aside: nothing"),
    "beside numbers": (
        {"epoch": 3, "model": STATE, "best": 0.5},
        "x.pt: the weights are what it holds as model; left aside: epoch (int), best (float)",
    ),
    "beside an optimizer": (
        {"model": STATE, "optimizer": {"state": {0: {"exp_avg": FULL}}, "param_groups": [{"lr": 1}]}},
        "x.pt: the weights are what it holds as model; left aside: optimizer (dict)",
    ),
    "beside a tensor": (
        {"step": torch.tensor(3), "net": OrderedDict(STATE), 7: None},
        "x.pt: the weights are what it holds as net; left aside: step (tensor), 7 (NoneType)",
    ),
    "beside objects": (
        {"net": STATE, "where": Path("x"), "kind": nn.Linear},
        "x.pt: the weights are what it holds as net; left aside: where (pathlib.PosixPath), "
        "kind (torch.nn.modules.linear.Linear)",
    ),
}


@pytest.mark.parametrize(("value", "note"), WRAPPED.values(), ids=WRAPPED)
def test_the_one_mapping_of_tensors_is_taken_and_the_note_says_so(
    tmp_path: Path, value: dict[Any, object], note: str
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "x.pt", value))
    found = {name: stored(checkpoint, name) for name in checkpoint.tensors}
    checkpoint.close()

    assert found == {name: raw(tensor) for name, tensor in STATE.items()}
    assert checkpoint.notes == (note,)


def special(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "csr": lambda: torch.eye(3).to_sparse_csr(),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        }[kind]()


class Subclass(torch.Tensor):
    """A tensor of its own class."""


PLAINLY = "convert it to a plain tensor and save it again"
VIEW = "is a conjugate or negative view; save what resolve_conj().resolve_neg() returns"
KNOWN = (
    "known are bool, uint8, int8, int16, uint16, int32, uint32, int64, uint64, float16, bfloat16, float32, float64, "
    "complex64, complex128, float4_e2m1fn_x2, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e4m3fnuz, "
    "float8_e5m2fnuz"
)
# what is saved under the name w → what is wrong with it
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (lambda: special("quantized"), f"is a quantized tensor; {PLAINLY}"),
    "sparse": (lambda: special("sparse"), f"is a sparse tensor; {PLAINLY}"),
    "sparse rows": (lambda: special("csr"), f"is a sparse tensor; {PLAINLY}"),
    "nested": (lambda: special("nested"), f"is a nested tensor; {PLAINLY}"),
    "jagged": (
        lambda: special("jagged"),
        f"is a tensor of the class torch.nested._internal.nested_tensor.NestedTensor; {PLAINLY}",
    ),
    "a class of its own": (
        lambda: torch.ones(2).as_subclass(Subclass),
        f"is a tensor of the class {__name__}.Subclass; {PLAINLY}",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), f"is a meta tensor, which has no data; {PLAINLY}"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), VIEW),
    "negative": (lambda: torch._neg_view(torch.ones(2)), VIEW),
    "complex of halves": (
        lambda: torch.ones(4, dtype=torch.float16).view(torch.complex32),
        f"is complex32, which cannot be read here; {KNOWN}",
    ),
}


@pytest.mark.parametrize(("tensor", "told"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_is_not_plain_is_refused_by_its_name_and_kind(
    tmp_path: Path, tensor: Callable[[], torch.Tensor], told: str
) -> None:
    saved(tmp_path / "x.pt", {"good": FULL, "w": tensor()})

    assert problems(tmp_path) == (f"x.pt: tensor w {told}",)


ALONE = "torch.save the model's state_dict()"
# what is saved → the problem
NO_WEIGHTS: dict[str, tuple[object, str]] = {
    "a module": (nn.Linear(1, 1), f"holds a torch.nn.modules.linear.Linear, not tensors by name; {ALONE}"),
    "a tensor": (FULL, f"holds a tensor, not tensors by name; {ALONE}"),
    "a list": ([FULL], f"holds a list, not tensors by name; {ALONE}"),
    "nothing": ({}, f"holds no tensors by name, but nothing; {ALONE}"),
    "a module by name": (
        {"model": nn.Linear(1, 1), "epoch": 3, "s": FULL.untyped_storage()},
        f"holds no tensors by name, but model (torch.nn.modules.linear.Linear), epoch (int), s (storage); {ALONE}",
    ),
    "tensors by number": ({0: FULL, "w": FULL}, "has entries named 0; only texts can name tensors"),
    "two mappings": (
        {"model": STATE, "ema": STATE, "epoch": 3},
        "model, ema hold tensors by name; which are the weights is unknown, torch.save only them",
    ),
    "many things": (
        {f"k{n}": n for n in range(25)},
        f"holds no tensors by name, but {', '.join(f'k{n} (int)' for n in range(20))}, 5 more; {ALONE}",
    ),
}


@pytest.mark.parametrize(("value", "told"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_what_is_not_tensors_by_name_is_refused_with_what_it_is(tmp_path: Path, value: object, told: str) -> None:
    saved(tmp_path / "x.pt", value)

    assert problems(tmp_path) == (f"x.pt: {told}",)


class Storage:
    """Stands for a storage in a pickle that is made by hand."""

    def __init__(self, key: object = "0", count: object = 4, kind: object = torch.FloatStorage) -> None:
        self.id = ("storage", kind, key, "cpu", count)


class Made:
    """Pickled as a call."""

    def __init__(self, *arguments: object, function: object = torch._utils._rebuild_tensor_v2) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Pickler(pickle.Pickler):
    """Keeps storages outside, as torch does."""

    def persistent_id(self, obj: object) -> object:
        return obj.id if isinstance(obj, Storage) else None


def by_hand(path: Path, value: object, *, compress: bool = False, **changed: Any) -> Path:
    """Write an archive like torch.save's, with other records in the place of its own; None leaves one out."""
    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    records = {"data.pkl": stream.getvalue(), "byteorder": b"little", "data/0": bytes(range(16)), **changed}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            if content is not None:
                archive.writestr(f"x/{name}", content)
    return path


def tensor(storage: object = None, offset: object = 0, size: object = (4,), stride: object = (1,)) -> Made:
    return Made(storage or Storage(), offset, size, stride, False, OrderedDict())


NUMBERS = "has no offset, shape and stride of whole numbers from 0"
# what is wrong → what is pickled under the name w, the problem
HOSTILE: dict[str, tuple[object, str]] = {
    "larger than its storage": (tensor(size=(5,)), "reaches to byte 20 of its storage, which has 16"),
    "beyond its storage": (tensor(offset=1), "reaches to byte 20 of its storage, which has 16"),
    "a stride beyond it": (tensor(size=(2,), stride=(4,)), "reaches to byte 20 of its storage, which has 16"),
    "far beyond it": (tensor(offset=2**62), f"reaches to byte {(2**62 + 4) * 4} of its storage, which has 16"),
    "a storage larger than its record": (
        tensor(Storage(count=5)),
        "needs data/0, which has 16 bytes, 20 expected",
    ),
    "a storage of any size": (
        tensor(Storage(count=2**900)),
        f"needs data/0, which has 16 bytes, {2**902} expected",
    ),
    "a storage of less than nothing": (
        tensor(Storage(count=-1)),
        "needs -1 elements of FloatStorage, which cannot be read here",
    ),
    "a storage that is not there": (tensor(Storage("7")), "needs data/7, which is not in the archive"),
    "a storage outside": (tensor(Storage("../data.pkl")), "needs data/../data.pkl, which is not in the archive"),
    "a storage by number": (tensor(Storage(0)), "has no storage in the file"),
    "a storage of its own kind": (
        tensor(Storage(kind=torch.QInt8Storage)),
        "needs 4 elements of QInt8Storage, which cannot be read here",
    ),
    "no storage": (tensor(5), "has no storage in the file"),
    "a negative offset": (tensor(offset=-1), NUMBERS),
    "a negative size": (tensor(size=(-4,)), NUMBERS),
    "a negative stride": (tensor(stride=(-1,)), NUMBERS),
    "a size that is a truth": (tensor(size=(True,)), NUMBERS),
    "a size that is a text": (tensor(size="4"), NUMBERS),
    "more strides than sizes": (tensor(stride=(1, 1)), NUMBERS),
    "a size of 64 bits": (tensor(size=(2**63,)), NUMBERS),
    "65 dimensions": (tensor(size=(1,) * 65, stride=(1,) * 65), NUMBERS),
    "elements without end": (
        tensor(size=(2**40, 2**40), stride=(0, 0)),
        f"has the shape [{2**40}, {2**40}], which no memory holds",
    ),
    "no arguments": (Made(), f"is made by torch._utils._rebuild_tensor_v2; {PLAINLY}"),
    "a parameter of nothing": (
        Made(5, True, OrderedDict(), function=torch._utils._rebuild_parameter),
        f"is no tensor; {PLAINLY}",
    ),
    "what torch will make one day": (
        Made(function=torch._utils._rebuild_device_tensor_from_numpy),
        f"is made by torch._utils._rebuild_device_tensor_from_numpy; {PLAINLY}",
    ),
}


@pytest.mark.parametrize(("value", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_tensor_that_does_not_fit_the_file_is_refused(tmp_path: Path, value: object, told: str) -> None:
    by_hand(tmp_path / "x.pt", {"good": tensor(), "w": value})

    assert problems(tmp_path) == (f"x.pt: tensor w {told}",)


def test_an_archive_that_is_made_by_hand_opens(tmp_path: Path) -> None:
    older = Made(Storage(), 1, Made((3,), function=torch.Size), (1,), function=torch._utils._rebuild_tensor)
    checkpoint = open_checkpoint(by_hand(tmp_path / "x.pt", {"w": tensor(), "v": older}, byteorder=None))

    assert (stored(checkpoint, "w"), stored(checkpoint, "v")) == (bytes(range(16)), bytes(range(4, 16)))
    checkpoint.close()


def scripted(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(1, 1)).save(str(path))


def moved_header(path: Path) -> None:
    """Change the name of the last record's local header, so that it is none."""
    content = bytearray(by_hand(path, {"w": tensor()}).read_bytes())
    content[content.index(b"x/data/0") - 30] = 0
    path.write_bytes(content)


def header_elsewhere(path: Path) -> None:
    """Let the table say that the last record begins far beyond the end."""
    content = bytearray(by_hand(path, {"w": tensor()}).read_bytes())
    place = content.rindex(b"PK\x01\x02") + 42
    content[place : place + 4] = b"\xfe\xff\xff\xff"
    path.write_bytes(content)


def named_twice(path: Path) -> None:
    """Add a record whose name is that of another after the end that zip readers see."""
    content = by_hand(path, {"w": tensor()}, **{"data/00": bytes(16)}).read_bytes()
    path.write_bytes(content.replace(b"x/data/00", b"x/data/0\0"))


STRANGE_ZIP = "a zip archive without data.pkl, or with a name twice, which torch.save did not write"
W = {"w": tensor()}
W_REAL = {"w": FULL}
AGAIN = "load it with torch and save it again"
# what is wrong with a file → how it is written, the problem
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes that begin with b'', not a file of torch.save; copy it anew"),
    "a pointer instead of the file": (
        lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "43 bytes that begin with b'version https://', not a file of torch.save; copy it anew",
    ),
    "before torch 1.6": (
        lambda p: saved(p, W_REAL, _use_new_zipfile_serialization=False),
        f"the format of torch before 1.6; {AGAIN}",
    ),
    "TorchScript": (
        scripted,
        "a TorchScript archive, which is code; torch.jit.load it, torch.save its state_dict()",
    ),
    "cut": (
        lambda p: p.write_bytes(by_hand(p, W).read_bytes()[:-1]),
        "{size} bytes that are no whole zip archive (File is not a zip file); truncated? copy it anew",
    ),
    "no pickle": (lambda p: by_hand(p, W, **{"data.pkl": None}), STRANGE_ZIP),
    "a name twice": (named_twice, STRANGE_ZIP),
    "a broken pickle": (
        lambda p: by_hand(p, W, **{"data.pkl": b"h\0."}),
        "its data.pkl is not read here: memo 0 is taken before it was put (at byte 2)",
    ),
    "compressed": (lambda p: by_hand(p, W, compress=True), f"needs byteorder, which is compressed; {AGAIN}"),
    "big-endian": (
        lambda p: by_hand(p, W, byteorder=b"big"),
        f"its bytes are in big-endian order; {AGAIN}",
    ),
    "no data": (
        lambda p: by_hand(p, W, **{"data/0": None}),
        "tensor w needs data/0, which is not in the archive",
    ),
    "short data": (
        lambda p: by_hand(p, W, **{"data/0": bytes(15)}),
        "tensor w needs data/0, which has 15 bytes, 16 expected",
    ),
    "no local header": (moved_header, "tensor w needs data/0, which is not where the archive's table says"),
    "a header elsewhere": (header_elsewhere, "tensor w needs data/0, which is not in the archive"),
}


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a directory", "a pipe"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "x.bin")

    assert problems(tmp_path) == (f"{tmp_path / 'x.bin'} is no regular file; put the checkpoint's file there",)


@pytest.mark.parametrize(("write", "told"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_whole_archive_is_refused(tmp_path: Path, write: Callable[[Path], object], told: str) -> None:
    file = tmp_path / "x.bin"
    write(file)

    assert problems(tmp_path) == (f"x.bin: {told.format(size=file.stat().st_size)}",)


def test_a_table_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path / "x.pt", W_REAL)
    monkeypatch.setattr(_torch_archive, "DIRECTORY_LIMIT", 100)

    (told,) = problems(tmp_path)

    assert told.startswith(f"x.pt: {file.stat().st_size} bytes that are no whole zip archive (a table of ")
    assert told.endswith(" bytes, more than 100); truncated? copy it anew")


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    content = saved(tmp_path / "x.pt", W_REAL).read_bytes()
    for count in [*range(0, len(content), 7), len(content) - 1]:
        (tmp_path / "x.pt").write_bytes(content[:count])
        assert len(problems(tmp_path)) == 1


def test_a_file_with_any_damage_is_opened_within_its_bytes_or_refused(tmp_path: Path) -> None:
    content = saved(tmp_path / "x.pt", {"w": FULL, "v": with_attributes()["t"]}).read_bytes()
    generator, outcomes = random.Random(0), {"opened": 0, "refused": 0}
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(generator.choice([1, 2, 8])):
            damaged[generator.randrange(len(damaged))] = generator.choice([0, 1, 0x7F, 0x80, 0xFF])
        (tmp_path / "x.pt").write_bytes(damaged)
        try:
            found = opened(tmp_path)
            assert all(0 <= e.offset <= e.offset + e.nbytes <= len(damaged) for e in found.tensors.values())
            outcomes["opened"] += 1
        except CheckpointError:
            outcomes["refused"] += 1

    assert min(outcomes.values()) > 50


def sharded(directory: Path, suffix: str, **changed: str) -> Path:
    """Write two shards and their index; `changed` replaces places in it."""
    saved(directory / f"one{suffix}", {"a": FULL})
    saved(directory / f"two{suffix}", {"b": torch.ones(3), "x._extra_state": None})
    placed = {"a": f"one{suffix}", "b": f"two{suffix}", **changed}
    (directory / f"model{suffix}.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
@pytest.mark.parametrize("given", ["", "model{}.index.json"], ids=["directory", "index"])
def test_shards_open_as_one_checkpoint_by_their_index(tmp_path: Path, suffix: str, given: str) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path, suffix) / given.format(suffix))

    assert {name: stored(checkpoint, name) for name in checkpoint.tensors} == {"a": raw(FULL), "b": raw(torch.ones(3))}
    assert checkpoint.objects == {"x._extra_state": None}
    checkpoint.close()


def test_everything_that_is_wrong_with_shards_is_told_together(tmp_path: Path) -> None:
    sharded(tmp_path, ".bin", c="two.bin", d="three.bin", e="../four.bin")
    saved(tmp_path / "one.bin", {"a": special("sparse"), "f": FULL})

    assert problems(tmp_path) == (
        "model.bin.index.json names '../four.bin', which is not a file name beside it",
        f"one.bin: tensor a is a sparse tensor; {PLAINLY}",
        "one.bin: holds f, which the index does not place there",
        f"{tmp_path}/three.bin cannot be opened: No such file or directory",
        "two.bin: the index promises c, the file does not hold it",
    )


def test_what_trainers_write_beside_weights_is_left_aside_and_noted(tmp_path: Path) -> None:
    beside = [
        "optimizer.pt",
        "random_states_0.pkl",
        "rng_state_0.pth",
        "scaler.pt",
        "scheduler.pt",
        "training_args.bin",
    ]
    saved(tmp_path / "pytorch_model.bin", W_REAL)
    for name in beside:
        shutil.copy(tmp_path / "pytorch_model.bin", tmp_path / name)

    checkpoint = opened(tmp_path)

    assert [file.path.name for file in checkpoint.files] == ["pytorch_model.bin"]
    assert checkpoint.notes == (f"left aside, as trainers write them beside weights: {', '.join(beside)}",)


def test_what_trainers_write_is_no_checkpoint_by_itself_but_may_be_named(tmp_path: Path) -> None:
    saved(tmp_path / "optimizer.pt", W_REAL)

    assert (TorchZip.files(tmp_path), TorchZip.files(tmp_path / "optimizer.pt")) == ((), ("optimizer.pt",))


def test_a_command_in_a_file_is_not_run_and_is_no_tensor(tmp_path: Path) -> None:
    value = {"w": tensor(), "run": Made(f"touch {tmp_path}/run", function=os.system)}

    checkpoint = opened(by_hand(tmp_path / "x.pt", value))

    assert (list(checkpoint.tensors), checkpoint.objects) == (["w"], {"run": Opaque("posix.system")})
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
