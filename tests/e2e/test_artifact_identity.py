"""Building without the weights' data, and what a miss and `inspect` say about it."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from app.checkpoints import Checkpoint, open_checkpoint
from app.weights.page_cache import cached_shares
from tests.e2e import models
from tests.e2e.conftest import JSON, Start, configuration, save
from tests.e2e.harness import command

ROWS = 1 << 18


def share_cached(checkpoint: Checkpoint) -> float:
    share = cached_shares(checkpoint)[0]
    assert share is not None, "the file system of the tests cannot tell what is cached"
    return share


@pytest.mark.slow
def test_build_reads_no_data_and_what_it_makes_serves_the_whole_checkpoint(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(models.Table(ROWS), tmp_path / "whole" / "model.safetensors")
    made = command("inspect", str(tmp_path / "whole"), "--headers", str(tmp_path / "headers"))
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{tmp_path / 'headers'}: headers of 1 file(s)\n"
    config = configuration(
        "table",
        tmp_path / "headers",
        tmp_path / "store",
        inputs=[{"name": "ids", "datatype": "INT64", "shape": ["batch", 4], "pad": 0, "high": ROWS}],
    )
    config["model"]["kwargs"] = {"rows": ROWS}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    copy = open_checkpoint(tmp_path / "headers")
    size_on_disk = os.fstat(copy.files[0].fd).st_blocks

    built = command("build", "--config", str(file), "--json")

    assert built.returncode == 0, built.stderr
    assert share_cached(copy) < 0.05
    assert os.fstat(copy.files[0].fd).st_blocks == size_on_disk < 100
    (tmp_path / "headers" / "model.safetensors").read_bytes()
    assert share_cached(copy) > 0.9, "reading would not have been noticed"
    copy.close()

    refused = start(config)
    assert refused.exit_code() == 3
    assert "has headers only, for `build`; name the whole checkpoint" in refused.events()[-1]["message"]

    config["model"]["checkpoint"] = str(tmp_path / "whole")
    server = start(config)
    server.wait()
    assert server.status()["artifacts"]["outcome"] == "restored"
    assert server.status()["artifacts"]["identity"] == json.loads(built.stdout)["identity"]
    assert server.stop() == 0


def test_a_miss_names_the_fields_in_status_log_check_and_inspect(
    start: Start, tiny_config: JSON, tmp_path: Path
) -> None:
    tiny_config["device"] = {"threads": 1}
    tiny_config["compile"]["on_miss"] = "fail"
    tiny_config["startup"]["on_failure"] = "stay"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny_config))
    store = Path(tiny_config["compile"]["artifacts"])
    artifact = next(path for path in store.iterdir() if (path / "manifest.json").exists())
    threads = json.loads((artifact / "manifest.json").read_bytes())["identity"]["device"]["threads"]
    told = f"threads {threads} → 1"

    checked = json.loads(command("check", "--config", str(file), "--json").stdout)
    assert checked["artifact"]["differences"] == [told]

    plain = command("inspect", str(artifact), "--json")
    compared = command("inspect", str(artifact), "--config", str(file), "--json")
    assert (plain.returncode, json.loads(plain.stdout)["here"]["differences"]) == (0, [])
    assert (compared.returncode, json.loads(compared.stdout)["here"]["differences"]) == (0, [told])
    listed = command("inspect", str(store), "--config", str(file))
    assert listed.returncode == 0
    assert f"no: {told}" in listed.stdout

    server = start(tiny_config)
    server.wait("/healthz", 503)
    assert server.status()["artifacts"]["differences"] == [told]
    key = server.status()["artifacts"]["identity"].removeprefix("sha256:")[:12]
    assert [e["event"] for e in server.events() if e.get("logger") == "warmgate.artifacts"] == [
        f"artifact {key} missed: {told}"
    ]
