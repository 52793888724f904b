"""The zip archives of torch.save (since torch 1.6), anywhere in a file: where the bytes of each tensor lie.

The pickle in them is read as data, so neither trust nor torch is needed.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from math import prod

from app.checkpoints import TensorEntry, read_at
from app.checkpoints._pickle import BYTES_LIMIT, DICT, Call, Global, Persistent, PickleError, read_pickle
from app.dtypes import item_bytes, size_bytes

# A hundred thousand entries take a third of it; a larger table is an attack or a broken file.
DIRECTORY_LIMIT = 32 << 20
DIMENSIONS_LIMIT = 64
_LOCAL_HEADER = struct.Struct("<6xHH16xHH")
_LOCAL_MAGIC = b"PK\x03\x04"

# torch's names → those of safetensors.
DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "complex128": "C128", "float4_e2m1fn_x2": "F4", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_STORAGES = {
    "BoolStorage": "BOOL", "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "HalfStorage": "F16", "BFloat16Storage": "BF16", "FloatStorage": "F32",
    "DoubleStorage": "F64", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128", "UntypedStorage": "U8",
}  # fmt: skip
# What torch makes other tensors with → what they are.
_OTHERS = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_wrapper_subclass": "a tensor of a class without data of its own",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
}


class ArchiveError(ValueError):
    """What is wrong, in words that follow the name of the file or of the tensor."""


def numbers_of(value: object) -> tuple[int, ...] | None:
    """Return a shape, a stride or an offset: a tuple or torch.Size of whole numbers from 0; None of anything else."""
    match value:
        case Call(function=Global("torch", "Size"), arguments=(tuple() as inner,)):
            value = inner
    if not isinstance(value, tuple) or len(value) > DIMENSIONS_LIMIT:
        return None
    numbers = tuple(n for n in value if type(n) is int and 0 <= n < 1 << 63)
    return numbers if len(numbers) == len(value) else None


def pairs_of(value: object) -> list[tuple[object, object]] | None:
    """Return the entries of a dict or an OrderedDict in their order; None of anything else."""
    kinds = (DICT, Global("collections", "OrderedDict"))
    return value.pairs if isinstance(value, Call) and value.function in kinds and not value.arguments else None


class Archive:
    """The archive in a stretch of an open file; `root` is what was saved, as inert values. Raises ArchiveError."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length = fd, start, length
        head = read_or_fail(fd, min(length, 16), start)
        if head.startswith(b"\x80"):
            raise ArchiveError("the format of torch before 1.6; load it with torch and save it again")
        if not head.startswith(_LOCAL_MAGIC):
            raise ArchiveError(f"{length} bytes that begin with {head!r}, not a file of torch.save; copy it anew")
        self._table = _directory(fd, start, length)
        if "constants.pkl" in self._table or any(name.startswith("code/") for name in self._table):
            raise ArchiveError("a TorchScript archive, which is code; torch.jit.load it, torch.save its state_dict()")
        if "byteorder" in self._table and self._record("byteorder") != b"little":
            raise ArchiveError("its bytes are in big-endian order; load it with torch and save it again")
        try:
            self.root = read_pickle(self._record("data.pkl"))
        except PickleError as error:
            raise ArchiveError(f"its data.pkl is not read here: {error}") from error

    def entry(self, name: str, value: object, file: int) -> TensorEntry:
        """Return where a tensor of the root lies; raises ArchiveError in words that follow the tensor's name."""
        storage, dtype, offset, size, stride = _view(value)
        stored, place, held = self._storage(storage)
        dtype = dtype or stored
        item = item_bytes(dtype)
        if size_bytes(dtype, size) >= 1 << 63:
            raise ArchiveError(f"has the shape {list(size)}, which no memory holds")
        if prod(size) == 0:
            return TensorEntry(name, dtype, size, file, place, 0)
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if (offset + extent) * item > held:
            raise ArchiveError(f"reaches to byte {(offset + extent) * item} of its storage, which has {held}")
        in_order = all(
            n == 1 or step == prod(size[d + 1 :]) for d, (n, step) in enumerate(zip(size, stride, strict=True))
        )
        begin, count = place + offset * item, extent * item
        return TensorEntry(name, dtype, size, file, begin, count, None if in_order else stride)

    def _storage(self, value: object) -> tuple[str, int, int]:
        """Return the dtype of a storage, the offset of its first byte in the file, and its bytes."""
        match value:
            case Persistent(("storage", Global("torch" | "torch.storage", kind), str() as key, _, int() as count)):
                if kind not in _STORAGES or count < 0:
                    raise ArchiveError(f"needs {count} elements of {kind}, which cannot be read here")
            case _:
                raise ArchiveError("has no storage in the file")
        place, held = self._locate(f"data/{key}")
        needed = count * item_bytes(_STORAGES[kind])
        if held < needed:
            raise ArchiveError(f"needs data/{key}, which has {held} bytes, {needed} expected")
        return _STORAGES[kind], place, needed

    def _locate(self, name: str) -> tuple[int, int]:
        """Return where in the file the bytes of a record begin, and how many they are."""
        entry = self._table.get(name)
        if entry is None or not 0 <= entry.header_offset < self._length:
            raise ArchiveError(f"needs {name}, which is not in the archive")
        header = read_or_fail(self._fd, _LOCAL_HEADER.size, self._start + entry.header_offset)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
            raise ArchiveError(f"needs {name}, which is not where the archive's table says")
        flags, method, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        if method or entry.compress_type or flags & 1:
            raise ArchiveError(f"needs {name}, which is compressed; load it with torch and save it again")
        # The table's own lengths say nothing: torch pads before the data, in the local header alone.
        begin = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if begin + entry.file_size > self._length:
            raise ArchiveError(f"needs {name}, which would end at byte {begin + entry.file_size} of {self._length}")
        return self._start + begin, entry.file_size

    def _record(self, name: str) -> bytes:
        place, count = self._locate(name)
        if count > BYTES_LIMIT:
            raise ArchiveError(f"needs {name}, which has {count} bytes, more than {BYTES_LIMIT}")
        return read_or_fail(self._fd, count, place)


def _view(value: object) -> tuple[object, str | None, int, tuple[int, ...], tuple[int, ...]]:
    """Return storage, dtype (None: the storage's), offset, size and stride of a plain tensor."""
    value = _without_attributes(value)
    dtype: str | None = None
    flags: list[object] = []
    match value:
        case Call(
            function=Global("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2"),
            arguments=(storage, offset, size, stride, *more),
        ):
            flags = more[2:3]
        case Call(
            function=Global("torch._utils", "_rebuild_tensor_v3"),
            arguments=(storage, offset, size, stride, _, _, Global("torch", kind), *flags),
        ):
            if (dtype := DTYPES.get(kind)) is None:
                raise ArchiveError(f"is {kind}, which cannot be read here; known are {', '.join(DTYPES)}")
        case _:
            raise ArchiveError(f"is {_other(value)}; convert it to a plain tensor and save it again")
    if flags and pairs_of(flags[0]) != []:
        raise ArchiveError("is a conjugate or negative view; save what resolve_conj().resolve_neg() returns")
    first, sizes, steps = numbers_of((offset,)), numbers_of(size), numbers_of(stride)
    if first is None or sizes is None or steps is None or len(sizes) != len(steps):
        raise ArchiveError("has no offset, shape and stride of whole numbers from 0")
    return storage, dtype, first[0], sizes, steps


def _without_attributes(value: object) -> object:
    """Return the tensor in a parameter, and the one in a tensor that was saved with attributes of its own."""
    while True:
        match value:
            case Call(
                function=Global("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state"),
                arguments=(value, *_),
            ):
                continue
            case Call(
                function=Global("torch._tensor", "_rebuild_from_type_v2"),
                arguments=(Global() as function, Global("torch", "Tensor"), tuple() as arguments, *_),
            ):
                value = Call(function, arguments)
            case _:
                return value


def _other(value: object) -> str:
    match value:
        case Call(function=Global(_, "_rebuild_from_type_v2"), arguments=(_, Global() as kind, *_)):
            return f"a tensor of the class {kind}"
        case Call(function=Global(_, name) as function) if name.startswith("_rebuild"):
            return _OTHERS.get(name, f"made by {function}")
    return "no tensor"


def _directory(fd: int, start: int, length: int) -> Mapping[str, zipfile.ZipInfo]:
    """Return the entries of the archive by their names without the archive's own."""
    try:
        with zipfile.ZipFile(_Range(fd, start, length)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise ArchiveError(
            f"{length} bytes that are no whole zip archive ({error}); truncated? copy it anew"
        ) from error
    prefix = entries[0].filename.split("/")[0] + "/" if entries else ""
    table = {entry.filename.removeprefix(prefix): entry for entry in entries}
    if len(table) < len(entries) or "data.pkl" not in table:
        raise ArchiveError("a zip archive without data.pkl, or with a name twice, which torch.save did not write")
    return table


def read_or_fail(fd: int, count: int, offset: int) -> bytes:
    """Return bytes of a file, fewer only at its end; raises ArchiveError."""
    try:
        return read_at(fd, count, offset)
    except OSError as error:
        raise ArchiveError(f"cannot be read at byte {offset}: {error.strerror}; check the disk") from error


class _Range(io.RawIOBase):
    """A stretch of a file as a file, for zipfile to find the table in."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        super().__init__()
        self._fd, self._start, self._length, self._position = fd, start, length, 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (0, self._position, self._length)[whence]
        if position < 0:
            raise OSError("a place before the begin")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._position)
        count = rest if size is None or size < 0 else min(size, rest)
        if count > DIRECTORY_LIMIT:
            raise OSError(f"a table of {count} bytes, more than {DIRECTORY_LIMIT}")
        found = read_or_fail(self._fd, count, self._start + self._position) if count else b""
        self._position += len(found)
        return found
