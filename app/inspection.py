"""Describe a checkpoint or an artifact that lies on disk, problems and all, and say it as text."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.artifacts.seal import MANIFEST
from app.checkpoints import Scan, TensorEntry, scan_checkpoint
from app.differences import flat
from app.errors import ArtifactError, CheckpointError, printable
from app.inspection_artifact import Here, describe_artifact, describe_store, is_store
from app.settings import Settings
from app.units import bytes_text

Document = Mapping[str, Any]


def inspect(path: Path, trust_pickle: bool = False, settings: Settings | None = None) -> Document:
    """Return what lies at `path`: a sealed artifact where there is a manifest, a store of them, else a checkpoint.

    What is wrong with it is in `problems`. `settings`: artifacts are compared with all that it decides, too. Raises
    CheckpointError where there is nothing of the kind.
    """
    with contextlib.suppress(OSError):
        if (path / MANIFEST).is_file():
            return describe_artifact(path, Here.look(settings))
        if is_store(path):
            return describe_store(path, Here.look(settings))
    scan = scan_checkpoint(path, trust_pickle)
    scan.close()
    return _checkpoint(scan)


def exit_code(document: Document) -> int:
    """Return 0, or the code of whatever has problems; being of another machine is none."""
    kind = CheckpointError if document["kind"] == "checkpoint" else ArtifactError
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


def render(document: Document) -> str:
    """Return the description as text for people."""
    lines = {"artifact": _artifact_lines, "store": _store_lines, "checkpoint": _checkpoint_lines}[document["kind"]](
        document
    )
    problems = document["problems"]
    ending = (
        ["", f"{len(problems)} problem(s):", *(f"  - {problem}" for problem in map(printable, problems))]
        if problems
        else []
    )
    return "\n".join([*map(printable, lines), *ending])


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
    built = document["built"] or {}
    named = f"{built.get('model', 'unknown')} {built.get('version', '')}".rstrip()
    yield (
        f"{document['path']}: artifact of {named}, engine {document['engine']}, {document['packages']} package(s), "
        f"{bytes_text(document['bytes'])}"
    )
    yield f"identity: {document['digest']}"
    yield f"built: {built.get('at', 'unknown')}{_pairs(document['timings'])}{_pairs(document['tools'])}"
    yield f"buckets: {', '.join(document['buckets'])}"
    layers = [f"{row['name']} ({row['count']})" for row in document["layers"]]
    yield f"layers: {', '.join(layers)}"
    yield ""
    yield from _table(("file", "bytes"), [(file["name"], str(file["bytes"])) for file in document["files"]])
    if document["golden"]:
        yield ""
        rows = [(row["weights"], str(row["answers"]), str(row["bytes"])) for row in document["golden"]]
        yield from _table(("proven answers for weights", "answers", "bytes"), rows)
    yield ""
    yield from _table(("identity", ""), _identity_rows(document["identity"]))
    yield ""
    yield from _here_lines(document["here"])


def _pairs(values: Mapping[str, Any]) -> str:
    shown = {name: round(value, 1) if isinstance(value, float) else value for name, value in values.items()}
    return "".join(f", {name} {value}" for name, value in shown.items())


def _identity_rows(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the fields by name; of the tensors their number, since each of them would be a row."""
    tensors = fields.get("tensors")
    shown = {**fields, "tensors": f"{len(tensors)} tensors"} if isinstance(tensors, Mapping) else fields
    return [(name, str(value)) for name, value in flat(shown)]


def _here_lines(here: Document) -> Iterator[str]:
    open_fields = ", ".join(here["needs_config"])
    left = f" (needs --config: {open_fields})" if open_fields else ""
    if here["differences"]:
        yield f"not for this machine{' and configuration' if not left else ''}, artifact → here:"
        yield from (f"  - {text}" for text in here["differences"])
    else:
        yield f"usable on this machine{left}"
    yield from (f"note: {note}" for note in here["notes"])


def _store_lines(document: Document) -> Iterator[str]:
    rows = document["artifacts"]
    yield f"{document['path']}: {len(rows)} artifact(s), {document['rejected']} set aside as damaged"
    yield ""
    head = ("artifact", "model", "built", "engine", "size", "usable here")
    yield from _table(
        head,
        [
            (
                row["key"][:12],
                f"{row['model'] or 'unknown'} {row['version'] or ''}".rstrip(),
                str(row["built_at"] or "unknown"),
                str(row["engine"] or "unknown"),
                "unknown" if row["bytes"] is None else bytes_text(row["bytes"]),
                "yes" if row["usable"] else f"no: {row['why_not']}",
            )
            for row in rows
        ],
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *(tuple(map(printable, row)) for row in rows)):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
