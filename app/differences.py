"""Say in words how two identities differ: `torch 2.13.0 → 2.14.1`, never one hash and another."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.errors import printable

Fields = Mapping[str, Any]
ABSENT: Any = ...

# More would be read by nobody; the number left out is told.
MOST_ROWS = 40
NAMED = 3

LABELS: Mapping[str, str] = {
    "torch_code": "torch's own code",
    "python_implementation": "python implementation",
    "python_abi": "python ABI",
    "c_library": "C library",
    "cxx_library": "C++ library",
    "warmgate.version": "warmgate",
    "warmgate.code": "warmgate's own code",
    "device.architecture": "processor architecture",
    "device.capability": "processor capability",
    "device.features": "processor features",
    "device.threads": "threads",
    "compile.engine": "engine",
    "compile.specialize": "compile.specialize",
    "model.factory": "model.factory",
    "model.dtype": "model.dtype",
    "model.waive_missing": "model.waive.missing",
    "model.config": "config.json",
}
PREFIXES: Mapping[str, str] = {
    "model.kwargs_files.": "file",
    "model.kwargs.": "argument",
    "model.sources.": "model source",
    "environment.": "variable",
    "dimensions.": "dimension",
    "example_sizes.": "example size of",
    "numerics.": "numerics",
    "paths.": "path",
    "tensors.": "tensor",
}
_FEATURES = "device.features"
_PACKAGES = "model.sources."
_TENSORS = "tensors."
_DIGEST = re.compile(r"[0-9a-f]{64}")


def tell(stored: Fields, wanted: Fields) -> tuple[str, ...]:
    """Return one text for each field that differs, in the order of the fields; empty exactly when none does."""
    before, after = dict(flat(stored)), dict(flat(wanted))
    names = [*before, *(name for name in after if name not in before)]
    differing = [n for n in names if _canonical(before.get(n, ABSENT)) != _canonical(after.get(n, ABSENT))]
    # An empty section against one with fields: the fields say it better.
    rows = [n for n in differing if not any(other.startswith(f"{n}.") for other in differing)]
    tensors = [n for n in rows if n.startswith(_TENSORS)]
    told = [_row(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in rows if n not in set(tensors)]
    told += _tensor_rows(tensors, before, after)
    more = len(told) - MOST_ROWS
    told = told if more <= 0 else [*told[:MOST_ROWS], f"{more} more"]
    return tuple(map(printable, told))


def label(name: str) -> str:
    """Return what people call a field."""
    if name in LABELS:
        return LABELS[name]
    for prefix, word in PREFIXES.items():
        if name.startswith(prefix):
            return f"{word} {name.removeprefix(prefix)}"
    return name.replace(".", " ").replace("_", " ")


def flat(fields: Fields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field by its path, `device.threads`; an empty section is a field."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _row(name: str, before: Any, after: Any) -> str:
    if name == _FEATURES and (text := _features(before, after)):
        return text
    named = label(name)
    digests = [value for value in (before, after) if isinstance(value, str) and _DIGEST.fullmatch(value)]
    if len(digests) == 2:
        return f"{named} changed"
    if digests and (before in (None, ABSENT) or after in (None, ABSENT)):
        return f"{named} is {'gone' if after in (None, ABSENT) else 'new'}"
    if name.startswith(_PACKAGES) and not digests:
        package = name.removeprefix(_PACKAGES)
        before, after = (v.removeprefix(f"{package} ") if isinstance(v, str) else v for v in (before, after))
        named = f"package {package}"
    return f"{named} {' → '.join(_values(before, after))}"


def _features(before: Any, after: Any) -> str:
    old, new = ({*value.split()} if isinstance(value, str) else set() for value in (before, after))
    lacking, added = sorted(old - new), sorted(new - old)
    parts = [*([f"lacks {', '.join(lacking)}"] if lacking else []), *([f"has {', '.join(added)}"] if added else [])]
    return f"the processor {' and '.join(parts)}" if parts else ""


def _tensor_rows(names: Sequence[str], before: Fields, after: Fields) -> Iterator[str]:
    """Yield the first of each kind by name, and how many there are besides."""
    changed = [n for n in names if n in before and n in after]
    yield from (_row(n, before[n], after[n]) for n in changed[:NAMED])
    if len(changed) > NAMED:
        yield f"{len(changed) - NAMED} more tensors differ"
    for word, found in (("more", [n for n in names if n not in before]), ("fewer", [n for n in names if n in before])):
        only = [n.removeprefix(_TENSORS) for n in found if n not in changed]
        if only:
            shown = ", ".join(only[:NAMED]) + (", …" if len(only) > NAMED else "")
            yield f"{len(only)} tensor{'s' if len(only) > 1 else ''} {word}: {shown}"


def _values(before: Any, after: Any) -> tuple[str, str]:
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if _canonical(a) != _canonical(b)]
        before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    texts = _short(_text(before)), _short(_text(after))
    # The number 1 and the text 1 look alike, and so do null and nothing.
    return texts if texts[0] != texts[1] else (_short(_canonical(before)), _short(_canonical(after)))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return "nothing" if value is ABSENT else json.dumps(value)


def _canonical(value: Any) -> str:
    """Return what the key is made of; an absent field is nothing that JSON knows."""
    return "" if value is ABSENT else json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}…{hashlib.sha256(text.encode()).hexdigest()[:8]}"
