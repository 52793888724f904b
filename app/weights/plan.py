"""What the model wants against what the checkpoint holds: a complete plan, or one error with every difference."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.checkpoints import Checkpoint, Opaque
from app.errors import CheckpointError
from app.settings import Model
from app.weights.layout import loaded_dtype


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of the skeleton; `dtype` is named as in safetensors where it has a name there.

    `stride` counts elements.

    `stored`: a checkpoint is expected to hold it (parameters and persistent buffers).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stored: bool
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Everything with data in a module, which names are one object, and which modules keep extra state."""

    tensors: tuple[ModelTensor, ...]
    ties: tuple[tuple[str, ...], ...]
    extra_state: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the table as it is kept in an artifact's manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "ModelTable":
        """Read the table from an artifact's manifest."""
        tensors = (
            ModelTensor(t["name"], t["dtype"], tuple(t["shape"]), tuple(t["stride"]), t["stored"], t["nbytes"])
            for t in found["tensors"]
        )
        return cls(tuple(tensors), tuple(tuple(names) for names in found["ties"]), tuple(found["extra_state"]))


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """How every tensor of the model gets its data.

    `sources`: name in the model → name in the checkpoint (differs for the second name of a tie).
    `rebuilt`: names that take the value of an ordinary construction. `cast`: name → stored dtype → dtype in memory.
    `extra_state`: names of the checkpoint's entries that modules take as their extra state.
    """

    sources: Mapping[str, str]
    rebuilt: tuple[str, ...]
    waived: Mapping[str, tuple[str, ...]]
    cast: Mapping[str, tuple[str, str]]
    extra_state: tuple[str, ...]


def plan_weights(table: ModelTable, checkpoint: Checkpoint, model: Model) -> WeightsPlan:
    """Match names, dtypes and shapes; raises CheckpointError listing every difference with both sides."""
    groups = {name: group for group in table.ties for name in group}
    wanted = {tensor.name: tensor for tensor in table.tensors}
    sources: dict[str, str] = {}
    rebuilt: list[str] = []
    missing: list[str] = []
    for tensor in table.tensors:
        names = (tensor.name, *groups.get(tensor.name, ()))
        held = next((name for name in names if name in checkpoint.tensors), None)
        if held and any(wanted[name].stored for name in names):
            sources[tensor.name] = held
        else:
            rebuilt.append(tensor.name)
            if tensor.stored:
                missing.append(tensor.name)
    entries = {**checkpoint.tensors, **checkpoint.objects}
    extra = tuple(name for name in table.extra_state if name in entries)
    lacking = [name for name in table.extra_state if name not in entries]
    used = set(sources.values()) | set(sources) | set(extra)
    unexpected = [name for name in entries if name not in used]
    waive = model.waive
    problems = [
        *(_missing(wanted[name], groups.get(name, ())) for name in missing if not waive.allows_missing(name)),
        *(_no_state(name) for name in lacking if not waive.allows_missing(name)),
        *(_unread_state(name, checkpoint.objects.get(name)) for name in extra if _is_unread(checkpoint, name)),
        *(_unexpected(name, checkpoint) for name in unexpected if not waive.allows_unexpected(name)),
        *_differences(wanted, sources, checkpoint, model.cast),
    ]
    if problems:
        told = f"{checkpoint.path} does not fit the model: {len(problems)} problem(s)"
        raise CheckpointError(told, [*_prefix_hint(missing, unexpected), *problems])
    waived = {"missing": (*missing, *lacking), "unexpected": tuple(unexpected)}
    return WeightsPlan(
        sources,
        tuple(rebuilt),
        {kind: names for kind, names in waived.items() if names},
        dict(_casts(sources, checkpoint, model.cast)),
        extra,
    )


def rebuilt_bytes(table: ModelTable, plan: WeightsPlan) -> int:
    """Return the bytes of what takes the value of an ordinary construction; a tie counts once."""
    shared = {name: group[0] for group in table.ties for name in group}
    rebuilt = {shared.get(name, name) for name in plan.rebuilt}
    return sum(tensor.nbytes for tensor in table.tensors if tensor.name in rebuilt)


def _missing(tensor: ModelTensor, tied: tuple[str, ...]) -> str:
    also = f" nor under the tied {', '.join(n for n in tied if n != tensor.name)}" if tied else ""
    return (
        f"missing: {tensor.name} {tensor.dtype}{list(tensor.shape)} is in the model, not in the checkpoint{also}; "
        f"is it the checkpoint of this architecture? (model.waive.missing accepts it)"
    )


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> Iterator[str]:
    """Say it where names differ by what stands in front: the factory builds a part of what was saved, or more of it."""
    for longer, shorter, where in ((unexpected, frozenset(missing), "file"), (missing, frozenset(unexpected), "model")):
        parts = (name.split(".") for name in longer)
        fronts = Counter(
            ".".join(part[:count])
            for part in parts
            for count in range(1, len(part))
            if ".".join(part[count:]) in shorter
        )
        for front, count in fronts.most_common(1):
            yield (
                f"prefix: {front}. stands in front of {count} name(s) in the {where} that are the same without it; let "
                f"the factory build the class whose checkpoint this is"
            )


def _no_state(name: str) -> str:
    return (
        f"missing: {name} (state of a module beside its tensors) is in the model, not in the checkpoint "
        f"(model.waive.missing leaves the module as its constructor made it)"
    )


def _is_unread(checkpoint: Checkpoint, name: str) -> bool:
    return isinstance(checkpoint.objects.get(name), Opaque)


def _unread_state(name: str, value: Any) -> str:
    return (
        f"state: {name} is a {value.what}, which is not read from this format; let get_extra_state return a tensor or "
        f"plain values, or waive it as missing and leave it out of the checkpoint"
    )


def _unexpected(name: str, checkpoint: Checkpoint) -> str:
    entry = checkpoint.tensors.get(name)
    if entry is None:
        what = f"{name} (no tensor) is in the checkpoint"
    else:
        file = checkpoint.files[entry.pieces[0].file if entry.pieces else entry.file].path.name
        what = f"{name} {entry.dtype}{list(entry.shape)} is in {file}"
    return f"unexpected: {what}, not in the model (model.waive.unexpected accepts it)"


def _differences(
    wanted: Mapping[str, ModelTensor], sources: Mapping[str, str], checkpoint: Checkpoint, cast: str | None
) -> Iterator[str]:
    for name, source in sources.items():
        tensor, entry = wanted[name], checkpoint.tensors[source]
        file = checkpoint.files[entry.pieces[0].file if entry.pieces else entry.file].path.name
        if entry.shape != tensor.shape:
            yield f"shape: {name} is {list(tensor.shape)} in the model, {list(entry.shape)} in {file}"
        if loaded_dtype(entry, cast) != tensor.dtype:
            yield (
                f"dtype: {name} is {tensor.dtype} in the model, {entry.dtype} in {file}; let the factory build the "
                f"module in the stored dtype, or set model.dtype to cast every floating-point tensor"
            )


def _casts(
    sources: Mapping[str, str], checkpoint: Checkpoint, cast: str | None
) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, source in sources.items():
        entry = checkpoint.tensors[source]
        if loaded_dtype(entry, cast) != entry.dtype:
            yield name, (entry.dtype, loaded_dtype(entry, cast))
