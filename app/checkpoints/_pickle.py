"""Pickles read as data, onto inert values: nothing is imported or called (`weights_only=True` does that by a list)."""

import io
import pickletools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A stream larger than these is an attack or no description of weights; they bound the memory that reading takes.
BYTES_LIMIT = 100_000_000
OPCODES_LIMIT = 6_000_000
# Whoever walks the values may recurse, and an interpreter has 1000 frames.
DEPTH_LIMIT = 100


class PickleError(ValueError):
    """A stream that is no whole pickle, or that only running it could read; `position` is the byte where it shows."""

    def __init__(self, fact: str, position: int) -> None:
        self.position = position
        super().__init__(f"{fact[:200]} (at byte {position})")


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something in a module that is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """An object as its recipe. Dicts and sets are calls too: what an attacker nests can take for ever to hash."""

    function: "Global | Call"
    arguments: tuple[object, ...] = ()
    keywords: object = None
    state: object = None
    items: list[object] = field(default_factory=list)
    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Persistent:
    """What the writer keeps outside the pickle, by the id that it gave it."""

    id: object


DICT, SET, FROZENSET = (Global("builtins", name) for name in ("dict", "set", "frozenset"))


def read_pickle(data: bytes) -> object:
    """Return what a pickle describes, free of cycles and at most DEPTH_LIMIT deep; raises PickleError."""
    if len(data) > BYTES_LIMIT:
        raise PickleError(f"{len(data)} bytes of pickle, more than {BYTES_LIMIT}", BYTES_LIMIT)
    stream = io.BytesIO(data)
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= OPCODES_LIMIT:
                raise ValueError(f"more than {OPCODES_LIMIT} opcodes")
            machine.step(opcode.name, argument)
        if machine.marked or len(machine.stack) != 1:
            raise ValueError("an end with more or less than one value")
        _check_nesting(machine.stack[0])
    except IndexError as error:
        raise PickleError("an opcode takes more than there is", stream.tell()) from error
    except (ValueError, Warning) as error:  # escapes that Python deprecates warn, and warnings may be errors
        raise PickleError(str(error), stream.tell()) from error
    return machine.stack[0]


def children(value: object) -> Sequence[object]:
    """Return what a value is made of; nothing for one without parts."""
    match value:
        case list() | tuple():
            return value
        case Call():
            inside = (part for pair in value.pairs for part in pair)
            return (value.function, value.arguments, value.keywords, value.state, *value.items, *inside)
        case Persistent():
            return (value.id,)
    return ()


def _check_nesting(root: object) -> None:
    """Raise ValueError where a value contains itself or is too deep; without recursion, each value once."""
    heights = {id(root): 0}
    path = [(root, iter(children(root)))]
    while path:
        value, rest = path[-1]
        found = (one for one in rest if isinstance(one, list | tuple | Call | Persistent))
        child = next((one for one in found if not heights.get(id(one))), None)
        if child is None:
            heights[id(value)] = 1 + max((heights.get(id(one), 0) for one in children(value)), default=0)
            path.pop()
        elif id(child) in heights:
            raise ValueError("a value that contains itself")
        else:
            heights[id(child)] = 0
            path.append((child, iter(children(child))))
        if len(path) > DEPTH_LIMIT or heights[id(root)] > DEPTH_LIMIT:
            raise ValueError(f"values nested more than {DEPTH_LIMIT} deep")


class _Machine:
    """The stack and the memo of a pickle; the memo is a dict, so a large index takes no memory."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode; raises ValueError or IndexError."""
        if name in _PUSHED:
            self.stack.append(_checked(argument))
        elif name in _MADE:
            made = _MADE[name](self)  # first, since it may put another stack in the place of this one
            self.stack.append(made)
        elif name in _DONE:
            _DONE[name](self, argument)
        else:
            raise ValueError(f"the opcode {name}, which is not read here")

    def last(self, count: int) -> tuple[object, ...]:
        if len(self.stack) < count:
            raise IndexError
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def mark(self, _: Any) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[object]:
        """Take what lies above the last mark, and the mark."""
        above, self.stack = self.stack, self.marked.pop()
        return above

    def put(self, index: Any) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def get(self, index: Any) -> None:
        if index not in self.memo:
            raise ValueError(f"memo {index} is taken before it was put")
        self.stack.append(self.memo[index])

    def call(self, count: int = 2) -> Call:
        function, arguments, *keywords = self.last(count)
        if not isinstance(function, Global | Call) or not isinstance(arguments, tuple):
            raise ValueError("a call of what has no name")
        return Call(function, arguments, keywords[0] if keywords else None)

    def add(self, items: Iterable[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list | Call):
            raise ValueError("items for what can have none")
        (target if isinstance(target, list) else target.items).extend(items)

    def set(self, keys_and_values: Sequence[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Call):
            raise ValueError("entries for what can have none")
        target.pairs.extend(_paired(keys_and_values))

    def build(self, _: Any) -> None:
        target, state = self.last(2)
        if not isinstance(target, Call):
            raise ValueError("a state for what can have none")
        target.state = state
        self.stack.append(target)


def _checked(argument: Any) -> object:
    if isinstance(argument, str) and not argument.isascii():
        argument.encode()  # half of a surrogate pair is no text: it could not be written to any log
    if isinstance(argument, int) and argument.bit_length() > 1024:
        raise ValueError(f"a number of {argument.bit_length()} bits")  # Python refuses to print what is much longer
    return argument


def _paired(keys_and_values: Sequence[object]) -> list[tuple[object, object]]:
    if len(keys_and_values) % 2:
        raise ValueError("a key without a value")
    return list(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))


def _named(module: object, name: object) -> Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a global whose name is no text")
    return Global(module, name)


# What the stream itself holds. Those of Python 2 are not among them: torch's zip archives are younger.
_PUSHED = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
# What is made, of what lies on the stack.
_MADE: dict[str, Callable[[_Machine], object]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: Call(DICT),
    "EMPTY_SET": lambda _: Call(SET, ([],)),  # as it is written before protocol 4
    "TUPLE": lambda machine: tuple(machine.since_mark()),
    "TUPLE1": lambda machine: machine.last(1),
    "TUPLE2": lambda machine: machine.last(2),
    "TUPLE3": lambda machine: machine.last(3),
    "LIST": _Machine.since_mark,
    "DICT": lambda machine: Call(DICT, pairs=_paired(machine.since_mark())),
    "FROZENSET": lambda machine: Call(FROZENSET, (machine.since_mark(),)),
    "STACK_GLOBAL": lambda machine: _named(*machine.last(2)),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": lambda machine: machine.call(3),
    "BINPERSID": lambda machine: Persistent(*machine.last(1)),
}
# What changes what is there; the argument is the stream's.
_DONE: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _, __: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda machine, _: machine.add(machine.since_mark())),
    "MARK": _Machine.mark,
    "APPEND": lambda machine, _: machine.add(machine.last(1)),
    "SETITEM": lambda machine, _: machine.set(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set(machine.since_mark()),
    "BUILD": _Machine.build,
    "GLOBAL": lambda machine, text: machine.stack.append(_named(*text.split(" ", 1))),
}
