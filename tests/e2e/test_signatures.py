"""A fleet that requires signatures: built and signed once, restored where the key is known, refused elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import command


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> JSON:
    """A serving configuration that requires signatures, with an artifact that a builder has signed."""
    directory = tmp_path_factory.mktemp("signed")
    torch.manual_seed(0)
    save(models.Tiny(), directory / "model.safetensors")
    assert command("keygen", str(directory / "key")).returncode == 0
    trust = {"require_signature": True, "public_keys": [str(directory / "key.pub")]}
    config = configuration("tiny", directory / "model.safetensors", directory / "store", compile=trust)
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done = command("build", "--config", str(file), "--set", f"compile.signing_key={directory / 'key'}", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "rebuilt"
    return config


@pytest.fixture
def config(signed: JSON, tmp_path: Path) -> JSON:
    """A copy with a store of its own, which the test may damage."""
    shutil.copytree(signed["compile"]["artifacts"], tmp_path / "store")
    return {**signed, "compile": {**signed["compile"], "artifacts": str(tmp_path / "store")}}


def artifact(config: JSON) -> Path:
    return next(Path(config["compile"]["artifacts"]).glob("*/manifest.json")).parent


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_signed_artifact_is_restored_where_signatures_are_required(start: Start, config: JSON) -> None:
    server = start(config)
    server.wait()

    artifacts = server.status()["artifacts"]
    assert artifacts["outcome"] == "restored"
    layer = artifacts["layers"][0]
    assert (layer["name"], layer["result"]) == ("sealed-artifact", "hit")
    assert layer["why"].startswith("signed by key ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("manifest.json", "manifest.sig does not hold: "),
        ("model-0.so", "model-0.so is not what was sealed: its sha256 differs"),
    ],
)
def test_a_fleet_that_must_not_build_ends_at_a_changed_artifact(
    start: Start, config: JSON, name: str, told: str
) -> None:
    flip(artifact(config) / name)
    config["compile"]["on_miss"] = "fail"
    config["startup"] = {**config["startup"], "on_failure": "exit"}
    server = start(config)

    assert server.exit_code() == 5
    fatal = next(event for event in server.events() if event.get("event") == "fatal")
    assert f"(rejected artifact: {told}" in fatal["message"]


@pytest.mark.slow
def test_a_pod_that_builds_without_a_key_serves_what_it_built_and_leaves_the_store_alone(
    start: Start, config: JSON
) -> None:
    place = artifact(config)
    (place / "manifest.sig").unlink()
    before = sorted(path.name for path in place.parent.iterdir())
    server = start(config)
    server.wait()

    artifacts = server.status()["artifacts"]
    assert (artifacts["engine"], artifacts["outcome"]) == ("aot", "rebuilt"), artifacts["why"]
    assert [(layer["result"], layer["why"]) for layer in artifacts["layers"][:2]] == [
        ("rejected", "manifest.sig is missing, and a signature is required"),
        (
            "miss",
            "built by this start, for this process alone: compile.require_signature is true and there is no "
            "compile.signing_key to sign it with",
        ),
    ]
    assert server.stop() == 0
    assert sorted(path.name for path in place.parent.iterdir()) == before


def test_build_refuses_what_could_not_be_kept(config: JSON, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    found = command("build", "--config", str(file), "--json")
    assert json.loads(found.stdout)["outcome"] == "restored", found.stderr
    shutil.rmtree(artifact(config))

    done = command("build", "--config", str(file))

    assert done.returncode == 5
    assert "nothing is built, since it could not be kept: compile.require_signature is true" in done.stderr


def test_the_commands_sign_and_verify(signed: JSON, config: JSON, tmp_path: Path) -> None:
    place = artifact(config)
    key = str(tmp_path / "own")
    made = json.loads(command("keygen", key, "--json").stdout)
    again = command("keygen", key)
    assert (again.returncode, "exists already and is not overwritten" in again.stderr) == (2, True)

    by_builder = command("verify", str(place), "--public-key", f"{key}.pub", "--json")
    assert by_builder.returncode == 5
    assert json.loads(by_builder.stdout)["problem"].startswith("manifest.sig is by the unknown key ")

    assert command("sign", str(place), "--key", key).returncode == 0
    both = ("--public-key", signed["compile"]["public_keys"][0], "--public-key", f"{key}.pub")
    verdict = json.loads(command("verify", str(place), *both, "--json").stdout)
    assert (verdict["ok"], verdict["signature"]) == (True, f"signed by key {made['key_id']}")

    flip(place / "model-0.so")
    done = command("verify", str(place), *both)
    assert done.returncode == 5
    assert done.stdout == f"{place}: model-0.so is not what was sealed: its sha256 differs\n"
    assert command("sign", str(place), "--key", key).returncode == 5


def test_a_store_that_anyone_may_write_is_refused_until_that_is_allowed_by_name(start: Start, config: JSON) -> None:
    store = Path(config["compile"]["artifacts"])
    store.chmod(0o777)
    config["compile"]["on_miss"] = "fail"
    server = start(config)
    assert server.exit_code() == 5
    assert f"compile.artifacts is refused: {store} is writable by anyone (mode 0777)" in server.text()

    config["compile"]["trusted_writers"] = ["anyone"]
    server = start(config)
    server.wait()
    assert server.status()["artifacts"]["outcome"] == "restored"
