"""`inspect` of artifacts: what they hold, and what keeps them from being used on this machine."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import inspection
from app.artifacts import Artifact, golden
from app.artifacts.collect import collect, machine
from app.artifacts.seal import seal
from app.checkpoints import open_checkpoint
from app.environment import compiler_version
from app.errors import ArtifactError
from app.identity import ArtifactIdentity
from app.inspection import exit_code, inspect, render
from app.inspection_artifact import Here
from app.settings import Settings
from tests.unit.written import filled, written

FACTORY = "own_inspected:build"


@pytest.fixture(scope="module")
def here() -> Here:
    return Here.look(None)


@pytest.fixture(autouse=True)
def look(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is imported once, and the device taken once, for all tests of this file."""
    monkeypatch.setattr(inspection.Here, "look", lambda settings: Here(here.runtime, here.device, settings))


def settings(root: Path) -> Settings:
    return Settings(
        model={"name": "own", "factory": FACTORY, "checkpoint": str(root / "model")},
        inputs=[{"name": "x", "datatype": "FP32", "shape": ["batch", 3]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": ["batch", 4]}],
        dimensions={"batch": {"max": 16, "buckets": [2, 8]}},
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_inspected.py").write_text("def build(): ...\n")
    written(tmp_path / "model", {"w": filled("F32", 4, 3)}).close()
    return tmp_path


def publish(root: Path, here: Here, changes: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Path:
    """Seal an artifact of this machine's identity, with changes, in a store; return its directory."""
    checkpoint = open_checkpoint(root / "model")
    checkpoint.close()
    fields = {**collect(settings(root), checkpoint, here.runtime, here.device, "aot").fields, **changes}
    identity = ArtifactIdentity(fields)
    directory = root / "store" / identity.key()
    directory.mkdir(parents=True)
    for name in ("model-0.so", "constants.safetensors"):
        (directory / name).write_bytes(b"12345")
    content = {
        "packages": [{"library": "model-0.so", "bucket": None, "constants": {}, "proxied": False}],
        "factory_files": files or {},
        "layers": [{"name": "aot-package", "count": 1}],
        "buckets": ["batch=2", "batch=8"],
        "timings": {"build_s": 12.34},
        "tools": {"cxx": compiler_version()},
        "built": {"at": "2026-01-02T03:04:05+00:00", "model": "own", "version": "1"},
    }
    seal(directory, identity, content)
    return directory


def test_an_artifact_of_this_machine_is_shown_and_usable(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    artifact = Artifact(path, ArtifactIdentity({}), {})
    golden.keep(artifact, "weights1", {"batch=2#0": {"y": np.zeros(4)}, "batch=8#1": {"y": np.zeros(4)}})

    found = inspect(path)
    text = render(found)

    assert exit_code(found) == 0
    assert found["problems"] == []
    assert found["here"]["differences"] == []
    assert found["here"]["notes"] == []
    assert set(found["here"]["needs_config"]) == {
        "buckets", "compile", "dimensions", "example sizes", "inputs", "model", "outputs", "tensors",
    }  # fmt: skip
    assert found["golden"] == [
        {
            "weights": "weights1",
            "answers": 2,
            "bytes": (artifact.golden_directory / "weights1.safetensors").stat().st_size,
        }
    ]
    assert f"{path}: artifact of own 1, engine aot, 1 package(s), 10 bytes" in text
    assert "built: 2026-01-02T03:04:05+00:00, build_s 12.3, cxx " in text
    assert "layers: aot-package (1)" in text
    assert "\nusable on this machine (needs --config: " in text


def test_an_artifact_of_another_machine_says_what_keeps_it_from_being_used_here(root: Path, here: Here) -> None:
    device = {**here.device, "threads": 64, "features": f"{here.device['features']} zzz"}
    numerics = {**here.runtime["numerics"], "flush_denormal": True}
    path = publish(
        root, here, {"torch": "1.0", "device": device, "numerics": numerics, "environment": {"TORCHINDUCTOR_X": "1"}}
    )

    found = inspect(path)

    assert exit_code(found) == 0
    assert sorted(found["here"]["differences"]) == sorted(
        [
            f"torch 1.0 → {here.runtime['torch']}",
            "numerics flush_denormal true → false",
            "the processor lacks zzz",
            f"threads 64 → {here.device['threads']}",
            "variable TORCHINDUCTOR_X 1 → nothing",
        ]
    )
    assert found["here"]["notes"] == ["the number of threads is device.threads of the configuration, where that is set"]
    assert "not for this machine, artifact → here:\n  - torch 1.0 → " in render(found)


def test_with_a_configuration_the_whole_identity_is_compared(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    other = settings(root).model_copy(
        update={"compile": settings(root).compile.model_copy(update={"specialize": "bucket"})}
    )

    assert inspect(path, settings=settings(root))["here"] == {"differences": [], "needs_config": [], "notes": []}
    assert inspect(path, settings=other)["here"]["differences"] == [
        "compile.specialize none → bucket",
        "example size of batch 8 → nothing",
        "buckets any → batch=2, batch=8",
    ]


def test_with_a_configuration_the_files_of_the_factory_are_compared(root: Path, here: Here) -> None:
    path = publish(root, here, {}, {str(root / "gone.json"): "0" * 64})

    found = inspect(path, settings=settings(root))

    assert found["here"]["differences"] == [f"{root}/gone.json, which the factory reads, is not here"]


def test_a_changed_compiler_is_told_and_keeps_nothing_from_being_used(
    root: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(root, here, {})
    before = compiler_version()
    monkeypatch.setenv("CXX", "/nowhere/g++")

    found = inspect(path)

    assert found["here"]["differences"] == []
    assert found["here"]["notes"] == [f"compiler {before} → none; restoring needs none"]


def test_a_damaged_artifact_has_exit_code_5(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    (path / "model-0.so").write_bytes(b"12346")

    found = inspect(path)

    assert exit_code(found) == 5
    assert found["problems"] == ["model-0.so is not what was sealed: its sha256 differs"]


def test_a_store_is_listed_with_the_first_reason_of_each(root: Path, here: Here) -> None:
    good, foreign, bad = (publish(root, here, changes) for changes in ({}, {"torch": "1.0"}, {"torch": "1.1"}))
    (bad / "extra.so").touch()
    (root / "store" / ".rejected-x").mkdir()

    found = inspect(root / "store")
    rows = {row["key"]: row for row in found["artifacts"]}

    assert (found["kind"], found["rejected"], exit_code(found)) == ("store", 1, 5)
    assert rows[good.name] == {
        "key": good.name,
        "model": "own",
        "version": "1",
        "built_at": "2026-01-02T03:04:05+00:00",
        "engine": "aot",
        "bytes": 10,
        "usable": True,
        "why_not": "",
        "problems": [],
    }
    assert (rows[foreign.name]["usable"], rows[foreign.name]["why_not"]) == (
        False,
        f"torch 1.0 → {here.runtime['torch']}",
    )
    assert rows[bad.name]["why_not"] == "extra.so is not in the manifest"
    assert found["problems"] == [f"{bad.name}: extra.so is not in the manifest"]
    assert f"{good.name[:12]}  own 1  2026-01-02T03:04:05+00:00  aot     10 bytes  yes" in render(found)


def test_a_store_of_other_machines_artifacts_is_no_damage(root: Path, here: Here) -> None:
    publish(root, here, {"torch": "1.0"})

    assert exit_code(inspect(root / "store")) == 0


@pytest.mark.parametrize("text", ["", "[]", '{"identity": 5}', '{"identity": {}, "files": 3}'])
def test_what_is_no_manifest_is_an_error_alone_and_a_problem_in_a_store(root: Path, here: Here, text: str) -> None:
    path = publish(root, here, {})
    (path / "manifest.json").write_text(text)

    with pytest.raises(ArtifactError, match="is no manifest"):
        inspect(path)
    assert exit_code(inspect(root / "store")) == 5


def test_an_artifact_under_another_name_is_a_problem_of_the_store(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    path.rename(path.with_name("0" * 64))

    found = inspect(root / "store")

    assert found["problems"] == [f"{'0' * 64}: lies under another name than its identity, sha256:{path.name}"]


def test_control_characters_of_a_manifest_do_not_reach_the_terminal(root: Path, here: Here) -> None:
    path = publish(root, here, {"torch": "\x1b[2J"})

    assert "\x1b" not in render(inspect(path))


def test_a_record_that_is_not_whole_is_shown_with_no_answers(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    place = path.with_name(f"{path.name}.golden")
    place.mkdir()
    (place / "w.safetensors").write_bytes(struct.pack("<Q", 1 << 40))

    assert inspect(path)["golden"] == [{"weights": "w", "answers": 0, "bytes": 8}]


def test_the_fields_of_a_machine_are_those_of_the_whole_identity(root: Path, here: Here) -> None:
    path = publish(root, here, {})
    identity = json.loads((path / "manifest.json").read_bytes())["identity"]
    local = machine(here.runtime, here.device)

    assert {name: identity[name] for name in local} == json.loads(json.dumps(local))
