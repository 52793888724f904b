"""Describe a sealed artifact or a directory of them, and say what keeps each from being used on this machine."""

import contextlib
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import plugins
from app.artifacts import golden, inputs
from app.artifacts.collect import collect, machine
from app.artifacts.seal import MANIFEST, read_manifest, verify
from app.checkpoints import open_checkpoint
from app.devices import Device
from app.differences import label, tell
from app.environment import compiler_version
from app.errors import ArtifactError
from app.identity import ArtifactIdentity
from app.runtime import import_torch
from app.settings import DeviceSettings, Settings

Document = Mapping[str, Any]

_KEY = re.compile(r"[0-9a-f]{64}")
# A record larger than this is not opened to count its answers.
LARGEST_RECORD = 256 << 20


@dataclass(frozen=True, slots=True)
class Here:
    """The machine that asks, and the configuration to compare with where one is given."""

    runtime: Mapping[str, Any]
    device: Mapping[str, Any]
    settings: Settings | None

    @classmethod
    def look(cls, settings: Settings | None) -> "Here":
        """Import torch and take the device, as a server would; raises ResourceError where it is not to be had."""
        runtime = import_torch()
        wanted = settings.device if settings else DeviceSettings()
        kind = "cpu" if wanted.kind == "auto" else wanted.kind
        device = plugins.load("app.devices", kind, Device).acquire(wanted)
        return cls(runtime.fields, device.fingerprint(), settings)


def is_store(path: Path) -> bool:
    """The directory holds sealed artifacts."""
    return any(_artifacts(path))


def describe_artifact(path: Path, here: Here) -> Document:
    """Return the description; what is damaged is in `problems`. Raises ArtifactError where there is no manifest."""
    try:
        manifest = read_manifest(path)
        identity = ArtifactIdentity(dict(manifest["identity"]))
        found = verify(path, identity)
        files = [{"name": str(row["path"]), "bytes": int(row["size"])} for row in manifest["files"]]
        return {
            "kind": "artifact",
            "path": str(path),
            "digest": identity.digest,
            "built": manifest.get("built"),
            "engine": _engine(identity),
            "bytes": sum(row["bytes"] for row in files),
            "files": files,
            "packages": len(manifest.get("packages", ())),
            "buckets": list(manifest.get("buckets", ())),
            "layers": list(manifest.get("layers", ())),
            "tools": dict(manifest.get("tools", {})),
            "timings": dict(manifest.get("timings", {})),
            "golden": list(_records(path)),
            "here": _compare(identity, manifest, here),
            "identity": manifest["identity"],
            "problems": [found] if isinstance(found, str) else [],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path / MANIFEST} is no manifest: {type(error).__name__}: {error}") from error


def describe_store(path: Path, here: Here) -> Document:
    """Return every artifact of a store in one row each, in the order they were built; every file is verified."""
    rows = sorted((_row(one, here) for one in _artifacts(path)), key=lambda row: (str(row["built_at"]), row["key"]))
    return {
        "kind": "store",
        "path": str(path),
        "artifacts": rows,
        "rejected": len(list(path.glob(".rejected-*"))),
        "problems": [f"{row['key']}: {problem}" for row in rows for problem in row["problems"]],
    }


def _artifacts(path: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (one for one in sorted(path.iterdir()) if _KEY.fullmatch(one.name) and (one / MANIFEST).exists())


def _row(path: Path, here: Here) -> dict[str, Any]:
    try:
        found = describe_artifact(path, here)
    except ArtifactError as error:
        found = {"problems": [str(error)], "built": None, "engine": None, "bytes": None}
    built = found["built"] if isinstance(found["built"], Mapping) else {}
    problems = list(found["problems"])
    if not problems and found["digest"] != f"sha256:{path.name}":
        problems.append(f"lies under another name than its identity, {found['digest']}")
    differences = found["here"]["differences"] if "here" in found else []
    reason = next(iter([*problems, *differences]), "")
    return {
        "key": path.name,
        "model": built.get("model"),
        "version": built.get("version"),
        "built_at": built.get("at"),
        "engine": found["engine"],
        "bytes": found["bytes"],
        "usable": not reason,
        "why_not": reason,
        "problems": problems,
    }


def _compare(identity: ArtifactIdentity, manifest: Mapping[str, Any], here: Here) -> dict[str, Any]:
    """Say what differs from this machine; without a configuration the fields that it decides are left open."""
    notes = []
    if (built_with := dict(manifest.get("tools", {})).get("cxx")) != (cxx := compiler_version()):
        notes.append(f"compiler {built_with or 'unknown'} → {cxx or 'none'}; restoring needs none")
    if here.settings is None:
        local = machine(here.runtime, here.device)
        differences = tell({name: value for name, value in identity.fields.items() if name in local}, local)
        if any(text.startswith(f"{label('device.threads')} ") for text in differences):
            notes.append("the number of threads is device.threads of the configuration, where that is set")
        left = sorted(label(name) for name in identity.fields.keys() - local.keys())
        return {"differences": list(differences), "needs_config": left, "notes": notes}
    model = here.settings.model
    checkpoint = open_checkpoint(model.checkpoint, model.trust_pickle)
    checkpoint.close()
    wanted = collect(here.settings, checkpoint, here.runtime, here.device, _engine(identity))
    stale = inputs.changed(manifest.get("factory_files", {}), model.checkpoint)
    return {"differences": [*identity.differences(wanted), *stale], "needs_config": [], "notes": notes}


def _engine(identity: ArtifactIdentity) -> str:
    section = identity.fields.get("compile")
    return str(section.get("engine")) if isinstance(section, Mapping) else "unknown"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of proven answers beside an artifact: one file for each set of weights."""
    for file in sorted(path.with_name(f"{path.name}.golden").glob("*.safetensors")):
        status = file.lstat()
        whole = stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_RECORD
        answers = len(golden.read(file)) if whole else 0
        yield {"weights": file.stem, "answers": answers, "bytes": status.st_size}
