"""The API does what its description says: requests drawn from it are sent to a real server, right and wrong ones."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as plain

from app.http.openapi import document
from tests.e2e.harness import Server

JSON = dict[str, Any]
HERE = Path(__file__).parent
# Few and always the same in `make test`; `make fuzz-api` draws others.
EXAMPLES = os.environ.get("WARMGATE_API_EXAMPLES", "8")
SEED = os.environ.get("WARMGATE_API_SEED", "1")
KEY = "secret"
FP32_LARGEST = 3.4028234663852886e38


@pytest.fixture(scope="module", params=["open", "guarded"])
def server(request: pytest.FixtureRequest, tiny: JSON, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    config = {**tiny, "serving": {"max_body_bytes": 65536}}
    if request.param == "guarded":
        (directory / "key").write_text(KEY)
        config["http"] = {**tiny["http"], "api_key_file": str(directory / "key")}
    with Server(directory, config) as running:
        running.wait()
        yield running


def guarded(server: Server) -> bool:
    return "api_key_file" in json.loads(server.config.read_text())["http"]


def fitted(described: JSON) -> JSON:
    """Return the description with requests that fit the tiny model, which the description itself cannot know."""
    made = copy.deepcopy(described)
    schemas = made["components"]["schemas"]
    values = {"type": "number", "minimum": -FP32_LARGEST, "maximum": FP32_LARGEST}
    tensor = schemas["RequestInput"]
    tensor["required"] = ["name", "shape", "datatype", "data"]
    tensor["properties"] |= {
        "name": {"const": "x"},
        "shape": {"const": [1, 16]},
        "datatype": {"const": "FP32"},
        "data": {"type": "array", "items": values, "minItems": 16, "maxItems": 16},
    }
    request = schemas["InferenceRequest"]["properties"]
    request["inputs"] |= {"minItems": 1, "maxItems": 1}
    parameters = request["parameters"]["properties"]
    parameters["path"] = {"const": "forward"}
    parameters["timeout"]["minimum"] = 10_000_000  # less may be answered with 504, as it should be
    # Raw bytes cannot be drawn so that they fit; tests/e2e/test_clients.py sends them.
    tensor["properties"]["parameters"] = {"type": "object"}
    for path, item in made["paths"].items():
        if path.endswith("/infer"):
            del item["post"]["requestBody"]["content"]["application/octet-stream"]
            parameters = item["post"]["parameters"]
            item["post"]["parameters"] = [one for one in parameters if one["in"] != "header"]
    schemas["RequestOutput"]["properties"]["name"] = {"const": "y"}
    return made


def test_what_is_served_is_what_is_described(server: Server) -> None:
    status, body, headers = server.get("/openapi.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(json.dumps(document(guarded(server))))


def test_requests_drawn_from_the_description_are_answered_as_it_says(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(fitted(json.loads(server.get("/openapi.json")[1]))))
    options = ["--header", f"X-API-Key:{KEY}"] if guarded(server) else []
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("schemathesis"), "--config-file", HERE / "schemathesis.toml", "run", file),
            *("--url", f"http://127.0.0.1:{server.port}", "--max-examples", EXAMPLES, "--seed", SEED, *options),
            *("--continue-on-failure", "--generation-database", "none", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [event for event in server.events() if event.get("level") == "error"]
    # Right requests, wrong ones and, where there is a key, such without it have all reached inference.
    reached = answered(server)
    assert all(reached[code] for code in ("200", "400", "404")), reached
    assert bool(reached["401"]) == guarded(server)


def answered(server: Server) -> dict[str, float]:
    families = {family.name: family for family in plain(server.get("/metrics")[1].decode())}
    return {sample.labels["code"]: sample.value for sample in families["warmgate_requests"].samples}
