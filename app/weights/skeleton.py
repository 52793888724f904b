"""Build the module on the meta device: shapes without data, then the ordinary values of what no checkpoint holds."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from app.errors import SettingsError, WarmgateError
from app.settings import Model
from app.weights import Skeleton
from app.weights.dtypes import name_of
from app.weights.plan import ModelTable, ModelTensor

Factory = Callable[..., nn.Module]


def build_skeleton(model: Model) -> Skeleton:
    """Call the factory on the meta device; buffers and plain tensor attributes keep their ordinary values.

    Raises SettingsError when the factory cannot be found, raises, or returns something else than a module.
    """
    factory = _find(model.factory)
    with torch.device("meta"):
        module = _call(factory, model)
    module.eval().requires_grad_(False)
    table = describe(module)
    waived = frozenset(t.name for t in table.tensors if t.stored and model.waive.allows_missing(t.name))
    if waived or _unstored(module):
        _adopt_values(module, _ordinary(factory, model, keep_parameters=bool(waived)), waived)
    return Skeleton(module, table)


def describe(module: nn.Module) -> ModelTable:
    """Return names, dtypes, shapes and ties of everything in a module that has data."""
    stored = _persistent_names(module)
    groups: dict[int, list[str]] = {}
    tensors = []
    for name, tensor in _named(module):
        groups.setdefault(id(tensor), []).append(name)
        tensors.append(ModelTensor(name, name_of(tensor.dtype), tuple(tensor.shape), name in stored))
    return ModelTable(tuple(tensors), tuple(tuple(names) for names in groups.values() if len(names) > 1))


def _find(factory: str) -> Factory:
    module_name, _, path = factory.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"model.factory = {factory!r} cannot be imported ({error}); is its package installed and on PYTHONPATH?"
        ) from error
    return found  # type: ignore[no-any-return]


def _call(factory: Factory, model: Model) -> nn.Module:
    try:
        module = factory(**model.kwargs)
    except WarmgateError:
        raise
    except Exception as error:
        raise SettingsError(f"model.factory {model.factory} raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise SettingsError(f"model.factory {model.factory} returned {type(module).__name__}, expected an nn.Module")
    return module


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _persistent_names(module: nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = [*part._parameters, *(n for n in part._buffers if n not in part._non_persistent_buffers_set)]
        names.update(f"{prefix}.{name}" if prefix else name for name in own)
    return frozenset(names)


def _unstored(module: nn.Module) -> bool:
    """Something in the module has data that no checkpoint brings: a buffer or a plain tensor attribute on meta."""
    buffers = any(buffer.is_meta for buffer in module.buffers())
    return buffers or any(True for _ in _attributes(module))


def _ordinary(factory: Factory, model: Model, keep_parameters: bool) -> nn.Module:
    """Construct the module once more with real buffers; each parameter is dropped to meta as it is registered.

    The largest parameter is allocated for a moment but its pages are not touched unless the constructor writes them
    before it registers them. Parameters are kept only where the configuration lets some be missing.
    """
    with nullcontext() if keep_parameters else _parameters_on_meta(), torch.device("cpu"):
        return _call(factory, model)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register, mine = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == mine:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _adopt_values(module: nn.Module, ordinary: nn.Module, waived: frozenset[str]) -> None:
    parts = dict(ordinary.named_modules(remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        twin = parts[prefix]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = twin._buffers[name]
        for name, parameter in twin._parameters.items():
            if parameter is not None and (f"{prefix}.{name}" if prefix else name) in waived:
                part._parameters[name] = parameter.requires_grad_(False)
    for place in list(_attributes(module)):
        prefix, name, key = place
        _set(module.get_submodule(prefix), name, key, _get(parts[prefix], name, key))


Place = tuple[str, str, Any]
_OWN_NAMES = frozenset(nn.Module().__dict__)


def _attributes(module: nn.Module) -> Iterator[Place]:
    """Yield module, name and key of plain tensor attributes on meta; lists, tuples and mappings one level deep."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            if name not in _OWN_NAMES:
                yield from ((prefix, name, key) for key, item in _items(value) if _on_meta(item))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        yield None, value


def _on_meta(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_meta


def _get(part: nn.Module, name: str, key: Any) -> Any:
    value = getattr(part, name)
    return value if key is None else value[key]


def _set(part: nn.Module, name: str, key: Any, value: Any) -> None:
    held = getattr(part, name)
    if key is None:
        setattr(part, name, value)
    elif isinstance(held, tuple):
        setattr(part, name, (*held[:key], value, *held[key + 1 :]))
    else:
        held[key] = value


def meta_left(module: nn.Module) -> tuple[str, ...]:
    """Return the names of everything in a module that still has no data."""
    named = [name for name, tensor in _named(module) if tensor.is_meta]
    plain = [f"{prefix}.{name}" if prefix else name for prefix, name, _ in _attributes(module)]
    return (*named, *plain)
