"""Give tensors to the modules that own them: by assignment, or by a module's own way of loading."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from app.errors import CheckpointError
from app.weights.dtypes import same_bits
from app.weights.layout import EXTRA_STATE
from app.weights.plan import ModelTable


def assign(module: nn.Module, values: Mapping[str, Any], versions: Mapping[str, int]) -> int:
    """Give every module its own tensors and state, by assignment.

    `load_state_dict` of the whole module looks through all names for every child: ten thousand tensors in five thousand
    layers take it eight seconds. So only what has its own way of loading is loaded by it, children and all, and the
    rest is assigned. `versions`: of the modules' formats, where the file says them. Returns the bytes that were copied
    for it; raises CheckpointError.
    """
    kept = {id(one): vars(one) for one in module.parameters() if vars(one)}
    before = dict(module.named_parameters(remove_duplicate=False)) if kept else {}
    parts = dict(module.named_modules(remove_duplicate=False))
    special = {prefix for prefix, part in parts.items() if not _loads_as_all_do(part, prefix, values)}
    given: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        prefix, _, attribute = name.rpartition(".")
        loader = next((outer for outer in _outwards(prefix) if outer in special), None)
        if loader is None:
            _set_tensor(parts[prefix], attribute, value)
        else:
            given.setdefault(loader, {})[name.removeprefix(f"{loader}." if loader else "")] = value
    copied = 0
    for prefix in sorted(special):
        if not any(outer in special for outer in _outwards(prefix) if outer != prefix):
            own, size = _writable(parts[prefix], given.get(prefix, {}))
            _load(parts[prefix], prefix, own, versions)
            copied += size
    for name, parameter in before.items():
        # Attributes that a constructor has put on a parameter (scales, shard axes) belong to the new one too.
        module.get_parameter(name).__dict__.update(kept.get(id(parameter), {}))
    return copied


def _writable(part: nn.Module, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Copy what code that is not torch's own may write to while it loads: the memory of weights is read-only."""
    foreign = any(
        one._load_state_dict_pre_hooks
        or one._load_state_dict_post_hooks
        or not type(one)._load_from_state_dict.__module__.startswith("torch.")
        for one in part.modules()
    )
    if not foreign:
        return given, 0
    own = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return own, sum(value.nbytes for value in own.values() if isinstance(value, torch.Tensor))


def _outwards(prefix: str) -> Iterator[str]:
    """Yield the module itself among those that contain it, the outermost first."""
    yield ""
    for position, char in enumerate(prefix):
        if char == ".":
            yield prefix[:position]
    if prefix:
        yield prefix


def _loads_as_all_do(part: nn.Module, prefix: str, values: Mapping[str, Any]) -> bool:
    methods = ("_load_from_state_dict", "__setattr__")
    plain = all(getattr(type(part), name) is getattr(nn.Module, name) for name in methods)
    state = (f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE) in values
    return plain and not state and not part._load_state_dict_pre_hooks and not part._load_state_dict_post_hooks


def _set_tensor(part: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in part._parameters:
        part._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        part._buffers[name] = tensor


def _load(part: nn.Module, prefix: str, given: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    state: OrderedDict[str, Any] = OrderedDict(given)
    inside = f"{prefix}." if prefix else ""
    # Without a version, a module that has changed its format takes the file for one of its oldest. Where the file does
    # not say it, it is today's: the plan has found the names and shapes of that.
    state._metadata = {  # type: ignore[attr-defined]
        name: {"version": versions.get((inside + name).rstrip("."), one._version)}
        for name, one in part.named_modules(remove_duplicate=False)
    }
    where = prefix or "the module"
    try:
        # Not strict: what the constructor rebuilt is not given.
        left = nn.Module.load_state_dict(part, state, strict=False, assign=True).unexpected_keys
    except Exception as error:
        raise CheckpointError(f"{where} could not load its state: {type(error).__name__}: {error}") from error
    if left:
        raise CheckpointError(f"{where} did not take {', '.join(left)}, though it has named them itself")


def tie(module: nn.Module, table: ModelTable, given: Mapping[str, torch.Tensor]) -> None:
    """Make tied names one object again: assignment gave each of them its own."""
    for group in table.ties:
        loaded = {name: _tensor_of(module, name) for name in group if name in given}
        changed = any(tensor.data_ptr() != given[name].data_ptr() for name, tensor in loaded.items())
        if changed and not all(same_bits(tensor, next(iter(loaded.values()))) for tensor in loaded.values()):
            raise CheckpointError(f"{', '.join(group)} are one tensor, and loading has changed one of its names alone")
        owner, _, attribute = next((name for name in group if name in given), group[0]).rpartition(".")
        first = module.get_submodule(owner)
        kept = first._parameters.get(attribute, first._buffers.get(attribute))
        for name in group:
            owner, _, attribute = name.rpartition(".")
            part = module.get_submodule(owner)
            home = part._parameters if attribute in part._parameters else part._buffers
            home[attribute] = kept


def _tensor_of(module: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), attribute)
    return found
