"""Tensors that a module keeps as plain attributes, in lists, tuples and mappings: neither parameters nor buffers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# A module's name, an attribute of it, the way from there through lists, tuples and mappings, and what lies there.
Place = tuple[str, str, tuple[Any, ...], torch.Tensor]
_OWN_NAMES = frozenset(nn.Module().__dict__)
_DEPTH = 4


def plain_tensors(module: nn.Module) -> Iterator[Place]:
    """Yield the tensors in plain attributes, up to four containers deep."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            if name not in _OWN_NAMES:
                yield from ((prefix, name, path, tensor) for path, tensor in _inside(value, _DEPTH))


def _inside(value: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield (), value
    elif depth and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from (((key, *path), tensor) for path, tensor in _inside(item, depth - 1))


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return what lies at the end of a way through containers."""
    for key in path:
        value = value[key]
    return value


def put_attribute(part: nn.Module, name: str, path: tuple[Any, ...], new: Any) -> None:
    """Replace a tensor in a plain attribute. It stays one: `setattr` would register a parameter."""
    vars(part)[name] = replaced(vars(part)[name], path, new)


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a container with one item replaced: itself where it can be changed, else one of its kind."""
    if not path:
        return new
    key, *rest = path
    item = replaced(value[key], tuple(rest), new)
    if not isinstance(value, tuple):
        value[key] = item
        return value
    items = (*value[:key], item, *value[key + 1 :])
    return type(value)._make(items) if hasattr(value, "_make") else items
