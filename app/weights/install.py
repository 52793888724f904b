"""Install tensors into the skeleton by assignment, or bind them by name where no module is needed."""

import mmap
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn

from app.checkpoints import Checkpoint, TensorEntry
from app.errors import CheckpointError
from app.weights import LoadedModel, Skeleton
from app.weights.aliases import repoint
from app.weights.dtypes import TORCH, same_bits
from app.weights.layout import EXTRA_STATE, Place
from app.weights.memory import Memory
from app.weights.plan import ModelTable, ModelTensor, WeightsPlan
from app.weights.skeleton import meta_left, named_tensors

# Buffers up to this size are copied: a forward that counts in one must be told so, where writing to the read-only
# memory of weights would end the process. Larger ones are weights themselves (GPTQ, AWQ) and not doubled.
COUNTER = 1 << 20


def install(skeleton: Skeleton, checkpoint: Checkpoint, memory: Memory, plan: WeightsPlan) -> LoadedModel:
    """Assign every tensor into the module, keep ties, prove that nothing is left on meta.

    The plan is complete before this is called, so nothing can be half installed. Raises CheckpointError.
    """
    module, table = skeleton.module, skeleton.table
    check_ties(table, checkpoint, memory)
    stored, copied = stored_tensors(table, checkpoint, memory, plan)
    wanted = {tensor.name: tensor for tensor in table.tensors}
    values: dict[str, Any] = {name: tensor for name, tensor in stored.items() if wanted[name].stored}
    buffers = values.keys() & dict(module.named_buffers(remove_duplicate=False)).keys()
    counters = {name for name in buffers if values[name].nbytes <= COUNTER}
    for name in counters:
        values[name] = values[name].clone()
        copied += values[name].nbytes
    values |= {name: _state(checkpoint, memory, name) for name in plan.extra_state}
    _assign(module, values, checkpoint.versions)
    _tie(module, table, values)
    repoint(module, skeleton.aliases)
    if left := meta_left(module):
        raise CheckpointError(
            f"{len(left)} tensor(s) of the module have no data after loading: {', '.join(left[:10])}; "
            f"the checkpoint does not hold them and an ordinary construction did not give them values"
        )
    if trained := [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
        raise CheckpointError(f"loading made {', '.join(trained[:10])} require gradients; weights that serve never do")
    tensors = {name: tensor.detach() for name, tensor in named_tensors(module)}
    rebuilt = _bytes(tensors[name] for name in plan.rebuilt)
    return LoadedModel(tensors, plan, table, module, copied, rebuilt, 0, frozenset(buffers - counters))


def bind(
    table: ModelTable, constants: Mapping[str, torch.Tensor], checkpoint: Checkpoint, memory: Memory, plan: WeightsPlan
) -> LoadedModel:
    """Give every name of the table its tensor without building the module; raises CheckpointError.

    `constants`: the values that travel with the artifact because no checkpoint holds them.
    """
    check_ties(table, checkpoint, memory)
    stored, copied = stored_tensors(table, checkpoint, memory, plan)
    if lacking := [name for name in plan.rebuilt if name not in constants]:
        raise CheckpointError(f"neither checkpoint nor artifact holds {', '.join(lacking)}; build the artifact anew")
    rebuilt = _bytes(constants[name] for name in plan.rebuilt)
    others = _bytes(constants.values()) - rebuilt
    return LoadedModel({**constants, **stored}, plan, table, None, copied, rebuilt, others)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count what is one piece of memory once."""
    return sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors}.values())


def stored_tensors(
    table: ModelTable, checkpoint: Checkpoint, memory: Memory, plan: WeightsPlan
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the checkpoint's tensors by name in the model, and the bytes that had to be copied.

    A tensor is copied where the model asks for other strides than those of the file (channels last, for one), or where
    it is both stored with strides and cast.
    """
    made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    copied = 0
    for tensor in (one for one in table.tensors if one.name in plan.sources):
        source = plan.sources[tensor.name]
        if (source, tensor.stride) not in made:
            as_stored = _tensor(memory, checkpoint.tensors[source])
            made[source, tensor.stride] = given = _as_wanted(as_stored, tensor)
            copied += 0 if given is as_stored else given.nbytes
        found[tensor.name] = made[source, tensor.stride]
    return found, copied


def check_ties(table: ModelTable, checkpoint: Checkpoint, memory: Memory) -> None:
    """Raise CheckpointError where a file holds several names of one tensor with different values."""
    problems = []
    for group in table.ties:
        entries = [checkpoint.tensors[name] for name in group if name in checkpoint.tensors]
        first = entries[0] if entries else None
        others = [one.name for one in entries if first and not _equal(memory, first, one)]
        if first and others:
            problems.append(
                f"tied: {', '.join(others)} and {first.name} are one tensor in the model, but stored as different; "
                f"let the factory build the module without that tie, or save the checkpoint of a tied one"
            )
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {len(problems)} problem(s)", problems)


def _equal(memory: Memory, one: TensorEntry, other: TensorEntry) -> bool:
    return one.place == other.place or same_bits(_tensor(memory, one), _tensor(memory, other))


def _tensor(memory: Memory, entry: TensorEntry) -> torch.Tensor:
    """Return a view of a stored tensor where it lies."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=TORCH[entry.dtype])
    data, place = memory.find(entry)
    return _view(data, entry, place)


def _view(data: mmap.mmap, entry: TensorEntry, place: Place) -> torch.Tensor:
    _spend_warning()
    dtype = TORCH[place.dtype]
    count = entry.nbytes // dtype.itemsize if place.stride is not None else prod(entry.shape)
    # frombuffer keeps the memoryview, which keeps the mapping: the tensor can never outlive its memory.
    flat = torch.frombuffer(memoryview(data), dtype=dtype, count=count, offset=place.offset)
    return flat.view(entry.shape) if place.stride is None else flat.as_strided(entry.shape, place.stride)


@cache
def _spend_warning() -> None:
    """Torch warns once in a process that a buffer is not writable; here that is meant, since nothing writes weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"0", dtype=torch.uint8)


def _as_wanted(tensor: torch.Tensor, wanted: ModelTensor) -> torch.Tensor:
    """Return the tensor in the dtype and with the strides of the model; the same object where it has them already."""
    dtype = TORCH[wanted.dtype]
    # The stride of an axis of one element is never used.
    strides = zip(tensor.stride(), wanted.stride, wanted.shape, strict=True)
    if tensor.dtype == dtype and (tensor.numel() == 0 or all(a == b or size == 1 for a, b, size in strides)):
        return tensor
    return torch.empty_strided(wanted.shape, wanted.stride, dtype=dtype).copy_(tensor)


def _state(checkpoint: Checkpoint, memory: Memory, name: str) -> Any:
    entry = checkpoint.tensors.get(name)
    return checkpoint.objects[name] if entry is None else _tensor(memory, entry).clone()


def _assign(module: nn.Module, values: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Give every module its own tensors and state, by assignment.

    `load_state_dict` of the whole module looks through all names for every child: ten thousand tensors in five thousand
    layers take it eight seconds. So only what has its own way of loading is loaded by it, children and all, and the
    rest is assigned. `versions`: of the modules' formats, where the file says them. Raises CheckpointError.
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
    for prefix in sorted(special):
        if not any(outer in special for outer in _outwards(prefix) if outer != prefix):
            _load(parts[prefix], prefix, given.get(prefix, {}), versions)
    for name, parameter in before.items():
        # Attributes that a constructor has put on a parameter (scales, shard axes) belong to the new one too.
        module.get_parameter(name).__dict__.update(kept.get(id(parameter), {}))


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


def _tie(module: nn.Module, table: ModelTable, given: Mapping[str, torch.Tensor]) -> None:
    """Make tied names one object again: assignment gave each of them its own."""
    for group in table.ties:
        owner, _, attribute = next((name for name in group if name in given), group[0]).rpartition(".")
        first = module.get_submodule(owner)
        kept = first._parameters.get(attribute, first._buffers.get(attribute))
        for name in group:
            owner, _, attribute = name.rpartition(".")
            part = module.get_submodule(owner)
            home = part._parameters if attribute in part._parameters else part._buffers
            home[attribute] = kept
