"""What no single field can know: fields that contradict each other, and names whose behaviour is not here yet."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from app import keys
from app.errors import SettingsError
from app.settings import Settings

# Names of the contract whose behaviour is not in this version: refused rather than silently ignored.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "model.codec": (None,),
    "device.kind": ("auto", "cpu"),
    "device.index": (0,),
    "serving.max_batch_delay_ms": (2, 0),
    "readiness.depends_on": ([],),
}

# More would take longer to warm than anybody waits; each is a graph of its own to engines that compile by bucket, whose
# limits are set by this number, and a label of metrics.
MOST_BUCKETS = 1024


def contradictions(settings: Settings) -> list[str]:
    """Return every contradiction as: field, value, what is allowed."""
    checks = (
        _not_yet,
        _undeclared,
        _bucket_problems,
        _padding_problems,
        _value_problems,
        _argument_problems,
        _key_problems,
    )
    return [problem for check in checks for problem in check(settings)]


def _not_yet(settings: Settings) -> Iterator[str]:
    for field, allowed in NOT_YET.items():
        value: Any = settings
        for part in field.split("."):
            value = getattr(value, part)
        if value not in allowed:
            shown = " or ".join("null" if a is None else str(a) for a in allowed)
            yield f"{field} = {value!r}: this version offers {shown}"


def _undeclared(settings: Settings) -> Iterator[str]:
    if "required" in settings.dimensions:
        yield "dimensions.required: that name marks buckets; choose another"
    used = set()
    for kind, tensors in (("inputs", settings.inputs), ("outputs", settings.outputs)):
        for tensor in tensors:
            names = {size for size in tensor.shape if isinstance(size, str)}
            for name in sorted(names - set(settings.dimensions)):
                yield f"{kind}.{tensor.name}.shape names {name}, which is not in dimensions"
            used |= names if kind == "inputs" else set()
    for name in sorted(set(settings.dimensions) - used):
        yield f"dimensions.{name} is in no input's shape, so no request can say its size"


def _bucket_problems(settings: Settings) -> Iterator[str]:
    if settings.warmup.buckets == "all":
        count = math.prod(len(set(limits.buckets)) for limits in settings.dimensions.values())
        if count > MOST_BUCKETS:
            yield f"warmup.buckets = 'all': makes {count} buckets; allowed are {MOST_BUCKETS}, list those that matter"
        return
    if len(settings.warmup.buckets) > MOST_BUCKETS:
        yield f"warmup.buckets lists {len(settings.warmup.buckets)} buckets; allowed are {MOST_BUCKETS}"
        return
    if not settings.warmup.buckets:
        yield "warmup.buckets = []: at least one bucket must be warmed, else ready would mean nothing"
    names = [bucket.name for bucket in settings.buckets] if _complete(settings) else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"warmup.buckets gives {name} twice"
    for index, row in enumerate(settings.warmup.buckets):
        sizes = {name: size for name, size in row.items() if name != "required"}
        if set(sizes) != set(settings.dimensions):
            yield f"warmup.buckets.{index} gives {sorted(sizes)}, expected are {sorted(settings.dimensions)}"
            continue
        for name, size in sizes.items():
            limits = settings.dimensions[name]
            if not limits.min <= size <= limits.max:
                yield f"warmup.buckets.{index}.{name} = {size}: allowed are {limits.min} to {limits.max}"


def _complete(settings: Settings) -> bool:
    """Every listed bucket has a size for every dimension."""
    return all(set(row) - {"required"} == set(settings.dimensions) for row in settings.warmup.buckets)


def _padding_problems(settings: Settings) -> Iterator[str]:
    by_bucket = settings.compile.engine == "jit" or settings.compile.specialize == "bucket"
    if by_bucket and settings.uncovered == "pad":
        for tensor in settings.inputs:
            if tensor.pad is None and any(isinstance(size, str) for size in tensor.shape):
                yield f"inputs.{tensor.name}.pad is not set, but uncovered: pad with one code a bucket pads it"


def _value_problems(settings: Settings) -> Iterator[str]:
    """`pad`, `low` and `high` must be values of the datatype; numpy would cut or wrap them."""
    for kind, tensors in (("inputs", settings.inputs), ("outputs", settings.outputs)):
        for tensor in tensors:
            spec = tensor.spec()
            for name in ("pad", "low", "high"):
                value = getattr(spec, name)
                if value is not None and not _fits(value, spec.dtype, beyond=name == "high"):
                    yield f"{kind}.{tensor.name}.{name} = {value}: not a value of {tensor.datatype}"


def _fits(value: float, dtype: np.dtype[Any], beyond: bool) -> bool:
    if dtype.kind == "f":
        return abs(value) <= float(np.finfo(dtype).max)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return float(value).is_integer() and low <= value <= high + beyond


def _argument_problems(settings: Settings) -> Iterator[str]:
    """The factory's arguments travel to child processes as JSON and must arrive as they were."""
    kwargs = settings.model.kwargs
    try:
        same = json.loads(json.dumps(kwargs)) == kwargs
    except (TypeError, ValueError):
        same = False
    if not same:
        yield f"model.kwargs = {kwargs!r}: only what JSON can carry (names, numbers, texts, lists, mappings by text)"


def _key_problems(settings: Settings) -> Iterator[str]:
    """Keys that cannot be used, and a key whose signatures this configuration would reject."""
    trusted = set()
    if settings.compile.require_signature and not settings.compile.public_keys:
        yield "compile.require_signature = True: needs compile.public_keys, the keys whose signatures count"
    for index, file in enumerate(settings.compile.public_keys):
        try:
            trusted.add(keys.key_id(keys.read_public(file)))
        except SettingsError as error:
            yield f"compile.public_keys.{index} = {str(file)!r}: {error}"
    signing = settings.compile.signing_key
    if signing is None:
        return
    try:
        signer = keys.key_id(keys.read_private(signing).public_key())
    except SettingsError as error:
        yield f"compile.signing_key = {str(signing)!r}: {error}"
        return
    if trusted and signer not in trusted:
        yield (
            f"compile.signing_key = {str(signing)!r}: is key {signer}, which is not among compile.public_keys "
            f"({', '.join(sorted(trusted))}), so what it signs would be rejected"
        )
