"""Shards and their index, as the Hugging Face libraries write them: the index is the authority, both ways."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.checkpoints import Scan

INDEX = ".index.json"
INDEX_LIMIT = 256 << 20

# Shard → the names that it must hold by the index; None where no index says.
Expected = dict[Path, frozenset[str] | None]


def expected_files(scan: Scan, names: Sequence[str], what: str) -> Expected:
    """Return the shards to open at the scan's path.

    `names`: the files of the format there, an index among them where there is one. `what`: the format in words.
    """
    path = scan.path
    if path.is_file():
        return _from_index(scan, path, names=()) if path.name.endswith(INDEX) else {path: None}
    indexes = [name for name in names if name.endswith(INDEX)]
    if len(indexes) > 1:
        scan.problems.append(f"{len(indexes)} indexes ({', '.join(indexes)}): let model.checkpoint name one of them")
        return {}
    files = [name for name in names if not name.endswith(INDEX)]
    if indexes:
        return _from_index(scan, path / indexes[0], files)
    if len(files) > 1:
        scan.problems.append(
            f"{len(files)} {what} files without an index ({', '.join(files[:5])}): which belong together is unknown; "
            f"let model.checkpoint name one of them"
        )
        return {}
    return {path / files[0]: None}


def _from_index(scan: Scan, index: Path, names: Iterable[str]) -> Expected:
    try:
        if (size := index.stat().st_size) > INDEX_LIMIT:
            raise ValueError(f"{size} bytes are more than the {INDEX_LIMIT} of an index")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = set(weight_map.values())
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("weight_map must map names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        scan.problems.append(f"{index.name} is no index: {type(error).__name__}: {error}")
        return {}
    expected: Expected = {}
    held: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        held.setdefault(shard, []).append(name)
    for shard in sorted(shards):
        if Path(shard).name != shard or shard in {"", ".", ".."} or "\0" in shard:
            scan.problems.append(f"{index.name} names {shard!r}, which is not a file name beside it")
            continue
        expected[index.parent / shard] = frozenset(held[shard])
    scan.problems += [
        f"{name} is not named by {index.name}; remove it, make the index anew, or let model.checkpoint name the index"
        for name in sorted(set(names) - shards)
    ]
    return expected


def compare_with_index(scan: Scan, shard: Path, promised: frozenset[str] | None, held: Iterable[str]) -> None:
    """Add a problem for every name that the index places in a shard and the shard has not, and the other way."""
    if promised is None:
        return
    found = frozenset(held)
    scan.problems += [
        f"{shard.name}: the index promises {name}, the file does not hold it" for name in sorted(promised - found)
    ]
    scan.problems += [
        f"{shard.name}: holds {name}, which the index does not place there" for name in sorted(found - promised)
    ]
