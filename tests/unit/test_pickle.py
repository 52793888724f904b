"""Pickles are read as data: every protocol, nothing is run, and hostile streams end in one kind of error."""

import collections
import datetime
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints import Opaque, _pickle
from app.checkpoints._pickle import DEPTH_LIMIT, Call, Global, Persistent, PickleError, read_pickle
from app.checkpoints._torch_archive import pairs_of
from app.checkpoints.torch_zip import plain

PROTOCOLS = range(6)

SHARED = ["shared"]
# Values that are plain Python all through.
PLAIN: dict[str, object] = {
    "nothing": None,
    "truths": [True, False],
    "numbers": [0, 1, -1, 255, 256, 65536, 2**31, -(2**31) - 1, 2**63, -(2**70), 2**1023],
    "fractions": [0.0, -1.5, 1e300, float("inf")],
    "texts": ["", "a", "ä\n\\\u2028", "\U0001f600", "x" * 300, "y" * 70000],
    "bytes": [b"", b"\0\xff\n", b"z" * 300],
    "lists and tuples": [[], [1], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [[[[]]]], [*range(2500)]],
    "dicts": [{}, {"a": 1}, {"a": {"b": {}}, 2: 3, None: 4, b"k": 5, 1.5: 6, True: 7}, {n: -n for n in range(2500)}],
    "sets": [set(), {1}, {"a", 2, None}],
    "what occurs twice": [SHARED, SHARED, {"a": SHARED}],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_values_are_read_in_every_protocol(value: object, protocol: int) -> None:
    assert plain(read_pickle(pickle.dumps(value, protocol))) == value


def test_what_occurs_twice_is_one_value() -> None:
    first, second, _ = plain(read_pickle(pickle.dumps(PLAIN["what occurs twice"])))  # type: ignore[misc]

    assert first is second


class Thing:
    """Pickled with a state."""

    def __init__(self, **state: object) -> None:
        self.__dict__.update(state)


class Keyword:
    """Pickled with NEWOBJ_EX from protocol 4 on."""

    def __new__(cls, *, size: int) -> "Keyword":
        del size
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (), {"size": 3}


def own(name: str) -> Global:
    return Global(__name__, name)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_object_is_its_recipe(protocol: int) -> None:
    found = read_pickle(pickle.dumps(Thing(a=1), protocol))

    assert isinstance(found, Call)
    assert (found.function, found.arguments, pairs_of(found.state)) == (own("Thing"), (), [("a", 1)])


def test_arguments_by_keyword_are_a_part_of_the_recipe() -> None:
    found = read_pickle(pickle.dumps(Keyword(size=3), 4))

    assert isinstance(found, Call)
    assert (found.function, found.arguments, pairs_of(found.keywords)) == (own("Keyword"), (), [("size", 3)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_is_a_recipe_with_entries(protocol: int) -> None:
    found = read_pickle(pickle.dumps(collections.OrderedDict(b=1, a=2), protocol))

    assert isinstance(found, Call)
    assert (found.function, pairs_of(found)) == (Global("collections", "OrderedDict"), [("b", 1), ("a", 2)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_keys_that_cannot_be_hashed_are_kept(protocol: int) -> None:
    found = pairs_of(read_pickle(pickle.dumps({datetime.date(2020, 1, 2): 5}, protocol)))

    assert found is not None
    ((key, value),) = found
    assert isinstance(key, Call)
    assert (key.function, value) == (Global("datetime", "date"), 5)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_what_the_writer_kept_outside_is_known_by_its_id(tmp_path: Path, protocol: int) -> None:
    class Outside(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", 7) if isinstance(obj, Thing) else None

    with (tmp_path / "x").open("wb") as file:
        Outside(file, protocol).dump([Thing()])

    (found,) = read_pickle((tmp_path / "x").read_bytes())  # type: ignore[misc]

    assert isinstance(found, Persistent)
    assert found.id == ("storage", 7)


NOT_PLAIN: dict[str, tuple[object, str]] = {
    "an object": (Thing(a=1), f"{__name__}.Thing"),
    "an object in a list": ([1, Thing()], "list"),
    "a frozenset": (frozenset({1}), "frozenset"),
    "an ordered dict": (collections.OrderedDict(a=1), "collections.OrderedDict"),
    "a class": (Thing, f"{__name__}.Thing"),
    "a function": (len, "len"),
    "a bytearray": ([bytearray(b"x")], "list"),
    "a key with parts": ({(1, 2): 3}, "dict"),
    "a long number as a key": ({2**64: 3}, "dict"),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(("value", "what"), NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_not_plain_is_named_and_not_made(value: object, what: str, protocol: int) -> None:
    assert plain(read_pickle(pickle.dumps(value, protocol))) == Opaque(what)


class Evil:
    """Runs a command in whoever loads it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_command_in_a_pickle_is_not_run(tmp_path: Path, protocol: int) -> None:
    stream = pickle.dumps({"w": Evil(f"touch {tmp_path}/run")}, protocol)

    found = pairs_of(read_pickle(stream))

    assert found is not None
    ((name, call),) = found
    assert isinstance(call, Call)
    assert (name, call.function) == ("w", Global(os.system.__module__, "system"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stream", [b"cantigravity\nx\n.", b"\x80\x04\x8c\x0bantigravity\x8c\x01x\x93."])
def test_a_module_that_a_pickle_names_is_not_imported(stream: bytes) -> None:
    assert read_pickle(stream) == Global("antigravity", "x")
    assert "antigravity" not in sys.modules


# what is wrong → the stream, the text of the error
MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "pickle exhausted before seeing STOP (at byte 0)"),
    "no value": (b".", "an end with more or less than one value (at byte 1)"),
    "two values": (b"NN.", "an end with more or less than one value (at byte 3)"),
    "a mark that nothing took": (b"(N.", "an end with more or less than one value (at byte 3)"),
    "no end": (b"N", "pickle exhausted before seeing STOP (at byte 1)"),
    "no such opcode": (b"\xff.", "at position 0, opcode b'\\xff' unknown (at byte 1)"),
    "an empty stack": (b"\x85.", "an opcode takes more than there is (at byte 1)"),
    "items without a list": (b"(NNe.", "an opcode takes more than there is (at byte 4)"),
    "no mark": (b"Nt.", "an opcode takes more than there is (at byte 2)"),
    "values under a mark": (b"N(\x86.", "an opcode takes more than there is (at byte 3)"),
    "memo that was not put": (b"h\x07.", "memo 7 is taken before it was put (at byte 2)"),
    "memo of nothing": (b"q\x00.", "an opcode takes more than there is (at byte 2)"),
    "half an entry": (b"}(Nu.", "a key without a value (at byte 4)"),
    "half a dict": (b"(Nd.", "a key without a value (at byte 3)"),
    "items for a number": (b"K\x01Na.", "items for what can have none (at byte 4)"),
    "entries for a list": (b"]NNs.", "entries for what can have none (at byte 4)"),
    "a state for a list": (b"]Nb.", "a state for what can have none (at byte 3)"),
    "a call of a text": (b"\x8c\x01x)R.", "a call of what has no name (at byte 5)"),
    "arguments that are none": (b"cx\ny\n]R.", "a call of what has no name (at byte 7)"),
    "a global that is no text": (b"K\x01K\x02\x93.", "a global whose name is no text (at byte 5)"),
    "a list in itself": (b"]q\x00h\x00a.", "a value that contains itself (at byte 7)"),
    "a dict in itself": (b"}q\x00Nh\x00s.", "a value that contains itself (at byte 8)"),
    "a state in its object": (b"cx\ny\n)Rq\x00h\x00b.", "a value that contains itself (at byte 13)"),
    "a list in a tuple in it": (b"]q\x00h\x00\x85a.", "a value that contains itself (at byte 8)"),
    "a text cut short": (b"X\x05\0\0\0abc", "expected 5 bytes in a unicodestring4, but only 3 remain (at byte 8)"),
    "a text that is none": (
        b"\x8c\x01\xff.",
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte (at byte 3)",
    ),
    "half a surrogate pair": (
        b"\x8c\x03\xed\xa0\x80.",
        "'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed (at byte 5)",
    ),
    "a text of Python 2": (b"U\x01x.", "the opcode SHORT_BINSTRING, which is not read here (at byte 3)"),
    "an escape that Python deprecates": (b"S'\\d'\n.", "invalid escape sequence '\\d' (at byte 6)"),
    "an object of Python 2": (b"(icopy\ncopy\n.", "the opcode INST, which is not read here (at byte 12)"),
    "an extension": (b"\x82\x01.", "the opcode EXT1, which is not read here (at byte 2)"),
    "a buffer from outside": (b"\x97.", "the opcode NEXT_BUFFER, which is not read here (at byte 1)"),
    "a number of many bits": (b"\x8a\xff" + b"\x01" * 255 + b".", "a number of 2033 bits (at byte 257)"),
}


@pytest.mark.parametrize(("stream", "told"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_stream_is_refused_with_the_place(stream: bytes, told: str) -> None:
    with pytest.raises(PickleError) as caught:
        read_pickle(stream)

    assert str(caught.value) == told
    assert told.endswith(f"(at byte {caught.value.position})")


DEEP = 50_000
BOMBS: dict[str, bytes] = {
    "lists in lists": b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "tuples in tuples": b"N" + b"\x85" * DEEP + b".",
    "calls in calls": b"cx\ny\n" * 1000 + b")R" + b"\x85R" * 999 + b".",
    "calls of calls": b"cx\ny\n" + b")R" * DEEP + b".",
    "states of states": b"cx\ny\nq\x00" + b"h\x00)R" * DEEP + b"b" * DEEP + b".",
    "marks": b"(" * DEEP + b".",
    "a text of 2**62 bytes": b"\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "bytes of 2**63 bytes": b"\x8e" + struct.pack("<Q", 2**63) + b"x.",
    "a bytearray of 2**62 bytes": b"\x96" + struct.pack("<Q", 2**62) + b"x.",
    "a number of 2**31 - 1 bytes": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "a number of fewer than no bytes": b"\x8b" + struct.pack("<i", -1) + b"x.",
    "a number of many digits": b"L" + b"9" * 100_000 + b"L\n.",
}


@pytest.mark.parametrize("stream", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(stream: bytes) -> None:
    with pytest.raises(PickleError):
        read_pickle(stream)


def test_a_memo_of_a_large_index_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        found = read_pickle(b"K\x05r\xff\xff\xff\xffr\x00\x00\x00\x7f.")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found == 5
    assert peak < 1 << 20


@pytest.mark.parametrize("levels", [DEPTH_LIMIT, DEPTH_LIMIT + 1])
def test_values_may_be_nested_up_to_the_limit(levels: int) -> None:
    stream = b"]" * levels + b"a" * (levels - 1) + b"."

    if levels > DEPTH_LIMIT:
        with pytest.raises(PickleError, match=f"^values nested more than {DEPTH_LIMIT} deep "):
            read_pickle(stream)
    else:
        assert str(plain(read_pickle(stream))) == "[" * levels + "]" * levels


def test_a_value_that_doubles_at_every_level_is_made_once_a_level() -> None:
    stream = b"]" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"."

    found = plain(read_pickle(stream))

    assert isinstance(found, tuple)
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("BYTES_LIMIT", "20 bytes of pickle, more than 10 (at byte 10)"),
        ("OPCODES_LIMIT", "more than 10 opcodes (at byte 19)"),
    ],
)
def test_a_stream_beyond_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    stream = pickle.dumps([1, 2, 3, 4, 5, 6], 2)
    assert read_pickle(stream) == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(_pickle, name, 10)

    with pytest.raises(PickleError) as caught:
        read_pickle(stream)

    assert str(caught.value) == told


VARIED: Any = {
    "a": [1, 2.5, None, True, "ä", b"bytes", (1, 2), {3, 4}, 2**80],
    "o": collections.OrderedDict(x=Thing(y=[1]), z=Evil("false")),
    "k": datetime.date(2020, 1, 2),
}
STREAMS = [pickle.dumps(VARIED, protocol) for protocol in PROTOCOLS]


@pytest.mark.parametrize("stream", STREAMS, ids=PROTOCOLS)
def test_a_stream_cut_at_any_byte_is_refused(stream: bytes) -> None:
    for count in range(len(stream)):
        with pytest.raises(PickleError):
            read_pickle(stream[:count])


@pytest.mark.parametrize("stream", STREAMS, ids=PROTOCOLS)
def test_a_stream_with_any_damage_is_read_or_refused_and_nothing_is_run(
    stream: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr(os, "system", ran.append)
    modules = set(sys.modules)
    outcomes: collections.Counter[str] = collections.Counter()
    generator = random.Random(0)
    for _ in range(800):
        damaged = bytearray(stream)
        for _ in range(generator.choice([1, 1, 2, 8])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            plain(read_pickle(bytes(damaged)))
            outcomes["read"] += 1
        except PickleError:
            outcomes["refused"] += 1

    assert (ran, set(sys.modules) - modules) == ([], set())
    assert set(outcomes) == {"read", "refused"}


def test_noise_is_refused() -> None:
    generator = random.Random(1)
    for _ in range(3000):
        with pytest.raises(PickleError):
            read_pickle(generator.randbytes(generator.randrange(40)) + b"\xff")


def test_the_formats_that_read_pickles_import_neither_torch_nor_numpy() -> None:
    code = "import sys, app.checkpoints.dcp, app.checkpoints.torch_zip; print({'torch', 'numpy'} & {*sys.modules})"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout == "set()\n"
