"""Install mapped tensors into the skeleton by assignment, or bind them by name where no module is needed."""

import hashlib
import mmap
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from app.checkpoints import Checkpoint, TensorEntry
from app.errors import CheckpointError
from app.weights import LoadedModel, ResidentWeights, Skeleton
from app.weights.dtypes import TORCH
from app.weights.plan import ModelTable, WeightsPlan
from app.weights.skeleton import meta_left


def tensors_of(
    checkpoint: Checkpoint, maps: Sequence[mmap.mmap], plan: WeightsPlan
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the mapped tensors by checkpoint name, and the bytes that had to be copied to be aligned.

    Only what is not aligned to its own element is copied. Aligning further buys nothing on a CPU: MiniLM compiled with
    weights at 0, 8, 16 and 24 modulo 64 runs equally fast within 1 %.
    """
    views = [memoryview(one) for one in maps]
    found: dict[str, torch.Tensor] = {}
    copied = 0
    with warnings.catch_warnings():
        # The mapping is read-only on purpose: nothing writes weights while serving, and a write must not pass unseen.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for source in set(plan.sources.values()):
            entry = checkpoint.tensors[source]
            tensor, moved = _tensor(views[entry.file], entry)
            found[source] = tensor
            copied += moved
    return found, copied


def check_ties(table: ModelTable, checkpoint: Checkpoint, maps: Sequence[mmap.mmap]) -> None:
    """Raise CheckpointError where a file holds several names of one tensor with different values."""
    problems = []
    for group in table.ties:
        entries = [checkpoint.tensors[name] for name in group if name in checkpoint.tensors]
        if len(entries) < 2:
            continue
        parts = {hashlib.sha256(memoryview(maps[e.file])[e.offset : e.offset + e.nbytes]).digest() for e in entries}
        if len(parts) > 1:
            problems.append(
                f"tied: {', '.join(e.name for e in entries)} are one tensor in the model, stored as different"
            )
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {len(problems)} problem(s)", problems)


def _tensor(view: memoryview, entry: TensorEntry) -> tuple[torch.Tensor, int]:
    dtype = TORCH[entry.dtype]
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype), 0
    # frombuffer keeps the memoryview, which keeps the mapping: the tensor can never outlive its memory.
    if entry.offset % dtype.itemsize:
        raw = torch.frombuffer(view, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        return raw.clone().view(dtype).reshape(entry.shape), entry.nbytes
    tensor = torch.frombuffer(view, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset)
    return tensor.reshape(entry.shape), 0


def install(skeleton: Skeleton, checkpoint: Checkpoint, maps: Sequence[mmap.mmap], plan: WeightsPlan) -> LoadedModel:
    """Assign every tensor into the module, keep ties, prove that nothing is left on meta.

    The plan is complete before this is called, so nothing can be half installed. Raises CheckpointError.
    """
    module = skeleton.module
    check_ties(skeleton.table, checkpoint, maps)
    stored, copied = tensors_of(checkpoint, maps, plan)
    wanted = {tensor.name: tensor for tensor in skeleton.table.tensors}
    values = {name: stored[source] for name, source in plan.sources.items() if wanted[name].stored}
    for name in values.keys() & dict(module.named_buffers(remove_duplicate=False)).keys():
        # The mapping is read-only: a forward that counts in a buffer must be told so, not killed by the kernel.
        values[name] = values[name].clone()
    # The stored members only: what the constructor rebuilt is in the module already and is not in `values`.
    module.load_state_dict(values, strict=False, assign=True)
    _tie(module, skeleton.table)
    if left := meta_left(module):
        raise CheckpointError(
            f"{len(left)} tensor(s) of the module have no data after loading: {', '.join(left[:10])}; "
            f"the checkpoint does not hold them and an ordinary construction did not give them values"
        )
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    tensors = {name: tensor.detach() for name, tensor in named.items()}
    return LoadedModel(tensors, plan, skeleton.table, module, copied)


def bind(
    table: ModelTable, constants: Mapping[str, torch.Tensor], resident: ResidentWeights, plan: WeightsPlan
) -> LoadedModel:
    """Give every name of the table its tensor without building the module; raises CheckpointError.

    `constants`: the values that travel with the artifact because no checkpoint holds them.
    """
    check_ties(table, resident.checkpoint, resident.maps)
    stored, copied = tensors_of(resident.checkpoint, resident.maps, plan)
    tensors = {name: stored[source] for name, source in plan.sources.items()}
    lacking = [name for name in plan.rebuilt if name not in constants]
    if lacking:
        raise CheckpointError(f"neither checkpoint nor artifact holds {', '.join(lacking)}; build the artifact anew")
    return LoadedModel({**constants, **tensors}, plan, table, None, copied)


def _tie(module: nn.Module, table: ModelTable) -> None:
    """Make tied names one object again: assignment gave each of them its own."""
    for group in table.ties:
        owner, _, attribute = group[0].rpartition(".")
        first = module.get_submodule(owner)
        kept = first._parameters.get(attribute, first._buffers.get(attribute))
        for name in group[1:]:
            owner, _, attribute = name.rpartition(".")
            part = module.get_submodule(owner)
            home = part._parameters if attribute in part._parameters else part._buffers
            home[attribute] = kept
