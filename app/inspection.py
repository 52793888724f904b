"""Describe a checkpoint or an artifact that lies on disk, problems and all, and say it as text."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.artifacts.seal import MANIFEST, read_manifest, verify
from app.checkpoints import Scan, TensorEntry, scan_checkpoint
from app.errors import ArtifactError, CheckpointError, printable
from app.identity import ArtifactIdentity
from app.units import bytes_text

Document = Mapping[str, Any]


def inspect(path: Path, trust_pickle: bool = False) -> Document:
    """Return what lies at `path`: a sealed artifact where there is a manifest, else a checkpoint.

    What is wrong with it is in `problems`. Raises CheckpointError where there is neither.
    """
    with contextlib.suppress(OSError):
        if (path / MANIFEST).is_file():
            return _artifact(path)
    scan = scan_checkpoint(path, trust_pickle)
    scan.close()
    return _checkpoint(scan)


def exit_code(document: Document) -> int:
    """Return 0, or the code of whatever has problems."""
    kind = ArtifactError if document["kind"] == "artifact" else CheckpointError
    return kind.exit_code if document["problems"] else 0


def _checkpoint(scan: Scan) -> Document:
    entries = sorted(scan.tensors.values(), key=lambda entry: entry.name)
    dtypes: dict[str, dict[str, int]] = {}
    for entry in entries:
        row = dtypes.setdefault(entry.dtype, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += entry.nbytes
    return {
        "kind": "checkpoint",
        "path": str(scan.path),
        "format": scan.format,
        "bytes": sum({entry.place: entry.nbytes for entry in entries}.values()),
        "files": [{"name": file.path.name, "bytes": file.size} for file in scan.files],
        "dtypes": dtypes,
        "tensors": [_tensor(scan, entry) for entry in entries],
        "objects": sorted(scan.objects),
        "notes": scan.notes,
        "problems": scan.problems,
    }


def _tensor(scan: Scan, entry: TensorEntry) -> dict[str, Any]:
    pieces = entry.pieces
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "files": sorted({scan.files[number].path.name for number in ([p.file for p in pieces] or [entry.file])}),
        "alignment": None if pieces else _alignment(entry.offset),
    }


def _alignment(offset: int) -> int:
    """Return the largest power of two, up to a page, that the offset is a multiple of."""
    return min(4096, offset & -offset) if offset else 4096


def _artifact(path: Path) -> Document:
    try:
        manifest = read_manifest(path)
        found = verify(path, ArtifactIdentity(manifest["identity"]))
        return {
            "kind": "artifact",
            "path": str(path),
            "identity": manifest["identity"],
            "files": [{"name": row["path"], "bytes": row["size"]} for row in manifest["files"]],
            "packages": len(manifest["packages"]),
            "buckets": manifest["buckets"],
            "tools": manifest["tools"],
            "timings": manifest["timings"],
            "problems": [found] if isinstance(found, str) else [],
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path / MANIFEST} is no manifest: {type(error).__name__}: {error}") from error


def render(document: Document) -> str:
    """Return the description as text for people."""
    lines = _artifact_lines(document) if document["kind"] == "artifact" else _checkpoint_lines(document)
    problems = document["problems"]
    ending = (
        ["", f"{len(problems)} problem(s):", *(f"  - {problem}" for problem in map(printable, problems))]
        if problems
        else []
    )
    return "\n".join([*lines, *ending])


def _checkpoint_lines(document: Document) -> Iterator[str]:
    tensors, files = document["tensors"], document["files"]
    yield (
        f"{document['path']}: {document['format']}, {len(files)} file(s), {len(tensors)} tensors, "
        f"{bytes_text(document['bytes'])}"
    )
    yield from (f"note: {note}" for note in document["notes"])
    yield ""
    yield from _table(
        ("tensor", "dtype", "shape", "bytes", "aligned", "file"),
        [
            (
                tensor["name"],
                tensor["dtype"],
                " x ".join(map(str, tensor["shape"])) or "scalar",
                str(tensor["bytes"]),
                "-" if tensor["alignment"] is None else str(tensor["alignment"]),
                ", ".join(tensor["files"]),
            )
            for tensor in tensors
        ],
    )
    if document["objects"]:
        yield f"no tensors: {', '.join(document['objects'])}"
    yield ""
    rows = ((name, str(row["tensors"]), bytes_text(row["bytes"])) for name, row in document["dtypes"].items())
    yield from _table(("dtype", "tensors", "bytes"), list(rows))
    yield ""
    yield from _table(("file", "bytes"), [(file["name"], str(file["bytes"])) for file in files])


def _artifact_lines(document: Document) -> Iterator[str]:
    yield f"{document['path']}: artifact, {document['packages']} package(s), buckets {', '.join(document['buckets'])}"
    yield ""
    yield from _table(("file", "bytes"), [(file["name"], str(file["bytes"])) for file in document["files"]])
    yield ""
    yield from _table(("identity", ""), [(name, str(value)) for name, value in document["identity"].items()])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *(tuple(map(printable, row)) for row in rows)):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
