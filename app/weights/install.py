"""Install tensors into the skeleton by assignment, or bind them by name where no module is needed."""

import mmap
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch

from app.checkpoints import Checkpoint, TensorEntry
from app.errors import CheckpointError
from app.weights import LoadedModel, Skeleton
from app.weights.aliases import repoint
from app.weights.assigning import assign, tie
from app.weights.dtypes import TORCH, same_bits
from app.weights.layout import Place
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
    copied += assign(module, values, checkpoint.versions)
    tie(module, table, values)
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
