"""Import torch without stopping the event loop, and say what was imported."""

import concurrent.futures
import ctypes
import hashlib
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.environment import bound_spinning
from app.numerics import numerics

# Where torch's exporter and compiler live. Their content counts, so that a file patched in place is another torch.
_COMPILER_PARTS = (
    "_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_prims", "_prims_common",
    "_refs", "_subclasses", "export", "fx",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Runtime:
    """torch is imported; `versions` of it and its companions, `numerics`: the switches as they stood after that."""

    versions: Mapping[str, str]
    numerics: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """The runtime as fields of an identity."""
        return {**self.versions, "numerics": self.numerics}


def import_torch() -> Runtime:
    """Load torch's libraries without the interpreter lock, then import torch.

    A plain import holds the lock while the loader relocates several hundred megabytes (0.2 s in which no probe is
    answered); dlopen called as a foreign function lets it go, and the import then finds the libraries loaded.
    """
    bound_spinning()
    place = _place()
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        # Beside the loader, which holds no lock either.
        code = beside.submit(_code_digest, place) if place else None
        _preload(place)
    import torch

    revision = str(torch.version.git_version)[:12]
    return Runtime(
        {
            "torch": f"{torch.__version__} ({revision})",
            "torch_code": code.result() if code else "absent",
            "triton": _version("triton"),
            "numpy": _version("numpy"),
            "cxx_library": _cxx_library(),
        },
        numerics(),
    )


def imported_modules() -> int:
    """Return how many modules are imported: the only sign of life of a long import."""
    return len(sys.modules)


def _place() -> Path | None:
    """Return torch's directory, found without importing it."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    return next((Path(place) for place in (spec.submodule_search_locations or [] if spec else [])), None)


def _preload(place: Path | None) -> None:
    library = place / "lib" / "libtorch_python.so" if place else None
    if library and library.exists():
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        # A failure is left to the import, which explains it better.
        dlopen(str(library).encode(), os.RTLD_NOW)


def _code_digest(place: Path) -> str:
    """Digest what torch was installed as, libraries and headers included, and its compiler as it lies there now."""
    digest = hashlib.sha256()
    for line in _installed_files():
        digest.update(line.encode())
    for part in _COMPILER_PARTS:
        for path in sorted((place / part).rglob("*.py")):
            digest.update(f"{path.relative_to(place)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _installed_files() -> Iterator[str]:
    """Yield torch's own files with the hashes its wheel gave them; nothing that an installer has added."""
    try:
        record = importlib.metadata.distribution("torch").read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        record = ""
    yield from sorted(line for line in record.splitlines() if line.startswith("torch/") and ",sha256=" in line)


def _cxx_library() -> str:
    """Return the file name, with its version, of the C++ library that torch has loaded and compiled code will use."""
    try:
        mapped = {line.rpartition("/")[2] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    except OSError:
        mapped = set()
    return next((name for name in sorted(mapped) if name.startswith(("libstdc++.so", "libc++.so"))), "absent")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
