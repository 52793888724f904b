"""A compiled AOTInductor library through its C interface: runs without the interpreter lock.

torch's own runner object keeps the lock for the whole run (pytorch#197516, torch 2.11 to 2.14), so no probe would be
answered while a batch computes. The library exports a plain C interface (torch/csrc/inductor/aoti_runtime/interface.h)
that foreign function calls reach without the lock. Handles are pointers to tensors; torch._C._aoti converts them.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from app.errors import ArtifactError

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = (ctypes.py_object,), ctypes.c_char_p


_BIND = "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs"


class _Entry(ctypes.Structure):
    """AOTInductorConstantMapEntry."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class Container:
    """One loaded library with one model instance."""

    def __init__(self, library: Path) -> None:
        self._path = library
        self._library = ctypes.CDLL(str(library))
        self._handle = ctypes.c_void_p()
        self._call(
            "AOTInductorModelContainerCreateWithDevice", ctypes.byref(self._handle), ctypes.c_size_t(1), b"cpu", None
        )
        # Prepared once: after a run the interpreter's own code is out of the processor's caches, and each step is dear.
        self._given = (ctypes.c_void_p * self._count("AOTInductorModelContainerGetNumInputs"))()
        self._taken = (ctypes.c_void_p * self._count("AOTInductorModelContainerGetNumOutputs"))()
        self._run = self._library.AOTInductorModelContainerRun
        self._name = _name_of_handles()
        self._arguments = (
            self._handle,
            self._given,
            ctypes.c_size_t(len(self._given)),
            self._taken,
            ctypes.c_size_t(len(self._taken)),
            None,
            None,
        )

    @classmethod
    def open(cls, library: Path) -> Self:
        """Load the library; raises ArtifactError when it is none, or of another version of the interface."""
        try:
            return cls(library)
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"{library} cannot be opened: {error}; build the artifact anew") from error

    @property
    def binds_by_reference(self) -> bool:
        """The library can be given constants without torch's runner; older versions of the interface cannot."""
        return hasattr(self._library, _BIND)

    def constants(self) -> dict[str, str]:
        """Return the library's own names of its constants → their names in the module."""
        names = {}
        for index in range(self._count("AOTInductorModelContainerGetNumConstants")):
            own = self._text("AOTInductorModelContainerGetConstantName", index)
            names[own] = self._text("AOTInductorModelContainerGetConstantOriginalFQN", index)
        return names

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give every constant its tensor by reference; without them the first run is a segmentation fault."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors.values()))
        entries = (_Entry * len(capsules))(
            *(
                _Entry(name.encode(), _pointer(capsule, self._name))
                for name, capsule in zip(tensors, capsules, strict=True)
            )
        )
        try:
            # use_inactive: false; validate_full_update: true, so that a forgotten constant is an error.
            count = ctypes.c_size_t(len(entries))
            flags = (ctypes.c_bool(False), ctypes.c_bool(True))
            self._call(_BIND, self._handle, entries, count, *flags)
        finally:
            torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)  # the library made handles of its own

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on contiguous inputs whose dtypes and shapes the caller has checked: the library checks nothing."""
        self._given[:] = [
            _pointer(capsule, self._name)
            for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(inputs))
        ]
        self._check("AOTInductorModelContainerRun", self._run(*self._arguments))
        taken = [_capsule(pointer, self._name, None) for pointer in self._taken]
        return list(torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(taken))

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, result: int) -> None:
        if result != 0:
            message = ctypes.c_char_p()
            self._library.AOTInductorGetLastError(ctypes.byref(message))
            told = (message.value or b"no message").decode(errors="replace")
            raise RuntimeError(f"{self._path.name}: {function} failed: {told}")

    def _count(self, function: str) -> int:
        found = ctypes.c_size_t()
        self._call(function, self._handle, ctypes.byref(found))
        return found.value

    def _text(self, function: str, index: int) -> str:
        found = ctypes.c_char_p()
        self._call(function, self._handle, ctypes.c_size_t(index), ctypes.byref(found))
        return (found.value or b"").decode()


def _name_of_handles() -> bytes | None:
    """Return the name that this version of torch gives its capsules of handles."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([torch.empty(0)])
    name: bytes | None = _capsule_name(capsules[0])
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return name
