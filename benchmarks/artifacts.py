"""Compile artifacts on the example: restoring, steady speed, what the sealed directory adds, and a fleet's first start.

`python -m benchmarks.artifacts NAME DIR` takes one figure in a process of its own and prints a JSON object.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from app import configure
from app.artifacts import Compiled, Missed, Restored, Uncompiled
from app.artifacts.opening import open_store
from app.artifacts.seal import read_manifest, seal
from app.buckets import Route
from app.commands import run_part
from app.identity import ArtifactIdentity
from app.progress import Progress
from app.samples import sample_inputs
from app.serving.forward import Forward
from app.settings import Settings
from app.signing import keygen
from app.stages import STARTUP
from app.stages.bind_engine import BoundEngine, bind_engine
from app.stages.install_weights import install_weights
from app.weights import LoadedModel, ResidentWeights
from benchmarks.process import EXAMPLE, Sidecar, figure, ready_times
from benchmarks.table import Row

RESTORES = 5
WARM_STARTS = 3
FLEET = 8
# Seconds for each bucket, ours and theirs in turn, and at least this many runs of each.
STEADY_S = 20.0
STEADY_RUNS = 20


def measure_artifacts(directory: Path) -> Iterator[Row]:
    """Yield the rows."""
    keygen(directory / "key")
    build_s = _build(directory, "aot")["build_s"]
    restored = statistics.median(figure(__name__, "restore", directory)["restore_s"] for _ in range(RESTORES))
    what = "restore of aot: signature and hashes verified, opened, weights bound"
    yield Row(what, restored * 1e3, 60, "ms", "60 ms")
    yield Row("… the same", restored * 1e3, build_s * 10, "ms", f"1/100 of the build of {build_s:.1f} s")
    yield from _steady_rows(directory, "aot", "torch's own runner of the same library")
    _build(directory, "jit")
    yield from _steady_rows(directory, "jit", "torch.compile of the same module")
    yield _directory_row(directory)
    yield from _fleet_rows(directory)


def _build(directory: Path, engine: str) -> Any:
    """Build the code of one engine into a store of its own, signed, by a start; return its timings."""
    with Sidecar(directory / engine, *_assignments(directory, engine)) as sidecar:
        sidecar.wait()
        found = sidecar.status()["artifacts"]
        if (found["engine"], found["outcome"]) != (engine, "rebuilt"):
            raise SystemExit(f"not a build of {engine}: {found}")
    return read_manifest(directory / engine / found["identity"].removeprefix("sha256:"))["timings"]


def _assignments(directory: Path, engine: str) -> list[str]:
    return [
        f"compile.artifacts={directory / engine}",
        f"compile.engine={engine}",
        f"compile.signing_key={directory / 'key'}",
        f"compile.public_keys=[{directory / 'key.pub'}]",
        "compile.require_signature=true",
    ]


def _steady_rows(directory: Path, engine: str, text: str) -> Iterator[Row]:
    for bucket, (ours_s, bare_s) in figure(__name__, f"steady-{engine}", directory).items():
        what = f"steady speed of {engine}, {bucket}"
        yield Row(what, ours_s * 1e3, 1.02 * bare_s * 1e3, "ms", f"1.02 × {text}, {bare_s * 1e3:.4g} ms")


def _directory_row(directory: Path) -> Row:
    whole = statistics.median(_restart_s(directory, "jit") for _ in range(WARM_STARTS))
    _leave_blob_alone(directory / "jit")
    blob_s = _restart_s(directory, "jit", "compile.require_signature=false", "compile.public_keys=[]")
    text = f"0.35 × the same with torch's mega-cache alone, {blob_s:.1f} s"
    return Row("warm restart with jit: exec → /readyz 200", whole, 0.35 * blob_s, "s", text)


def _restart_s(directory: Path, engine: str, *more: str) -> float:
    with Sidecar(directory / engine, *_assignments(directory, engine), *more) as sidecar:
        seconds = sidecar.wait()
        if (found := sidecar.status()["artifacts"])["layers"][0]["result"] != "hit":
            raise SystemExit(f"not a warm start: {found}")
    return seconds


def _leave_blob_alone(store: Path) -> None:
    """Seal the artifact anew without the directory of caches: what `torch.compiler.load_cache_artifacts` brings."""
    (artifact,) = (path for path in store.iterdir() if (path / "manifest.json").exists())
    manifest = read_manifest(artifact)
    (artifact / "manifest.json").unlink()
    (artifact / "manifest.sig").unlink()
    for path in sorted((artifact / "inductor").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    own = {"format", "digest", "identity", "files", "content_sha256"}
    seal(artifact, ArtifactIdentity(manifest["identity"]), {k: v for k, v in manifest.items() if k not in own})


def _fleet_rows(directory: Path) -> Iterator[Row]:
    store = directory / "fleet"
    with ExitStack() as stack:
        fleet = [
            stack.enter_context(Sidecar(store, f"report.file={directory}/{n}.json", "compile.engine=aot"))
            for n in range(FLEET)
        ]
        first, *_, last = ready_times(fleet, every_s=0.05)
        outcomes = [sidecar.status()["artifacts"]["outcome"] for sidecar in fleet]
    what = f"{FLEET} processes on an empty store"
    yield Row(f"{what}: builds", outcomes.count("rebuilt"), 1, "", "one; the others restore")
    yield Row(f"{what}: last ready", last, 1.3 * first, "s", f"1.3 × the first, {first:.1f} s")


def restore(directory: Path) -> dict[str, float]:
    """Verify, open and bind what is in the store, for the first time in this process."""
    settings = _settings(directory, "aot")
    values = run_part(STARTUP.until(ResidentWeights, Restored | Missed), settings, lambda _: None).values
    found, resident = values[Restored | Missed], values[ResidentWeights]
    began = time.perf_counter()
    again = open_store(settings.compile).find(found.artifact.identity, settings.model.checkpoint)
    if not isinstance(again, Restored):
        raise SystemExit(again.why)
    code = Compiled(again.artifact, "restored", again.layers)
    loaded = install_weights.run(settings, resident, code, None, Progress())
    bind_engine.run(settings, loaded, code, Progress())
    return {"restore_s": time.perf_counter() - began}


def _settings(directory: Path, engine: str) -> Settings:
    return configure.load(EXAMPLE, _assignments(directory, engine))


def steady(directory: Path, engine: str) -> dict[str, tuple[float, float]]:
    """Return bucket → seconds of our forward and of torch's own call on the same arrays, in turn in one process."""
    import torch

    settings = _settings(directory, engine)
    values = run_part(STARTUP.until(BoundEngine), settings, lambda _: None).values
    bound: BoundEngine = values[BoundEngine]
    bare = BARE[engine](values)
    found = {}
    for bucket in settings.buckets:
        arrays = sample_inputs(settings.model_paths[0].inputs, dict(bucket.sizes), seed=bucket.name)
        route = Route.exactly(bucket)

        def theirs(arrays: Any = arrays) -> None:
            with torch.inference_mode():
                bare([torch.from_numpy(array) for array in arrays.values()]).numpy()

        def ours(forward: Forward = bound.forward, arrays: Any = arrays, route: Route = route) -> None:
            forward(arrays, route)

        found[bucket.name] = _in_turn(ours, theirs)
    return found


def _in_turn(ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of both; each round runs both, and the next one in the other order."""
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for call in (ours, theirs, ours, theirs):
        call()
    until, order = time.monotonic() + STEADY_S, [ours, theirs]
    while time.monotonic() < until or len(times[ours]) < STEADY_RUNS:
        for call in order:
            began = time.perf_counter()
            call()
            times[call].append(time.perf_counter() - began)
        order.reverse()
    return statistics.median(times[ours]), statistics.median(times[theirs])


def runner(values: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    """Return AOTInductor as torch runs it: its own object on the same library and the same weights."""
    import torch

    code, loaded = values[Compiled | Uncompiled], values[LoadedModel]
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(code.artifact.path / "model-0.so"), 1)
    names = runner.get_constant_names_to_original_fqns()
    runner.update_constant_buffer({own: loaded.tensors[name] for own, name in names.items()}, False, True, True)
    return lambda tensors: runner.run(tensors)[0]


def _compiled(values: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    """Return torch.compile of the installed module, as a script would call it."""
    import torch

    compiled = torch.compile(values[LoadedModel].module, dynamic=False)
    return lambda tensors: compiled(*tensors)


BARE = {"aot": runner, "jit": _compiled}

FIGURES: dict[str, Callable[[Path], Any]] = {
    "restore": restore,
    "steady-aot": lambda directory: steady(directory, "aot"),
    "steady-jit": lambda directory: steady(directory, "jit"),
}

if __name__ == "__main__":
    print(json.dumps(FIGURES[sys.argv[1]](Path(sys.argv[2]))))
