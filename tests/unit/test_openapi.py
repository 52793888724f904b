"""The description of the API: complete, well-formed, without a word about the example, and the same as its copy."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI

from app.http.openapi import document

ROOT = Path(__file__).resolve().parents[2]
GUARDED, OPEN = document(guarded=True), document(guarded=False)

# What the application serves, and whether that alone makes the description; in a process of its own, since making the
# application starts a device thread.
ROUTES = """
import json, sys
from pathlib import Path
from app import configure, process_clock, server, sidecar
from app.console import JsonConsole
from app.http.openapi import document
one = sidecar.Sidecar(
    configure.load(Path(sys.argv[1])), process_clock.ProcessClock(), JsonConsole(), lambda *_: None, lambda *_: None
)
made = server.create_app(one, server.inferences_of(one))
served = {path: sorted(methods) for path, methods in made.openapi()["paths"].items()}
print(json.dumps([served, document.cache_info().currsize]))
"""


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in described["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def test_every_path_and_method_is_described_and_only_those_and_not_before_it_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUTES, ROOT / "examples/minilm.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    served, built = json.loads(done.stdout)
    assert built == 0
    assert {path: sorted(methods) for path, methods in GUARDED["paths"].items()} == served


def test_the_committed_copy_is_what_is_served() -> None:
    copy = json.loads((ROOT / "deploy/openapi.json").read_text())
    assert copy == json.loads(json.dumps(GUARDED)), "make openapi writes it anew"


@pytest.mark.parametrize("described", [GUARDED, OPEN], ids=["guarded", "open"])
def test_it_is_openapi(described: dict[str, Any]) -> None:
    OpenAPI.model_validate(described)


def test_every_reference_stays_inside_and_leads_somewhere() -> None:
    found = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(GUARDED)))
    assert found == {f"#/components/schemas/{name}" for name in GUARDED["components"]["schemas"]}


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations(GUARDED)]
    assert len(set(names)) == len(names)


def test_all_of_the_protocol_but_its_probes_asks_for_the_key() -> None:
    guarded = {path for path, _, operation in operations(GUARDED) if "security" in operation}
    assert guarded == {path for path in GUARDED["paths"] if re.match(r"/v2(/models.*|/repository.*)?$", path)}
    assert all(("401" in one["responses"]) == ("security" in one) for _, _, one in operations(GUARDED))
    assert "401" not in json.dumps(OPEN)
    assert "securitySchemes" not in OPEN["components"]


def test_every_refusal_says_when_to_come_back_and_why() -> None:
    refusals = [one["responses"]["503"] for _, method, one in operations(GUARDED) if "503" in one["responses"]]
    assert refusals
    assert all(refusal["headers"]["Retry-After"]["required"] for refusal in refusals)


def test_nothing_of_the_example_is_in_it() -> None:
    assert not re.findall("minilm|input_ids|attention_mask|embedding|384", json.dumps(GUARDED), re.IGNORECASE)
