"""Whatever the format's own library refuses is refused here too; where more is refused, the reason is in a table."""

import json
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from safetensors import SafetensorError, deserialize

from app.checkpoints import open_checkpoint
from app.checkpoints.safetensors import PADDING_KEY
from app.dtypes import BITS, size_bytes
from app.errors import CheckpointError

set_hypothesis_home_dir(tempfile.gettempdir())

# Why this program refuses a file that the library takes: a pattern of its problem → the reason.
STRICTER: dict[str, str] = {
    r"'.*' is there twice": "two tensors of one name: the library keeps the last and forgets the other",
    r"is F6_E[23]M[23], for which torch has no type": "torch has no six-bit floats",
    r"is F4\[.*\]; two of them are one byte, one is left over": "torch packs two four-bit floats of a row into a byte",
    r"warmgate\.padding must list names": "our own key of the metadata, which nobody else writes",
    r"has no dtype, shape and data_offsets": "a row that is a list of its fields: nobody writes that",
    r"is \{'\w+': None\}, which cannot be read here": "a dtype that is a mapping of its name: nobody writes that",
    r"has .*, which is not of this format": "a field of ours or of others that holds more fields: nobody writes that",
    r"more elements than can be counted": "torch counts in 63 bits, zeros or not; no memory holds as many",
    r"and at most 64 dimensions": "torch has no tensors of more dimensions",
    r"__metadata__ must map texts to texts": "null for no metadata: nobody writes that",
}
DTYPES = sorted(set(BITS) - {"C128"})
Row = tuple[str, str, list[int]]

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
sizes = st.lists(st.integers(0, 4), max_size=3)


def bounded(examples: int) -> settings:
    """Return settings that give the same examples every time and keep nothing."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def framed(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def ours(content: bytes) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return what is found by name, or None and the problems; any other exception is a failure."""
    with tempfile.TemporaryDirectory(dir=SHARED) as directory:
        file = Path(directory) / "x.safetensors"
        file.write_bytes(content)
        try:
            checkpoint = open_checkpoint(file)
        except CheckpointError as error:
            return None, error.problems
        checkpoint.close()
    return {
        name: (entry.dtype, entry.shape, content[entry.offset : entry.offset + entry.nbytes])
        for name, entry in checkpoint.tensors.items()
    }, ()


SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - thousands of files, none of them kept


def theirs(content: bytes) -> dict[str, Any] | None:
    """Return what the library finds; it counts the halves of a byte where torch counts bytes."""
    try:
        found = deserialize(content)
    except SafetensorError:
        return None
    return {name: (row["dtype"], _torchs(row["dtype"], row["shape"]), bytes(row["data"])) for name, row in found}


def _torchs(dtype: str, shape: list[int]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" and shape else tuple(shape)


def compare(content: bytes) -> None:
    """The one property of this file."""
    accepted = theirs(content)
    found, problems = ours(content)
    if accepted is None:
        assert found is None, f"the library refuses it, this program finds {found}"
    elif found is None:
        assert any(re.search(pattern, problem) for pattern in STRICTER for problem in problems), problems
    else:
        padding = set(accepted) - set(found)
        assert {name: row for name, row in accepted.items() if name not in padding} == found


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    made = []
    for name in draw(st.lists(names.filter(lambda one: one != "__metadata__"), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(sizes)
        if dtype == "F4":
            shape = [*shape, 2 * draw(st.integers(0, 2))]
        made.append((name, dtype, shape))
    return made


def header_of(made: list[Row]) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in made:
        size = size_bytes(dtype, _torchs(dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header, bytes(number % 251 for number in range(end))


metadata = st.none() | st.dictionaries(names, st.text(max_size=5), max_size=3)


@st.composite
def valid_files(draw: st.DrawFn) -> bytes:
    header, data = header_of(draw(rows()))
    if (extra := draw(metadata)) is not None:
        header = {"__metadata__": extra, **header} if draw(st.booleans()) else {**header, "__metadata__": extra}
    text = json.dumps(header, ensure_ascii=draw(st.booleans())).encode("utf-8", "replace")
    return framed(text + b" " * draw(st.integers(0, 9)), data)


@given(valid_files())
@bounded(150)
def test_a_valid_file_is_read_as_the_library_reads_it(content: bytes) -> None:
    assert theirs(content) is not None
    compare(content)
    assert ours(content)[0] is not None


small = st.integers(-2, 40)
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | small | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(DTYPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = ("dtype", "shape", "data_offsets")


def _any_value(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row[draw(st.sampled_from(FIELDS))] = draw(anything)


def _field_gone(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row.pop(draw(st.sampled_from(FIELDS)), None)


def _field_more(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row[draw(st.text(max_size=3))] = draw(anything)


def _moved(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    by = draw(st.sampled_from([-8, -4, -1, 1, 2, 4, 8, 2**63, 2**64]))
    offsets = row.get("data_offsets")
    row["data_offsets"] = [n + by if isinstance(n, int) else n for n in offsets] if isinstance(offsets, list) else by


def _elsewhere(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row["data_offsets"] = [draw(small), draw(small)]


def _other_shape(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row["shape"] = draw(st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 2**64, 2**65]), max_size=3))


def _other_dtype(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    row["dtype"] = draw(st.sampled_from([*DTYPES, "C128", "F6_E2M3", "F6_E3M2", "f32", "F33", "", "BF16 "]))


def _metadata(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    header["__metadata__"] = draw(anything | st.text(max_size=4).map(lambda text: {PADDING_KEY: text}))


def _another_row(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    header[draw(st.text(max_size=3))] = draw(anything)


def _same_stretch(draw: st.DrawFn, header: dict[str, Any], row: dict[str, Any]) -> None:
    header[draw(st.text(max_size=3))] = dict(row)


CHANGES = (
    _any_value,
    _field_gone,
    _field_more,
    _moved,
    _elsewhere,
    _other_shape,
    _other_dtype,
    _metadata,
    _another_row,
    _same_stretch,
)


@st.composite
def broken_headers(draw: st.DrawFn) -> bytes:
    """Change a valid header field by field: types, sizes, offsets, names, what is there and what is not."""
    header, data = header_of(draw(rows()))
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(CHANGES))
        row = header[draw(st.sampled_from(list(header)))] if header else {}
        change(draw, header, row if isinstance(row, dict) else {})
    return framed(json.dumps(header).encode(), data + bytes(draw(st.sampled_from([0, 0, 0, 1, 8]))))


@given(broken_headers())
@bounded(700)
def test_a_header_with_something_broken_in_it_is_judged_as_the_library_judges_it(content: bytes) -> None:
    compare(content)


@given(valid_files(), st.data())
@bounded(500)
def test_a_valid_file_with_changed_bytes_is_judged_as_the_library_judges_it(
    content: bytes, data: st.DataObject
) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, min(len(changed) - 1, 120))))
        kind = data.draw(st.integers(0, 3))
        if kind == 0 and changed:
            changed[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'",:{}[]0 \\'))
        elif kind == 1:
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif kind == 2:
            del changed[at : at + data.draw(st.integers(1, 9))]
        else:
            del changed[data.draw(st.integers(0, len(changed))) :]
    if data.draw(st.booleans()) and len(changed) > 8:
        # The length as it must be for the text that is there now: else most changes end at the length field.
        end = bytes(changed).rfind(b"}") + 1
        changed[:8] = struct.pack("<Q", max(0, end - 8))
    compare(bytes(changed))


@given(st.integers(0, 2**64 - 1) | st.integers(0, 40), st.binary(max_size=60))
@bounded(150)
def test_any_length_field_before_any_bytes_is_judged_as_the_library_judges_it(length: int, rest: bytes) -> None:
    compare(struct.pack("<Q", length) + rest)


ROW = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def one(row: str, name: str = '"a"') -> bytes:
    return f"{{{name}:{row}}}".encode("utf-8", "surrogatepass")


# Texts that JSON parsers disagree about → header, bytes of data.
TEXTS: dict[str, tuple[bytes, int]] = {
    "spaces before": (b"  " + one(ROW), 1),
    "a newline before": (b"\n" + one(ROW), 1),
    "newlines and tabs after": (one(ROW) + b"\n\t\r ", 1),
    "zero bytes after": (one(ROW) + b"\0\0", 1),
    "a byte order mark": (b"\xef\xbb\xbf" + one(ROW), 1),
    "UTF-16": (one(ROW).decode().encode("utf-16"), 1),
    "UTF-16 without a mark": (one(ROW).decode().encode("utf-16-le"), 1),
    "UTF-32": (one(ROW).decode().encode("utf-32"), 1),
    "half a pair, written out": (one(ROW, '"\\ud800"'), 1),
    "half a pair, in bytes": (one(ROW, '"\ud800"'), 1),
    "a whole pair": (one(ROW, '"\\ud83d\\ude00"'), 1),
    "a name of nothing": (one(ROW, '""'), 1),
    "a zero in a name": (one(ROW, '"\\u0000"'), 1),
    "a raw control character in a name": (one(ROW, '"\x01"'), 1),
    "minus zero": (one('{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}'), 1),
    "minus zero in the shape": (one('{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}'), 0),
    "a size as 1.0": (one('{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}'), 1),
    "a size as 1e0": (one('{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}'), 1),
    "a size beyond 64 bits beside a zero": (
        one('{"dtype":"U8","shape":[0,18446744073709551616],"data_offsets":[0,0]}'),
        0,
    ),
    "sizes whose product is beyond 64 bits before a zero": (
        one('{"dtype":"U8","shape":[9223372036854775807,4,0],"data_offsets":[0,0]}'),
        0,
    ),
    "bits beyond 64 bits": (one('{"dtype":"F64","shape":[4611686018427387904,0],"data_offsets":[0,0]}'), 0),
    "one element less than can be counted": (
        one('{"dtype":"U8","shape":[1152921504606846975,0],"data_offsets":[0,0]}'),
        0,
    ),
    "as many elements as cannot be counted": (
        one('{"dtype":"U8","shape":[1152921504606846976,0],"data_offsets":[0,0]}'),
        0,
    ),
    "as many elements as cannot be counted, around zeros": (
        one('{"dtype":"U8","shape":[1073741824,0,1073741824,0],"data_offsets":[0,0]}'),
        0,
    ),
    "an offset beyond 64 bits": (
        one('{"dtype":"U8","shape":[0],"data_offsets":[18446744073709551616,18446744073709551616]}'),
        0,
    ),
    "a very long number": (one('{"dtype":"U8","shape":[' + "1" * 5000 + '],"data_offsets":[0,1]}'), 1),
    "not a number": (one('{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}'), 1),
    "not a number in a field that nobody reads": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}'), 1),
    "infinity": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":-Infinity}'), 1),
    "a number beyond all doubles": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1e999}'), 1),
    "64 dimensions": (one('{"dtype":"U8","shape":[' + "1," * 63 + '1],"data_offsets":[0,1]}'), 1),
    "65 dimensions": (one('{"dtype":"U8","shape":[' + "1," * 64 + '1],"data_offsets":[0,1]}'), 1),
    "a field twice": (one('{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}'), 1),
    "a field that nobody knows": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":[{}]}'), 1),
    "a field that nobody knows, of a list": (
        one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":[]}'),
        1,
    ),
    "a field that nobody knows, of a mapping": (
        one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{}}'),
        1,
    ),
    "a field that nobody knows, of a text": (
        one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":"[]"}'),
        1,
    ),
    "a field that nobody knows twice": (one('{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1,"x":2}'), 1),
    "a tensor twice": (f'{{"a":{ROW},"a":{ROW}}}'.encode(), 1),
    "a tensor twice, once elsewhere": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":' + ROW.encode() + b"}",
        1,
    ),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{ROW}}}'.encode(), 1),
    "metadata with a name twice": (f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{ROW}}}'.encode(), 1),
    "metadata of null": (f'{{"__metadata__":null,"a":{ROW}}}'.encode(), 1),
    "metadata of numbers": (f'{{"__metadata__":{{"k":1}},"a":{ROW}}}'.encode(), 1),
    "metadata like a tensor": (f'{{"__metadata__":{ROW}}}'.encode(), 1),
    "a row as a list": (one('["U8",[1],[0,1]]'), 1),
    "a dtype as a mapping": (one('{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}'), 1),
    "a dtype as a list": (one('{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}'), 1),
    "a shape as a text": (one('{"dtype":"U8","shape":"","data_offsets":[0,1]}'), 1),
    "a shape as a mapping": (one('{"dtype":"U8","shape":{},"data_offsets":[0,1]}'), 1),
    "offsets as a mapping": (one('{"dtype":"U8","shape":[1],"data_offsets":{"0":0,"1":1}}'), 1),
    "offsets as a text": (one('{"dtype":"U8","shape":[1],"data_offsets":"01"}'), 1),
    "six-bit floats": (one('{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}'), 3),
    "four-bit floats, an odd row": (one('{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}'), 3),
    "four-bit floats, a scalar": (one('{"dtype":"F4","shape":[],"data_offsets":[0,1]}'), 1),
    "four-bit floats, an empty row": (one('{"dtype":"F4","shape":[3,0],"data_offsets":[0,0]}'), 0),
    "our padding, not a list": (f'{{"__metadata__":{{"{PADDING_KEY}":"{{"}},"a":{ROW}}}'.encode(), 1),
    "our padding, numbers": (f'{{"__metadata__":{{"{PADDING_KEY}":"[1]"}},"a":{ROW}}}'.encode(), 1),
    "our padding, a number": (f'{{"__metadata__":{{"{PADDING_KEY}":"7"}},"a":{ROW}}}'.encode(), 1),
    "our padding, a mapping": (f'{{"__metadata__":{{"{PADDING_KEY}":"{{\\"a\\":1}}"}},"a":{ROW}}}'.encode(), 1),
    "our padding": (f'{{"__metadata__":{{"{PADDING_KEY}":"[\\"a\\"]"}},"a":{ROW}}}'.encode(), 1),
    "our padding, not there": (f'{{"__metadata__":{{"{PADDING_KEY}":"[\\"b\\"]"}},"a":{ROW}}}'.encode(), 1),
    "an empty header": (b"{}", 0),
    "an empty header and bytes": (b"{}", 1),
    "an empty tensor between two": (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"e":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
        2,
    ),
    "an empty tensor at the end": (
        b'{"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        2,
    ),
    "an empty tensor beyond the end": (one('{"dtype":"U8","shape":[0],"data_offsets":[5,5]}'), 0),
    "nested without end": (b'{"a":' * 3000, 0),
    "a text": (b'"abc"', 0),
    "a number": (b"17", 0),
    "null": (b"null", 0),
}


@pytest.mark.parametrize(("header", "size"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_parsers_disagree_about_is_judged_as_the_library_judges_it(header: bytes, size: int) -> None:
    compare(framed(header, bytes(size)))


def reasons() -> Iterator[str]:
    for header, size in TEXTS.values():
        if theirs(framed(header, bytes(size))) is not None:
            _, problems = ours(framed(header, bytes(size)))
            yield from (pattern for pattern in STRICTER for problem in problems if re.search(pattern, problem))


def test_every_reason_to_be_stricter_is_met_by_a_text_of_the_table() -> None:
    assert set(reasons()) == set(STRICTER)
