"""Read the configuration: one YAML file, the environment and `--set`, and tell all problems together."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource
from pydantic_settings import SettingsError as PydanticSettingsError

from app.contradictions import contradictions
from app.errors import SettingsError
from app.settings import Settings

# What Kubernetes puts into every pod beside a Service that is named warmgate or warmgate-…: not for us.
SERVICE_LINK = re.compile(r"WARMGATE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def load(file: Path, assignments: Sequence[str] = ()) -> Settings:
    """Read file, environment and `--set` (the later wins); raises SettingsError that names every problem at once."""
    problems: list[str] = []
    merged = _merge(_merge(_read(file), _environment(problems)), _assigned(assignments, problems))
    try:
        settings = Settings(**{str(name): value for name, value in merged.items()})
    except ValidationError as error:
        problems += [_describe(row["type"], row["loc"], row["msg"], row["input"]) for row in error.errors()]
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems) from None
    problems += contradictions(settings)
    if problems:
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems)
    return settings


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice instead of taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.load(file.read_text(), _StrictLoader)  # noqa: S506 - derived from SafeLoader
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}; give a YAML file with --config") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not text: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{file} holds {type(found).__name__}, expected a mapping with model, inputs, outputs …")
    return found


def _environment(problems: list[str]) -> dict[str, Any]:
    """Read WARMGATE_A__B=value; an unknown section is a problem here, an unknown field is found by the model."""
    try:
        found: dict[str, Any] = EnvSettingsSource(Settings, env_parse_none_str="null")()
    except PydanticSettingsError as error:
        problems.append(f"environment: {error}; lists and mappings are given as JSON")
        return {}
    known = {name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        if SERVICE_LINK.fullmatch(variable) and not (variable.endswith("_PORT") and "://" not in os.environ[variable]):
            continue
        section = variable.upper().removeprefix("WARMGATE_").partition("__")[0]
        if variable.upper().startswith("WARMGATE_") and section not in known:
            problems.append(f"{variable} names no field{_nearest(section, known)}")
    return found


def _assigned(assignments: Sequence[str], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.split(".")):
            problems.append(f"--set {assignment}: expected a.b=value")
            continue
        try:
            value: Any = yaml.safe_load(text) if text else None
        except yaml.YAMLError as error:
            problems.append(f"--set {assignment}: not YAML: {' '.join(str(error).split())}")
            continue
        for name in reversed(path.split(".")):
            value = {name: value}
        found = _merge(found, value)
    return found


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _describe(kind: str, location: tuple[str | int, ...], message: str, value: object) -> str:
    """Return one problem as: field, value, what is allowed."""
    field = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"{field} is not set"
    if kind == "extra_forbidden":
        return f"{field} is no field{_nearest(str(location[-1]), _fields_at(location[:-1]))}"
    shown = repr(value)
    allowed = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{field} = {shown if len(shown) < 80 else shown[:77] + '...'}: {allowed}"


def _fields_at(location: tuple[str | int, ...]) -> set[str]:
    model: Any = Settings
    for part in location:
        annotation = (
            model.model_fields[part].annotation
            if hasattr(model, "model_fields") and part in model.model_fields
            else model
        )
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else annotation
    return set(model.model_fields) if hasattr(model, "model_fields") else set()


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}" if known else ""
