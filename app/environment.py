"""The environment of compilers and child processes; with `configure` the only readers of os.environ."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Read by torch's exporter, compiler and code generator (names found in its sources, 2.11 to 2.14) ...
_COMPILE = (
    "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TORCH_INDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "TORCH_DYNAMO_",
    "TORCHEXPORT_", "TORCH_FAKE_TENSOR_", "AOT_INDUCTOR", "AOTINDUCTOR_", "AOTI_", "TENSORIFY_PYTHON_SCALARS",
    "TORCH_CACHING_PRECOMPILE", "TORCH_STRICT_PRECOMPILE", "TRITON_", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
# ... and by the operators that compiled code calls: they choose instructions and precision by these.
_OPERATORS = ("ATEN_CPU_CAPABILITY", "ONEDNN_", "DNNL_", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKLDNN_")
# Where caches lie, who fills them, and what is printed meanwhile says nothing about the code; torch's own keys leave
# the same out. The first three are given to the child by this program, whatever they were.
_IGNORED = frozenset({
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK",
    "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT", "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE", "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE", "TORCHINDUCTOR_REDIS_URL", "TORCHINDUCTOR_REDIS_HOST",
    "TORCHINDUCTOR_REDIS_PORT", "TORCHINDUCTOR_WORKER_START", "TORCHINDUCTOR_WORKER_LOGPATH",
    "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING", "TORCH_COMPILE_DEBUG", "TRITON_CACHE_DIR", "TRITON_HOME",
    "ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKLDNN_VERBOSE",
})  # fmt: skip

# Of 1,000 to 300,000 (GNU's own), on 2 cores: as fast as any for requests that come 0 and 20 ms after each other (fewer
# cost up to half of a small one), a quarter less processor time, and four replicas at once are ready in half the time.
_SPINS = "10000"


def compiler_environment() -> dict[str, str]:
    """Return the variables that change what torch compiles, or how the operators that the code calls compute.

    The compiler (CXX, CPATH and the like) is not among them: code is restored on machines that have none. The manifest
    records what built it. Nor are OMP_NUM_THREADS and MKL_NUM_THREADS: the identity has the threads themselves.
    """
    counted = _COMPILE + _OPERATORS
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(counted) and k not in _IGNORED}


def compiler_version() -> str | None:
    """Return the first line that the C++ compiler tells about itself; None on a machine without one."""
    try:
        done = subprocess.run(
            [os.environ.get("CXX", "g++"), "--version"],
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0]


def place_compiler_caches(inductor: Path, triton: Path) -> None:
    """Say where torch's compilers keep their caches from now on; they look it up each time."""
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(triton)})


def bound_spinning() -> None:
    """Let OpenMP's threads give up their processor soon after they have nothing to do; call it before torch is loaded.

    By itself GNU's runtime lets them spin for milliseconds (GOMP_SPINCOUNT, libgomp's manual), which takes processor
    time from whoever shares the cores, replicas that start together most of all, and counts against a container's
    quota. Who sets the policy keeps it.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with additions."""
    return {**os.environ, **extra}
