"""Build the module on the meta device: shapes without data, then the ordinary values of what no checkpoint holds."""

import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from app.dtypes import FLOATING
from app.errors import SettingsError, WarmgateError
from app.settings import Model
from app.weights import Skeleton
from app.weights.dtypes import TORCH, name_of
from app.weights.plan import EXTRA_STATE, ModelTable, ModelTensor

Factory = Callable[..., nn.Module]


def build_skeleton(model: Model) -> Skeleton:
    """Call the factory on the meta device; buffers and plain tensor attributes keep their ordinary values.

    A constructor that looks at data cannot run there: it is run on the CPU, and the skeleton says so and why. Raises
    SettingsError when the factory cannot be found, raises, or returns something else than a module.
    """
    factory = _find(model.factory)
    construction = ""
    try:
        with torch.device("meta"):
            module = _call(factory, model)
    except SettingsError as error:
        module, construction = _with_data(factory, model), f"built with data, since on the meta device {error}"
    module.eval().requires_grad_(False)
    table = describe(module)
    waived = frozenset(t.name for t in table.tensors if t.stored and model.waive.allows_missing(t.name))
    attributes = tuple(_joined(prefix, name) for prefix, name, _ in _attributes(module))
    if construction:
        _drop_parameters(module, waived)
    elif waived or _unstored(module):
        _adopt_values(module, _ordinary(factory, model, keep_parameters=bool(waived)), waived)
        if _unstored(module):
            # A constructor may compute a buffer where a parameter of its lies, and that was dropped to meta.
            _adopt_values(module, _ordinary(factory, model, keep_parameters=True), waived)
    return Skeleton(module, table, construction, attributes)


def describe(module: nn.Module) -> ModelTable:
    """Return names, dtypes, shapes and ties of everything in a module that has data."""
    stored = _persistent_names(module)
    groups: dict[int, list[str]] = {}
    tensors = []
    for name, tensor in named_tensors(module):
        groups.setdefault(id(tensor), []).append(name)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        tensors.append(ModelTensor(name, name_of(tensor.dtype), shape, stride, name in stored))
    states = (
        _joined(prefix, EXTRA_STATE)
        for prefix, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    )
    ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return ModelTable(tuple(tensors), ties, tuple(states))


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
    return _cast(module, TORCH[model.cast]) if model.cast else module


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give every floating-point parameter and buffer the configured dtype; ties stay ties."""
    return module._apply(lambda tensor: tensor.to(dtype) if name_of(tensor.dtype) in FLOATING else tensor)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer under every one of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _persistent_names(module: nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = [*part._parameters, *(n for n in part._buffers if n not in part._non_persistent_buffers_set)]
        names.update(_joined(prefix, name) for name in own)
    return frozenset(names)


def _unstored(module: nn.Module) -> bool:
    """Something in the module has data that no checkpoint brings: a buffer or a plain tensor attribute on meta."""
    buffers = any(buffer.is_meta for buffer in module.buffers())
    return buffers or any(True for _ in _attributes(module))


def _ordinary(factory: Factory, model: Model, keep_parameters: bool) -> nn.Module:
    """Construct the module with real buffers; each parameter is dropped to meta as it is registered.

    The largest parameter is allocated for a moment but its pages are not touched unless the constructor writes them
    before it registers them. Parameters are kept only where the configuration lets some be missing.
    """
    with nullcontext() if keep_parameters else _parameters_on_meta(), torch.device("cpu"):
        return _call(factory, model)


def _with_data(factory: Factory, model: Model) -> nn.Module:
    """Construct the module on the CPU: without its parameters' data where the constructor can do without them."""
    if not model.waive.missing:
        with suppress(SettingsError):
            return _ordinary(factory, model, keep_parameters=False)
    return _ordinary(factory, model, keep_parameters=True)


def _drop_parameters(module: nn.Module, kept: frozenset[str]) -> None:
    """Move parameters to meta; those that are one object stay one."""
    dropped: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta and _joined(prefix, name) not in kept:
                part._parameters[name] = dropped.setdefault(id(parameter), _on_meta_device(parameter))


def _on_meta_device(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register, mine = nn.Module.register_parameter, threading.get_ident()
    # A parameter that is registered twice is a tie: both get the same stand-in. Weak, or all data would be kept.
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        known = seen.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = seen[id(parameter)] = (weakref.ref(parameter), _on_meta_device(parameter))
        return known[1]

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        here = param is not None and not param.is_meta and threading.get_ident() == mine
        register(self, name, stand_in(param) if here and param is not None else param)

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
            if parameter is not None and _joined(prefix, name) in waived:
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


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


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
    named = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    plain = [_joined(prefix, name) for prefix, name, _ in _attributes(module)]
    return (*named, *plain)
