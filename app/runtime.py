"""Import torch without stopping the event loop, and say what was imported."""

import ctypes
import importlib.machinery
import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Runtime:
    """torch is imported; versions as fields of an identity."""

    versions: dict[str, str]


def import_torch() -> Runtime:
    """Load torch's libraries without the interpreter lock, then import torch.

    A plain import holds the lock while the loader relocates several hundred megabytes (0.2 s in which no probe is
    answered); dlopen called as a foreign function lets it go, and the import then finds the libraries loaded.
    """
    _preload()
    import torch

    revision = str(torch.version.git_version)[:12]
    return Runtime(
        {"torch": f"{torch.__version__} ({revision})", "triton": _version("triton"), "numpy": _version("numpy")}
    )


def imported_modules() -> int:
    """Return how many modules are imported: the only sign of life of a long import."""
    return len(sys.modules)


def _preload() -> None:
    spec = importlib.machinery.PathFinder.find_spec("torch")
    for place in spec.submodule_search_locations or [] if spec else []:
        library = Path(place) / "lib" / "libtorch_python.so"
        if library.exists():
            dlopen = ctypes.CDLL(None).dlopen
            dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
            # A failure is left to the import, which explains it better.
            dlopen(str(library).encode(), os.RTLD_NOW)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
