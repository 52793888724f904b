"""The README's tables are compared with the program: a field, code, path or dependency cannot be forgotten."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from app import errors
from app.contradictions import NOT_YET
from app.http.openapi import document
from app.settings import Settings, Tensor
from app.stages import STARTUP

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """Return the rows of a section's table: first column → the rest."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and not set(line) <= set("|- "):
            found[cells[0]] = " | ".join(cells[1:])
    return found


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", default
            _, held = get_args(inner) if get_origin(inner) is dict else (None, None)
            if isinstance(held, type) and issubclass(held, BaseModel):
                yield from fields(held, f"{prefix}{name}.*.")


FIELDS = dict(fields(Settings))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_stands_in_the_table_with_its_default(name: str) -> None:
    default = FIELDS[name]
    shown = "required" if default is PydanticUndefined else f"`{_yaml(default)}`"
    assert rows("Configuration")[f"`{name}`"].startswith(f"{shown} | ")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_of_the_configuration_names_nothing_else() -> None:
    inside = {f"`inputs[].{name}`" for name in Tensor.model_fields}
    assert set(rows("Configuration")) - {"field"} == {f"`{name}`" for name in FIELDS} | inside


@pytest.mark.parametrize("name", [name for name, allowed in NOT_YET.items() if len(allowed) == 1])
def test_what_is_refused_is_marked_as_later(name: str) -> None:
    assert "later" in rows("Configuration")[f"`{name}`"]


def test_every_exit_code_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.WarmgateError)}
    assert {int(code) for code in rows("Exit codes") if code != "code"} == codes | {0}


def test_every_stage_is_explained() -> None:
    assert set(rows("How a start runs")) - {"stage"} == {f"`{one.name}`" for one in STARTUP.stages}


def test_every_path_is_in_the_table() -> None:
    listed = {path for row in rows("Endpoints") for path in re.findall(r"`([^`]+)`", row)}
    assert set(document(guarded=True)["paths"]) == listed


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]}
    assert set(rows("Dependencies")) - {"package"} == names
    for dependency in project["optional-dependencies"]["dev"]:
        assert f"`{dependency}`" in README


def test_every_dependency_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert {re.split(r"[<>=[]", dependency)[0].lower() for dependency in wanted} <= pinned
