"""Read the configuration: one YAML file, the environment and `--set`, and tell all problems together."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource
from pydantic_settings import SettingsError as PydanticSettingsError

from app.contradictions import contradictions
from app.errors import SettingsError
from app.settings import Settings
from app.validation import nearest, parse_yaml, problems_of, read_text

# What Kubernetes puts into every pod beside a Service that is named warmgate or warmgate-…: not for us.
SERVICE_LINK = re.compile(r"WARMGATE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def load(file: Path, assignments: Sequence[str] = ()) -> Settings:
    """Read file, environment and `--set` (the later wins); raises SettingsError that names every problem at once."""
    problems: list[str] = []
    merged = _merge(_merge(_read(file), _environment(problems)), _assigned(assignments, problems))
    try:
        settings = Settings(**{str(name): value for name, value in merged.items()})
    except ValidationError as error:
        problems += problems_of(error, Settings)
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems) from None
    problems += contradictions(settings)
    if problems:
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems)
    return settings


def _read(file: Path) -> dict[str, Any]:
    found = parse_yaml(file, read_text(file, "give a YAML file with --config"))
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
            problems.append(f"{variable} names no field{nearest(section, known)}")
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
