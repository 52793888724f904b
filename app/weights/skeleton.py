"""Build the module on the meta device: shapes without data, then the ordinary values of what no checkpoint holds."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from app.errors import SettingsError
from app.settings import Model
from app.weights import Skeleton
from app.weights.aliases import find_aliases, repoint
from app.weights.attributes import plain_tensors
from app.weights.dtypes import name_of
from app.weights.factory import Factory, call_factory, cast_floats, construct_with_data, drop_parameters, find_factory
from app.weights.layout import EXTRA_STATE
from app.weights.ordinary import forget, ordinary_values, unstored
from app.weights.plan import ModelTable, ModelTensor
from app.weights.randomness import random_states_kept


def build_skeleton(model: Model, methods: Iterable[str] = ()) -> Skeleton:
    """Call the factory on the meta device; buffers and plain tensor attributes get their ordinary values.

    A constructor that looks at data cannot run there: it is run on the CPU, and the skeleton says so and why. Raises
    SettingsError when the factory cannot be found, raises, returns something else than a module, one that lacks one of
    the methods to be served, or makes values that no checkpoint holds at random.
    """
    factory = find_factory(model.factory)
    with random_states_kept():
        skeleton = _build(factory, model)
    _check_methods(skeleton.module, model.factory, methods)
    return skeleton


def _check_methods(module: nn.Module, factory: str, methods: Iterable[str]) -> None:
    kind = type(module)
    for name in methods:
        if not callable(getattr(module, name, None)):
            own = [one for one in vars(kind) if not one.startswith("_") and callable(getattr(kind, one))]
            raise SettingsError(
                f"paths.{name}: {kind.__name__}, which model.factory {factory} makes, has no such method; "
                f"it has {', '.join(own) or 'none of its own'}"
            )


def _build(factory: Factory, model: Model) -> Skeleton:
    construction = ""
    try:
        with torch.device("meta"):
            module = call_factory(factory, model)
    except SettingsError as error:
        module, construction = construct_with_data(factory, model), f"built with data, since on the meta device {error}"
    aliases = find_aliases(module)
    cast_floats(module, model)
    module.eval().requires_grad_(False)
    table = describe(module)
    waived = frozenset(t.name for t in table.tensors if t.stored and model.waive.allows_missing(t.name))
    if construction:
        drop_parameters(module)
        forget(module, aliases)
    if wanted := unstored(module, waived, aliases):
        for one, value in ordinary_values(factory, model, wanted).items():
            one.put(module, value)
    repoint(module, aliases)
    attributes = tuple(dict.fromkeys(one.name for one in wanted if one.kind == "attribute"))
    return Skeleton(module, table, construction, attributes, aliases)


def describe(module: nn.Module) -> ModelTable:
    """Return names, dtypes, shapes and ties of everything in a module that has data."""
    stored = _persistent_names(module)
    groups: dict[int, list[str]] = {}
    tensors = []
    for name, tensor in named_tensors(module):
        groups.setdefault(id(tensor), []).append(name)
        shape, stride = tuple(tensor.shape), strides_of(tensor)
        tensors.append(ModelTensor(name, name_of(tensor.dtype), shape, stride, name in stored, tensor.nbytes))
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


def meta_left(module: nn.Module) -> tuple[str, ...]:
    """Return the names of everything in a module that still has no data."""
    named = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    plain = [_joined(prefix, name) for prefix, name, _, tensor in plain_tensors(module) if tensor.is_meta]
    return (*named, *plain)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
