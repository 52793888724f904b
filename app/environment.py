"""The environment of compilers and child processes; with `configure` the only readers of os.environ."""

import os
from collections.abc import Mapping
from pathlib import Path


def compiler_environment() -> dict[str, str]:
    """Return the variables that change what torch compiles.

    The compiler is not among them: code is restored on machines that have none. The manifest records what built it.
    """
    names = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "AOT_INDUCTOR", "ATEN_CPU_CAPABILITY")
    # Where caches lie and how many threads fill them says nothing about what is in them.
    ignored = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(names) and k not in ignored}


def place_compiler_caches(inductor: Path, triton: Path) -> None:
    """Say where torch's compilers keep their caches from now on; they look it up each time."""
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(triton)})


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with additions."""
    return {**os.environ, **extra}
