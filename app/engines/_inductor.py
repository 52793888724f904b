"""torch.compile's caches as one sealed thing: one local directory, one tag, and what each layer said.

Keys of torch hold the tag, so a cache of one identity answers for no other (2.11 to 2.14 leave the instruction set out
of them). The directory holds more than the blob of `torch.compiler.save_cache_artifacts`: the compiled C++ objects.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from app import environment
from app.artifacts import DEVICE_GRAPH, Layer
from app.errors import ArtifactError
from app.private import private_directory

DIRECTORY, BLOB = "inductor", "cache.bin"
# What belongs to one process and machine.
_PROCESS_BOUND = shutil.ignore_patterns("*.lock", "locks", ".*.tmp", "precompiled_headers")


def live_directory(key: str) -> Path:
    """Return where the caches of one identity lie: local and private; raises ArtifactError."""
    return private_directory() / key[:32]


def prepare(key: str, buckets: int, threads: int) -> Path:
    """Point torch's compiler at the directory of this identity and return it; nothing is compiled yet.

    `threads`: how many compilers may run at once. One also keeps torch from starting worker processes.
    """
    live = live_directory(key)
    environment.place_compiler_caches(live / DIRECTORY, live / "triton")
    import torch._dynamo.config
    import torch._inductor.config
    import torch.compiler.config

    torch.compiler.config.cache_key_tag = key[:32]
    # Each bucket is a graph of its own; past the limit torch would run the module as it is written, for ever.
    torch._dynamo.config.recompile_limit = max(8, 2 * buckets + 2)
    torch._dynamo.config.accumulated_recompile_limit = max(256, 64 * buckets)
    torch._dynamo.config.automatic_dynamic_shapes = False
    # Else `float(x.sum())` leaves the graph, and what follows is compiled for its value: once a request, for ever.
    torch._dynamo.config.capture_scalar_outputs = True
    torch._inductor.config.compile_threads = threads
    torch._inductor.config.cpp.vec_isa_ok = True
    torch._inductor.config.cpp_cache_precompile_headers = False
    return live


def collect(live: Path, payload: Path) -> None:
    """Copy the caches of this process into a payload, without what belongs to this process alone."""
    import torch

    try:
        shutil.copytree(live / DIRECTORY, payload / DIRECTORY, ignore=_PROCESS_BOUND)
    except OSError as error:
        raise ArtifactError(f"torch's caches cannot be copied to {payload}: {_briefly(error)}") from error
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise ArtifactError("torch.compile cached nothing: the model has nothing that can be compiled")
    (payload / BLOB).write_bytes(saved[0])


def restore(payload: Path, live: Path) -> None:
    """Put verified caches in their place, complete or not at all; raises ArtifactError."""
    import torch

    try:
        with tempfile.TemporaryDirectory(dir=live.parent, prefix=".restoring-") as temporary:
            whole = Path(temporary) / "whole"
            whole.mkdir(mode=0o700)
            shutil.copytree(payload / DIRECTORY, whole / DIRECTORY)
            if live.exists():
                live.rename(Path(temporary) / "old")
            whole.rename(live)
        blob = (payload / BLOB).read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"torch's caches cannot be restored to {live}: {_briefly(error)}; is the disk full?"
        ) from error
    if torch.compiler.load_cache_artifacts(blob) is None:
        raise ArtifactError(f"{payload / BLOB} is not what this version of torch reads; build the artifact anew")


def _briefly(error: OSError) -> str:
    """Tell one failure of many: copying a tree collects all of them into one error of any length."""
    many = isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list)
    return str(error.args[0][0][-1] if many else error)[:300]


def objects(live: Path) -> frozenset[str]:
    """Return the compiled objects in a directory of caches."""
    return frozenset(str(path.relative_to(live)) for path in live.rglob("*.so"))


def layers(restored: frozenset[str], now: frozenset[str], expected: Mapping[str, int]) -> tuple[Layer, ...]:
    """Say what each layer of this process's caches did; `expected`: layer → look-ups that must hit."""
    from torch._dynamo.utils import counters

    graphs, autograd, inductor = counters["stats"], counters["aot_autograd"], counters["inductor"]
    compiled = len(now - restored)
    return (
        Layer("dynamo", "bypass", "graphs are traced in each process", graphs["unique_graphs"]),
        _lookups("aotautograd", autograd, "autograd_cache", expected),
        _lookups("fx-graph", inductor, "fxgraph_cache", expected),
        Layer("autotune", "bypass", "nothing is tuned on a cpu", 0),
        Layer("triton-bundle", "bypass", "no Triton code on a cpu", 0),
        Layer("cpp-objects", "miss", "compiled by this process", compiled)
        if compiled
        else Layer("cpp-objects", "hit" if now else "bypass", "", len(now)),
        DEVICE_GRAPH,
    )


def _lookups(name: str, counts: Mapping[str, int], prefix: str, expected: Mapping[str, int]) -> Layer:
    hit, miss, bypass = (counts[f"{prefix}_{result}"] for result in ("hit", "miss", "bypass"))
    missed = miss + counts[f"{prefix}_guard_miss"]
    if missed:
        return Layer(name, "miss", f"{missed} of {hit + missed} graphs were not in the cache", missed)
    if hit < expected.get(name, 0):
        return Layer(name, "miss", f"{hit} graphs were looked up, {expected[name]} were sealed", hit)
    return Layer(name, "hit", "", hit) if hit else Layer(name, "bypass", "no graph was looked up", bypass)
