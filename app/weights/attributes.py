"""Tensors that a module keeps as plain attributes, in lists, tuples and mappings: neither parameters nor buffers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# A module's name, an attribute of it, and the way from there to a tensor through lists, tuples and mappings.
Place = tuple[str, str, tuple[Any, ...]]
_OWN_NAMES = frozenset(nn.Module().__dict__)
_DEPTH = 4


def tensors_on_meta(module: nn.Module) -> Iterator[Place]:
    """Yield where plain tensor attributes on meta are."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            if name not in _OWN_NAMES:
                yield from ((prefix, name, path) for path in _paths(value, _DEPTH))


def _paths(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, torch.Tensor):
        yield from [()] if value.is_meta else []
    elif depth and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((key, *path) for path in _paths(item, depth - 1))


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return what lies at the end of a way through containers."""
    for key in path:
        value = value[key]
    return value


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
