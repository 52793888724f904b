"""What the model wants against what the checkpoint holds: a complete plan, or one error with every difference."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.checkpoints import Checkpoint
from app.errors import CheckpointError
from app.settings import Waive


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of the skeleton; `dtype` is named as in safetensors.

    `stored`: a checkpoint is expected to hold it (parameters and persistent buffers).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: bool


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Everything with data in a module, and which names are one object."""

    tensors: tuple[ModelTensor, ...]
    ties: tuple[tuple[str, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the table as it is kept in an artifact's manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "ModelTable":
        """Read the table from an artifact's manifest."""
        tensors = (ModelTensor(t["name"], t["dtype"], tuple(t["shape"]), t["stored"]) for t in found["tensors"])
        return cls(tuple(tensors), tuple(tuple(names) for names in found["ties"]))


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """How every tensor of the model gets its data.

    `sources`: name in the model → name in the checkpoint (differs for the second name of a tie).
    `rebuilt`: names that take the value of an ordinary construction.
    """

    sources: Mapping[str, str]
    rebuilt: tuple[str, ...]
    waived: Mapping[str, tuple[str, ...]]


def plan_weights(table: ModelTable, checkpoint: Checkpoint, waive: Waive) -> WeightsPlan:
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
    used = set(sources.values()) | set(sources)
    unexpected = [name for name in checkpoint.tensors if name not in used]
    problems = [
        *(_missing(wanted[name], groups.get(name, ())) for name in missing if not waive.allows_missing(name)),
        *(_unexpected(name, checkpoint) for name in unexpected if not waive.allows_unexpected(name)),
        *_differences(wanted, sources, checkpoint),
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {len(problems)} problem(s)", problems)
    waived = {"missing": tuple(missing), "unexpected": tuple(unexpected)}
    return WeightsPlan(sources, tuple(rebuilt), {kind: names for kind, names in waived.items() if names})


def _missing(tensor: ModelTensor, tied: tuple[str, ...]) -> str:
    also = f" nor under the tied {', '.join(n for n in tied if n != tensor.name)}" if tied else ""
    return (
        f"missing: {tensor.name} {tensor.dtype}{list(tensor.shape)} is in the model, not in the checkpoint{also}; "
        f"is it the checkpoint of this architecture? (model.waive.missing accepts it)"
    )


def _unexpected(name: str, checkpoint: Checkpoint) -> str:
    entry = checkpoint.tensors[name]
    return (
        f"unexpected: {name} {entry.dtype}{list(entry.shape)} is in {checkpoint.files[entry.file].path.name}, "
        f"not in the model (model.waive.unexpected accepts it)"
    )


def _differences(
    wanted: Mapping[str, ModelTensor], sources: Mapping[str, str], checkpoint: Checkpoint
) -> Iterator[str]:
    for name, source in sources.items():
        tensor, entry = wanted[name], checkpoint.tensors[source]
        file = checkpoint.files[entry.file].path.name
        if entry.shape != tensor.shape:
            yield f"shape: {name} is {list(tensor.shape)} in the model, {list(entry.shape)} in {file}"
        if entry.dtype != tensor.dtype:
            yield (
                f"dtype: {name} is {tensor.dtype} in the model, {entry.dtype} in {file}; "
                f"let the factory build the module in the stored dtype"
            )
