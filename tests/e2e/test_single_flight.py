"""A fleet that starts together on one empty store: one server builds, the others wait and restore; and pruning."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import Server, command, outputs

X = {"x": np.zeros((2, 16), np.float32)}


def builders(server: Server) -> list[int]:
    """Return the server's builder processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                started = b"app.child\0build" in (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if started and int(fields[1]) == server.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def the_builder(servers: list[Server]) -> tuple[Server, int]:
    """Wait for the one server that builds."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for server in servers:
            if pids := builders(server):
                return server, pids[0]
        time.sleep(0.01)
    raise AssertionError("nobody builds")


def stage(server: Server, name: str) -> JSON:
    return next(one for one in server.status()["stages"] if one["name"] == name)


def wait_for_waiting(server: Server) -> str:
    """Return what a server says while it waits for another's build."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        server.wait("/healthz")
        detail = str(stage(server, "build-artifact")["detail"])
        if detail.startswith("waiting for the build of "):
            return detail
        time.sleep(0.02)
    raise AssertionError(server.text()[-3000:])


@pytest.mark.slow
def test_of_three_servers_on_an_empty_store_one_builds_and_the_others_restore_what_it_built(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    tiny_config["compile"]["artifacts"] = str(store)
    servers = [start(tiny_config) for _ in range(3)]
    builder, child = the_builder(servers)
    waiting = [server for server in servers if server is not builder]
    environment = dict(
        row.partition("=")[::2] for row in Path(f"/proc/{child}/environ").read_bytes().decode().split("\0") if row
    )
    details = [wait_for_waiting(server) for server in waiting]
    for server in servers:
        server.wait()

    reports = {server: server.status()["artifacts"] for server in servers}
    assert sorted(report["outcome"] for report in reports.values()) == ["rebuilt", "restored", "restored"]
    assert reports[builder]["outcome"] == "rebuilt"
    name = f"{os.uname().nodename} (process {builder.process.pid})"
    assert {detail.rpartition(",")[0] for detail in details} == {f"waiting for the build of {name}"}
    for server in waiting:
        layer = reports[server]["layers"][0]
        assert (layer["name"], layer["result"]) == ("sealed-artifact", "hit")
        assert layer["why"].startswith(f"built by {name} while this process waited ")
        assert builders(server) == []
    answers = [server.infer("tiny", X) for server in servers]
    assert [status for status, _ in answers] == [200] * 3
    assert all(np.array_equal(outputs(body), outputs(answers[0][1])) for _, body in answers)
    key = reports[builder]["identity"].removeprefix("sha256:")
    names = {path.name for path in store.iterdir()}
    assert names <= {key, f"{key}.golden", f"{key}.used"}, "no lease and no workspace is left"
    # The compiler's live cache is never on the volume that pods share.
    cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert not cache.is_relative_to(store)
    assert not cache.exists(), "and it goes away with the builder"


@pytest.mark.slow
def test_a_cache_directory_that_the_environment_puts_on_the_shared_volume_is_not_used_by_the_builder(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    server = start(tiny_config, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "store" / "live")})
    server.wait()

    assert server.status()["artifacts"]["outcome"] == "rebuilt"
    assert not (tmp_path / "store" / "live").exists()


@pytest.mark.slow
def test_what_one_server_could_not_export_the_others_do_not_try_either(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(1)
    save(models.Branching(), tmp_path / "model.safetensors")
    config = configuration("branching", tmp_path / "model.safetensors", tmp_path / "store")
    servers = [start(config) for _ in range(3)]
    builder, _ = the_builder(servers)
    for server in servers:
        if server is not builder:
            wait_for_waiting(server)
    for server in servers:
        server.wait()

    reports = [server.status()["artifacts"] for server in servers]
    assert sorted(report["outcome"] for report in reports) == ["rebuilt", "restored", "restored"]
    assert {report["engine"] for report in reports} == {"jit"}
    assert all("data-dependent" in report["why"] for report in reports), reports
    assert sum(server.text().count("the build process failed") for server in servers) == 1


@pytest.mark.slow
def test_when_the_server_that_builds_is_killed_one_that_waited_builds_and_both_get_ready(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    servers = [start(tiny_config) for _ in range(3)]
    builder, _ = the_builder(servers)
    waiting = [server for server in servers if server is not builder]
    for server in waiting:
        wait_for_waiting(server)
    os.killpg(builder.process.pid, signal.SIGKILL)
    for server in waiting:
        server.wait()

    outcomes = sorted(server.status()["artifacts"]["outcome"] for server in waiting)
    assert outcomes == ["rebuilt", "restored"]


@pytest.mark.slow
def test_a_server_that_waits_for_another_ends_at_once_when_it_is_told_to(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["compile"]["artifacts"] = str(tmp_path / "store")
    servers = [start(tiny_config) for _ in range(2)]
    builder, _ = the_builder(servers)
    (waiting,) = (server for server in servers if server is not builder)
    wait_for_waiting(waiting)

    assert waiting.stop() == 0
    builder.wait()
    assert builder.status()["artifacts"]["outcome"] == "rebuilt"


def test_build_with_prune_keeps_its_own_artifact_and_tells_what_it_removed(tiny_config: JSON, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_config))
    store = Path(tiny_config["compile"]["artifacts"])
    left = store / ".building-left"
    left.mkdir()
    (left / "half").write_bytes(b"x" * 1000)
    os.utime(left, (0, 0))

    done = command("build", "--config", str(config), "--prune", "--keep", "1", "--unused-days", "0", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "restored"
    assert found["pruned"] == {
        "removed": [{"name": ".building-left", "bytes": 1000, "why": "abandoned build"}],
        "freed_bytes": 1000,
        "kept": 1,
    }
    assert Path(found["path"]).is_dir()
