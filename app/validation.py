"""What files that people write have in common: strict YAML, problems told as field, value and what is allowed."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from app.errors import SettingsError


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice instead of taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def read_text(file: Path, remedy: str) -> str:
    """Return the text of a file; raises SettingsError that ends with the remedy."""
    try:
        return file.read_text()
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    except ValueError as error:  # bytes that are no text, or a path with a zero in it
        raise SettingsError(f"{file} is not text: {error}") from error


def parse_yaml(file: Path, text: str) -> Any:
    """Return what YAML means; raises SettingsError that names the file and the place."""
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - derived from SafeLoader
    # Values that look like dates or numbers and are none, and lists within lists without end, are no YAMLError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from error


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return every problem as one line: field, value, what is allowed."""
    return [_describe(row["type"], row["loc"], row["msg"], row["input"], model) for row in error.errors()]


def _describe(kind: str, location: tuple[str | int, ...], message: str, value: object, model: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"{field} is not set"
    if kind == "extra_forbidden":
        return f"{field} is no field{nearest(str(location[-1]), _fields_at(location[:-1], model))}"
    shown = repr(value)
    allowed = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{field} = {shown if len(shown) < 80 else shown[:77] + '...'}: {allowed}"


def _fields_at(location: tuple[str | int, ...], outermost: type[BaseModel]) -> set[str]:
    model: Any = outermost
    for part in location:
        annotation = (
            model.model_fields[part].annotation
            if hasattr(model, "model_fields") and part in model.model_fields
            else model
        )
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else annotation
    return set(model.model_fields) if hasattr(model, "model_fields") else set()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}" if names else ""
