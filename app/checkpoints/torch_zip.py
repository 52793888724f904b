"""Files of torch.save: one, or shards with an index.

The pickle in them is read as data and never run, so no trust is asked for. That is stricter than torch's own
`weights_only=True`: nothing at all is imported, and what a plain tensor does not need is refused or left aside.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from app.checkpoints import Opaque, Scan
from app.checkpoints._index import INDEX, compare_with_index, expected_files
from app.checkpoints._pickle import Call, Global, Persistent, children
from app.checkpoints._torch_archive import Archive, ArchiveError, pairs_of

SUFFIXES = (".bin", ".pt", ".pth")
# What trainers write beside the weights, under the same suffixes.
BESIDE = (
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt",
    "rng_state*.pth", "random_states*.pkl",
)  # fmt: skip
# What a module's get_extra_state returned; it may be a dict of tensors, and is no weights all the same.
EXTRA_STATE = "_extra_state"

Pairs = list[tuple[object, object]]


class TorchZip:
    """The format's entry for the loader."""

    plugin = True
    name = "torch"

    @classmethod
    def files(cls, path: Path) -> tuple[str, ...]:
        """Return the names at `path` that are torch's, indexes included; in a directory without what trainers add."""
        ends = (*SUFFIXES, *(suffix + INDEX for suffix in SUFFIXES))
        if path.is_dir():
            names = sorted(p.name for p in path.iterdir() if p.name.endswith(ends))
            return tuple(name for name in names if not _is_beside(name))
        return (path.name,) if path.name.endswith(ends) else ()

    @classmethod
    def fill(cls, scan: Scan, trust_pickle: bool) -> None:
        """Look at every shard; trust changes nothing, since no pickle is run."""
        del trust_pickle
        path = scan.path
        if path.is_dir() and (beside := sorted(p.name for p in path.iterdir() if _is_beside(p.name))):
            scan.notes.append(f"left aside, as trainers write them beside weights: {', '.join(beside)}")
        for shard, promised in expected_files(scan, cls.files(path), "torch").items():
            if (number := scan.open_file(shard)) is None:
                continue
            if (held := _read_file(scan, number)) is not None:
                objects = held & scan.objects.keys()
                compare_with_index(scan, shard, promised, (held - objects) | (objects & (promised or set())))


def _is_beside(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in BESIDE)


def _read_file(scan: Scan, number: int) -> set[str] | None:
    """Add the tensors and objects of one file, and return their names; None where it is no such file."""
    file = scan.files[number]
    try:
        archive = Archive(file.fd, 0, file.size)
    except ArchiveError as error:
        scan.problems.append(f"{file.path.name}: {error}")
        return None
    if (pairs := _weights(scan, file.path.name, archive.root)) is None:
        return None
    names = {key: value for key, value in pairs if isinstance(key, str)}
    if wrong := [_label(key) for key, _ in pairs if not isinstance(key, str)]:
        scan.problems.append(f"{file.path.name}: has entries named {', '.join(wrong[:5])}; only texts can name tensors")
    for name, value in names.items():
        _add(scan, number, archive, name, value)
    return set(names)


def _add(scan: Scan, number: int, archive: Archive, name: str, value: object) -> None:
    file = scan.files[number].path.name
    if is_tensor(value):
        try:
            scan.add(archive.entry(name, value, number))
        except ArchiveError as error:
            scan.problems.append(f"{file}: tensor {name} {error}")
        return
    scan.objects[name] = plain(value)
    if _tensor_inside(value):
        scan.notes.append(f"{file}: {name} is a {describe(value)} with tensors in it, which are left aside")


def _weights(scan: Scan, file: str, root: object) -> Pairs | None:
    """Return the entries that are the weights: those at the top, or those of the one mapping of tensors there."""
    pairs = pairs_of(root)
    if pairs is None:
        scan.problems.append(
            f"{file}: holds a {describe(root)}, not tensors by name; torch.save the model's state_dict()"
        )
        return None
    wrapped = dict(_mappings(pairs))
    if len(wrapped) == 1:
        ((taken, inside),) = wrapped.items()
        scan.versions |= _versions(next(value for key, value in pairs if key == taken))
        others = _listing([(key, value) for key, value in pairs if key != taken])
        scan.notes.append(f"{file}: the weights are what it holds as {taken}; left aside: {others}")
        return inside
    if wrapped:
        scan.problems.append(
            f"{file}: {', '.join(wrapped)} hold tensors by name; which are the weights is unknown, torch.save only them"
        )
    elif any(is_tensor(value) for _, value in pairs):
        scan.versions |= _versions(root)
        return pairs
    else:
        scan.problems.append(
            f"{file}: holds no tensors by name, but {_listing(pairs)}; torch.save the model's state_dict()"
        )
    return None


def _versions(mapping: object) -> dict[str, int]:
    """Return module → version, which a state dict carries as an attribute: modules read older formats by it."""
    state = pairs_of(mapping.state) if isinstance(mapping, Call) else None
    listed = pairs_of(dict(_texts(state)).get("_metadata")) or []
    found = ((module, dict(_texts(pairs_of(about))).get("version")) for module, about in _texts(listed))
    return {module: version for module, version in found if isinstance(version, int)}


def _texts(pairs: Pairs | None) -> Iterator[tuple[str, object]]:
    yield from ((key, value) for key, value in pairs or [] if isinstance(key, str))


def _mappings(pairs: Pairs) -> Iterator[tuple[str, Pairs]]:
    for key, value in pairs:
        inside = pairs_of(value) or []
        texts = all(isinstance(name, str) for name, _ in inside)
        if isinstance(key, str) and not key.endswith(EXTRA_STATE) and texts and any(is_tensor(v) for _, v in inside):
            yield key, inside


def _listing(pairs: Pairs) -> str:
    shown = [f"{_label(key)} ({describe(value)})" for key, value in pairs[:20]]
    return ", ".join([*shown, f"{len(pairs) - 20} more"] if len(pairs) > 20 else shown) or "nothing"


def _label(key: object) -> str:
    return str(key) if isinstance(key, str | int | float | None) else describe(key)


def is_tensor(value: object) -> bool:
    """Say whether torch would make a tensor of a value; of what kind is another question."""
    match value:
        case Call(function=Global(module, name)):
            return module.split(".")[0] == "torch" and name.startswith("_rebuild")
    return False


def describe(value: object) -> str:
    """Say in a word what a value is."""
    if is_tensor(value):
        return "tensor"
    while isinstance(value, Call):
        value = value.function
    if isinstance(value, Global):
        return value.name if value.module in {"builtins", "__builtin__"} else str(value)
    if isinstance(value, Persistent):
        return "storage"
    return type(value).__name__


def plain(value: object) -> object:
    """Return the Python value that is described, or an Opaque where anything in it is not plain.

    Plain: None, bool, int, float, str, bytes, list, tuple, dict, set; in dicts and sets, keys without parts.
    """
    try:
        return _plain(value, {})
    except ValueError:
        return Opaque(describe(value))


def _plain(value: object, made: dict[int, object]) -> object:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    # What occurs in many places is made once, or a short stream could describe more than any memory holds.
    if id(value) not in made:
        made[id(value)] = _plain_parts(value, made)
    return made[id(value)]


def _plain_parts(value: object, made: dict[int, object]) -> object:
    match value:
        case list():
            return [_plain(part, made) for part in value]
        case tuple():
            return tuple([_plain(part, made) for part in value])
        case Call(function=Global("builtins", "dict"), arguments=()):
            return {_plain_key(key, made): _plain(part, made) for key, part in value.pairs}
        case Call(function=Global("builtins" | "__builtin__", "set"), arguments=(list() as items,)):
            return {_plain_key(part, made) for part in (*items, *value.items)}
        # As bytes are written before protocol 3; torch writes protocol 2.
        case Call(function=Global("builtins" | "__builtin__", "bytes"), arguments=()):
            return b""
        case Call(function=Global("_codecs", "encode"), arguments=(str() as text, "latin1")):
            return text.encode("latin1")
    raise ValueError(describe(value))


def _plain_key(value: object, made: dict[int, object]) -> object:
    key = _plain(value, made)
    # Neither parts nor long numbers: with both an attacker could choose hashes.
    if isinstance(key, list | tuple | dict | set) or (isinstance(key, int) and key.bit_length() > 64):
        raise ValueError("a key that could take for ever to hash")
    return key


def _tensor_inside(value: object) -> bool:
    seen, rest = {id(value)}, [value]
    while rest:
        found = rest.pop()
        if is_tensor(found):
            return True
        new = [part for part in children(found) if id(part) not in seen]
        seen.update(map(id, new))
        rest += new
    return False
