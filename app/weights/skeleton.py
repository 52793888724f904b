"""Build the module on the meta device: shapes without data, then the ordinary values of what no checkpoint holds."""

from collections.abc import Iterator

import torch
from torch import nn

from app.errors import SettingsError
from app.settings import Model
from app.weights import Skeleton
from app.weights.attributes import replaced, tensors_on_meta, value_at
from app.weights.dtypes import name_of
from app.weights.factory import (
    call_factory,
    construct_ordinarily,
    construct_with_data,
    drop_parameters,
    find_factory,
)
from app.weights.layout import EXTRA_STATE
from app.weights.plan import ModelTable, ModelTensor


def build_skeleton(model: Model) -> Skeleton:
    """Call the factory on the meta device; buffers and plain tensor attributes keep their ordinary values.

    A constructor that looks at data cannot run there: it is run on the CPU, and the skeleton says so and why. Raises
    SettingsError when the factory cannot be found, raises, or returns something else than a module.
    """
    factory = find_factory(model.factory)
    construction = ""
    try:
        with torch.device("meta"):
            module = call_factory(factory, model)
    except SettingsError as error:
        module, construction = construct_with_data(factory, model), f"built with data, since on the meta device {error}"
    module.eval().requires_grad_(False)
    table = describe(module)
    waived = frozenset(t.name for t in table.tensors if t.stored and model.waive.allows_missing(t.name))
    attributes = tuple(_joined(prefix, name) for prefix, name, _ in tensors_on_meta(module))
    if construction:
        if _unstored(module):
            _adopt_values(module, construct_ordinarily(factory, model, keep_parameters=True), waived)
        drop_parameters(module, waived)
    elif waived or _unstored(module):
        _adopt_values(module, construct_ordinarily(factory, model, keep_parameters=bool(waived)), waived)
        if _unstored(module):
            # A constructor may compute a buffer where a parameter of its lies, and that was dropped to meta.
            _adopt_values(module, construct_ordinarily(factory, model, keep_parameters=True), waived)
    return Skeleton(module, table, construction, attributes)


def describe(module: nn.Module) -> ModelTable:
    """Return names, dtypes, shapes and ties of everything in a module that has data."""
    stored = _persistent_names(module)
    groups: dict[int, list[str]] = {}
    tensors = []
    for name, tensor in named_tensors(module):
        groups.setdefault(id(tensor), []).append(name)
        tensors.append(
            ModelTensor(name, name_of(tensor.dtype), tuple(tensor.shape), strides_of(tensor), name in stored)
        )
    states = (
        _joined(prefix, EXTRA_STATE)
        for prefix, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    )
    ties = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return ModelTable(tuple(tensors), ties, tuple(states))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that stored values are given; those of an expanded tensor, one element for many, are not."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tuple(torch.empty(tensor.shape, device="meta").stride() if expanded else tensor.stride())


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
    return buffers or any(True for _ in tensors_on_meta(module))


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
    for prefix, name, path in list(tensors_on_meta(module)):
        part = module.get_submodule(prefix)
        setattr(part, name, replaced(getattr(part, name), path, value_at(getattr(parts[prefix], name), path)))


def meta_left(module: nn.Module) -> tuple[str, ...]:
    """Return the names of everything in a module that still has no data."""
    named = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    plain = [_joined(prefix, name) for prefix, name, _ in tensors_on_meta(module)]
    return (*named, *plain)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
