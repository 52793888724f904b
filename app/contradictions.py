"""What no single field can know: fields that contradict each other, and names whose behaviour is not here yet."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from app import keys
from app.buckets import FORWARD, Bucket
from app.errors import SettingsError
from app.servable import is_floating
from app.settings import PathSettings, Range, Settings

# Names of the contract whose behaviour is not in this version: refused rather than silently ignored.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "device.kind": ("auto", "cpu"),
    "device.index": (0,),
    "readiness.depends_on": ([],),
}

# More would take longer to warm than anybody waits; each is a graph of its own to engines that compile by bucket, whose
# limits are set by this number, and a label of metrics.
MOST_BUCKETS = 1024


def contradictions(settings: Settings) -> list[str]:
    """Return every contradiction as: field, value, what is allowed."""
    checks = (
        _not_yet,
        _path_problems,
        _undeclared,
        _bucket_problems,
        _padding_problems,
        _value_problems,
        _argument_problems,
        _key_problems,
        _door_problems,
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


def _path_problems(settings: Settings) -> Iterator[str]:
    if not settings.inputs and (settings.outputs or not settings.paths):
        yield "inputs = []: say what forward takes, or name other methods under paths"
    if not settings.outputs and (settings.inputs or not settings.paths):
        yield "outputs = []: say what forward returns, or name other methods under paths"
    if not settings.inputs and settings.warmup.buckets != "all":
        yield "warmup.buckets lists buckets of forward, which has no inputs; list those of a path under paths"


def _undeclared(settings: Settings) -> Iterator[str]:
    if "required" in settings.dimensions:
        yield "dimensions.required: that name marks buckets; choose another"
    for name, path in settings.configured_paths.items():
        of_inputs = frozenset[str]().union(*(tensor.spec().symbolic for tensor in path.inputs))
        for kind, tensors in (("inputs", path.inputs), ("outputs", path.outputs)):
            for tensor in tensors:
                field = f"{_within(name)}{kind}.{tensor.name}.shape"
                for size in sorted(tensor.spec().symbolic):
                    if size not in settings.dimensions:
                        yield f"{field} names {size}, which is not in dimensions"
                    elif size not in of_inputs:
                        yield f"{field} names {size}, which is in no shape of an input of {name}"
    ranges = [settings.ranges(path) for path in settings.configured_paths.values()]
    for name in sorted(set(settings.dimensions).difference(*ranges)) if ranges else ():
        yield f"dimensions.{name} is in no input's shape, so no request can say its size"


def _within(path: str) -> str:
    """Return where the fields of a path stand."""
    return "" if path == FORWARD else f"paths.{path}."


def _bucket_problems(settings: Settings) -> Iterator[str]:
    total = sum(_count(settings, path) for path in settings.configured_paths.values())
    if total > MOST_BUCKETS:
        yield f"the configuration makes {total} buckets; allowed are {MOST_BUCKETS}, list those that matter"
        return
    for name, path in settings.configured_paths.items():
        if path.buckets != "all":
            field = "warmup.buckets" if name == FORWARD else f"paths.{name}.buckets"
            yield from _listed_problems(field, path.buckets, settings.ranges(path))


def _count(settings: Settings, path: PathSettings) -> int:
    if path.buckets == "all":
        return math.prod(len(set(limits.buckets)) for limits in settings.ranges(path).values())
    return len(path.buckets)


def _listed_problems(
    field: str, rows: Sequence[Mapping[str, int | bool]], ranges: Mapping[str, Range]
) -> Iterator[str]:
    if not rows:
        yield f"{field} = []: at least one bucket must be warmed, else ready would mean nothing"
    names: list[str] = []
    for index, row in enumerate(rows):
        sizes = {name: size for name, size in row.items() if name != "required"}
        if set(sizes) != set(ranges):
            yield f"{field}.{index} gives {sorted(sizes)}, expected are {sorted(ranges)}"
            continue
        for name, size in sizes.items():
            limits = ranges[name]
            if not limits.min <= size <= limits.max:
                yield f"{field}.{index}.{name} = {size}: allowed are {limits.min} to {limits.max}"
        names.append(Bucket(tuple((name, int(sizes[name])) for name in ranges)).name)
    yield from (f"{field} gives {name} twice" for name in sorted({one for one in names if names.count(one) > 1}))


def _padding_problems(settings: Settings) -> Iterator[str]:
    by_bucket = settings.compile.engine == "jit" or settings.compile.specialize == "bucket"
    if by_bucket and settings.uncovered == "pad":
        for name, path in settings.configured_paths.items():
            for tensor in path.inputs:
                if tensor.pad is None and tensor.spec().symbolic:
                    field = f"{_within(name)}inputs.{tensor.name}.pad"
                    yield f"{field} is not set, but uncovered: pad with one code a bucket pads it"


def _value_problems(settings: Settings) -> Iterator[str]:
    """`pad`, `low` and `high` must be values of the datatype; numpy would cut or wrap them."""
    for path_name, path in settings.configured_paths.items():
        for kind, tensors in (("inputs", path.inputs), ("outputs", path.outputs)):
            for tensor in tensors:
                spec = tensor.spec()
                for name in ("pad", "low", "high"):
                    value = getattr(spec, name)
                    if value is not None and not _fits(value, spec.dtype, beyond=name == "high"):
                        field = f"{_within(path_name)}{kind}.{tensor.name}.{name}"
                        yield f"{field} = {value}: not a value of {tensor.datatype}"


def _fits(value: float, dtype: np.dtype[Any], beyond: bool) -> bool:
    if is_floating(dtype):
        return abs(value) <= float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return float(value).is_integer() and low <= value <= high + beyond


def _argument_problems(settings: Settings) -> Iterator[str]:
    """The factory's arguments travel to child processes as JSON and must arrive as they were."""
    kwargs = settings.model.kwargs
    try:
        same = json.loads(json.dumps(kwargs)) == kwargs
    except (TypeError, ValueError):
        same = False
    if settings.model.codec_kwargs and settings.model.codec is None:
        yield f"model.codec_kwargs = {settings.model.codec_kwargs!r}: needs model.codec"
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


def _door_problems(settings: Settings) -> Iterator[str]:
    http = settings.http
    if http.port is None and http.uds is None:
        yield "http.port = None: without http.uds no request could reach the model"
    if http.admin_port is not None and http.admin_port == http.port != 0:
        yield f"http.admin_port = {http.admin_port}: is http.port; probes and metrics answer there as well"
    for given, missing in (("ssl_certfile", "ssl_keyfile"), ("ssl_keyfile", "ssl_certfile")):
        if getattr(http, given) is not None and getattr(http, missing) is None:
            yield f"http.{given} = {str(getattr(http, given))!r}: needs http.{missing}"
    if http.ssl_certfile is not None and http.port is None:
        yield f"http.ssl_certfile = {str(http.ssl_certfile)!r}: there is no http.port, and http.uds is not encrypted"
